"""Every key of a recipe on one page: name, type, default, unit, meaning. docs/recipes.md is generated from it.

Sections stand in the order of the data's path. None means "not given": the meaning of that is part of the key's text.
Nothing here imports torch: a wrong recipe is refused within a second.
"""

import math
import os
import types
from collections.abc import Iterator
from dataclasses import Field, FrozenInstanceError, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.process.commands import CONSOLE, program
from pipeline.process.network import BUCKET_FOLDER
from pipeline.process.user_code import CodeFolder
from pipeline.recipe.batch import StepRows

# One key a line: the page is read as a table.
# fmt: off
# ruff: noqa: RUF009




def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    form: tuple[str, str] | None = None,
    must_match: bool = False,
) -> Any:
    """Return a recipe key. above, below: the value must be greater, less. form: a text in words and as a regular
    expression for the whole of it. must_match: a run is never continued with another value."""
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below, "form": form}
    value = default() if isinstance(default, type) else default  # list and dict stand for empty ones
    metadata = {"doc": doc, **bounds, "must_match": must_match, "default": value}
    if isinstance(value, (list, dict)):
        return field(default_factory=lambda: type(value)(value), metadata=metadata)
    return field(default=value, metadata=metadata)


fixed = partial(key, must_match=True)


def section(cls: type, doc: str) -> Any:
    """Return a section within a section."""
    return field(default_factory=cls, metadata={"doc": doc})


def internal(default: Any, **how: Any) -> Any:
    """Return a field that is no key of a file: the reader or a later step of the start sets it."""
    if isinstance(default, type):
        return field(default_factory=default, metadata={"internal": True}, **how)
    return field(default=default, metadata={"internal": True}, **how)


class Section:
    """A section of a recipe: the reader fills it, and `freeze` ends that."""

    __slots__ = ("_frozen",)  # beside the keys: vars() of a section gives these alone

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise FrozenInstanceError(f"the recipe is frozen, so {name} cannot be set. Make another one: with_values(recipe, {{...}})")
        super().__setattr__(name, value)


class ReadOnlyDict(dict):
    """`train` and `model.options` of a frozen recipe."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FrozenInstanceError("the recipe is frozen. Make another one: with_values(recipe, {...})")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple:  # what copy and pickle ask
        return type(self), (dict(self),)

    def __deepcopy__(self, memo: dict) -> "ReadOnlyDict":
        return self


AnySection = TypeVar("AnySection", bound=Section)


def freeze(section: AnySection) -> AnySection:
    """Return the section, read-only from now on with all sections in it."""
    for name, value in vars(section).items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                freeze(inner)
        if type(value) is dict and name in ("train", "options"):
            object.__setattr__(section, name, ReadOnlyDict(value))
    object.__setattr__(section, "_frozen", True)
    return section


def with_values(section: AnySection, values: dict[str, Any]) -> AnySection:
    """Return the recipe (or section) with these keys, `data.batch_tokens`, set: frozen, and what does not change is shared."""
    for key_name, value in values.items():
        name, _, rest = key_name.partition(".")
        inner = getattr(section, name)
        if rest:
            value = ReadOnlyDict({**inner, rest: value}) if isinstance(inner, dict) else with_values(inner, {rest: value})
        section = replace(section, **{name: value})  # type: ignore[type-var]
    return freeze(section)


MOST_POSITIONS = 2**24  # of a row
MOST_IDS = 10_000_000  # of a tokenizer

# The built-in formats of a source (read by sources/formats.py), and whether a row gives a document or a conversation.
FORMATS = {"text": "text", "messages": "chat", "turns": "chat", "prompt_response": "chat"}
# What `columns` of a source may name: a document's text; a conversation's messages; or its prompt and response.
COLUMN_ROLES = {"text": "text", "messages": "chat", "prompt": "chat", "response": "chat", "context": "chat", "system": "chat", "history": "chat", "tools": "chat"}


# Forms of texts: in words, and as a regular expression. Whatever else they are would fail later, as something else.
FOLDER_NAME = ("a folder's name of at most 200 letters, digits and -_. that begins with a letter, digit or _", r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
STORE_FOLDER = ("the address of a store, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, no part of it empty", BUCKET_FOLDER.pattern)
FORK = ("RUN, or RUN@step as small@600", r"[^@]+(@[0-9]{1,15})?")
IMPORTABLE = ("module:attr, as mine:Task of a file mine.py in the recipe's folder", r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*")
REPOSITORY = ("NAMESPACE/NAME, of letters, digits and -_", r"[A-Za-z0-9][A-Za-z0-9_.\-]*(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)?")
LICENSE = ("a license as huggingface.co/docs/hub/repositories-licenses writes it, as apache-2.0", r"[a-z0-9][a-z0-9.+\-]*")
LANGUAGE = ("an ISO 639 code, as en", r"[a-z]{2,3}|code|multilingual")


@dataclass(kw_only=True)
class Source(Section):
    """Documents or conversations to read: `id` (a data set) or `files` (on this machine)."""

    id: str | None = key(None, "A Hub dataset; or a folder on this machine, read as `load_dataset` reads it, or as `save_to_disk` wrote it (relative to the recipe's folder, then to the working folder); or a built-in one: tandem:quickstart_text, tandem:quickstart_chat, tandem:spelling. Configurations, splits and data files are those that the `datasets` library finds.")
    files: str | list[str] | None = key(None, "Local files of parquet, arrow, jsonl, json (also one array), csv, tsv, txt or md, the last six also as .gz or .zst: a path, glob or folder, or a list of them; relative to the recipe's folder, then to the working folder. Of a folder all readable files are taken, but of one that `save_to_disk` wrote, or where `split` is not train, that split's; README.md, config.json, dataset_info.json and hidden files are left out, as `datasets` does. With `id` in the same recipe: which files of the dataset.")
    config: str | None = key(None, "The configuration (subset) of `id`; needed where it has several and none is the default.")
    split: str = key("train", "The split of `id` to read, by any name that it has (train_sft); a wrong one is refused with those that there are.")
    revision: str | None = key(None, "Branch, tag or commit of the Hub dataset; resolved to a commit once and kept in the manifest.")
    text_column: str | None = key(None, "Column that holds a document; default `text`, else the one that is recognised by looking at the rows (docs/data.md).")
    messages_column: str | None = key(None, "Column that holds a conversation's messages; default `messages`, else what is recognised by looking at the rows.")
    columns: dict[str, str] | None = key(None, "Columns by what they hold, where they have other names than the usual: {prompt: Question, response: Response}, with context, system, history and tools where there are any; {messages: chat, system: persona, tools: functions}; or {text: content}.")
    format: str | None = key(None, f"How a row becomes a document or conversation: {' | '.join(FORMATS)} | module:attr. Default: what is recognised by looking at the rows.")
    weight: float | None = key(None, "Share of the rows of a step, relative to the other sources' weights. Default 1.", above=0, maximum=1e9)
    epochs: float | None = key(None, "How many times the source is seen over the run, instead of a weight.", above=0, maximum=1e9)
    passes: int | None = key(None, "How many times an epoch reads the files, from the second time on in another order of files and of rows (within blocks of 1,024), packed anew: where a small corpus is seen many times, what comes together in a row changes. It is tokenized and stored so many times; data/epoch counts them. Default 1.", minimum=1, maximum=1000)
    at_end: Literal["repeat", "drop", "stop"] = key("repeat", "What happens when a weighted source is used up: repeat it in a new order, drop it from the mixture, or stop the run there.")
    name: str | None = key(None, "Name in tables and metrics; default the last part of id or files.")


@dataclass(kw_only=True)
class Run(Section):
    """Who this run is, where it lives, how long it trains."""

    stage: Literal["pretrain", "sft"] | None = fixed(None, "Which command the recipe is for; default: what the sources' columns and formats speak of, else the command's. The other command refuses it.")
    name: str | None = key(None, "Name of the run and its folder; default <recipe>-<6 hex digits of the keys that must match>.", form=FOLDER_NAME)
    directory: str = key("runs", "Folder that holds the run directories.")
    mirror: str | None = key(None, "Store that whole checkpoints, records and the finished model follow to while the run trains, e.g. s3://bucket/runs: the same command on an empty disk goes on from there.", form=STORE_FOLDER)
    note: str | None = key(None, "Free text for manifest, trackers and report.")
    tags: list[str] = key(list, "Labels for manifest, trackers and report. `latest:` passes over a run with one that begins with sweep:, as the runs of a sweep have it.")
    resume: int | Literal["auto", "never"] = key("auto", "auto: continue from the newest whole checkpoint if there is one; never: refuse a folder that has one, and start anew where all of them are lost; a step: go back to that checkpoint; the same command again goes on from there.", minimum=1)
    fork_from: str | None = key(None, "RUN or RUN@step: start a new run from that run's whole training state, other keys changed; parent and differences are recorded.", form=FORK)
    keep_every_steps: int | None = key(None, "Checkpoints whose step is a multiple of this are never deleted, nor are the train.save_total_limit newest.", minimum=1)
    keep_best: bool = key(True, "Never delete the checkpoint with the lowest val/bpb (SFT: sft/assistant_bpb) of those that were evaluated.")
    hang_timeout: float | None = key(600.0, "Seconds of training without any progress after which every rank's stacks are written to stacks/ and the run ends with status 70; null: never. While torch.compile works on the first step and the first evaluation of a start: ten times as long, at least half an hour.", above=0, maximum=10**8)
    tokens: int | None = fixed(None, "Horizon: row positions to train on. Steps = floor(tokens / data.batch_tokens).", minimum=1, maximum=10**18)
    tokens_per_param: float | None = fixed(None, "Horizon: tokens per scaling parameter (matrices of the blocks + head; of a mixture of experts those that a token is sent to). The depth dial sets 10.5, the compute-optimal ratio of nanochat's sweeps, when no horizon is given; nanochat's own default is 12 today.", above=0, maximum=1e9)
    flops: float | None = fixed(None, "Horizon: training FLOPs by nanochat's formula.", minimum=1, maximum=1e36)
    minutes: float | None = fixed(None, "Horizon: as many steps as let all of the run end within so many minutes on this host. Steps are measured once, before the first one, and a run that goes on keeps their number.", minimum=1, maximum=1e6)
    code_folder: str | None = key(None, "Folder whose modules `module:attr` strings name; default the recipe's folder. One outside it is given on the command line.")
    trust_code: bool = key(False, "Also run installed modules that `module:attr` names, and the code files of a model from a folder or the Hub. Counts on the command line only (run.trust_code=true): a recipe that came from elsewhere cannot give it to itself.")
    callbacks: list[str] = key(list, "Further transformers.TrainerCallback classes as module:attr, made without arguments.", form=IMPORTABLE)
    hardware: str | None = key(None, "What the plan is made for, e.g. 8xH100, or 64x8xH100 for 64 hosts of 8; default this machine.")
    gpu_hour_cost: float | None = key(None, "Price of one accelerator for an hour, in the currency of your choice; the plan multiplies it.", minimum=0, maximum=1e9)


@dataclass(kw_only=True)
class Tokenizer(Section):
    """A byte-level BPE trained on the run's own text, or a ready one."""

    path: str | None = fixed(None, "Hub id or folder of a ready tokenizer; then nothing is trained.")
    revision: str | None = fixed(None, "Revision of a tokenizer from the Hub.")
    vocab_size: int | None = fixed(None, "Ids in all, special tokens included; default 32768. Of a ready tokenizer: how many it has, read from `path` when that is a folder here.", minimum=272, maximum=MOST_IDS)
    split_pattern: str = fixed("nanochat", "How text is cut before merging: nanochat (GPT-4's with numbers cut to two digits); gpt2, qwen2 (every digit alone) or llama3 (numbers cut to three digits), which llama.cpp knows too; or a regular expression. Default of preset portable qwen2.")
    train_chars: int = fixed(2_000_000_000, "Characters of training text in all.", minimum=1)
    document_chars: int = fixed(10_000, "Characters taken from one document.", minimum=1)
    chat_template: str | None = fixed(None, "A Jinja file instead of the chat template that the tokenizer has, or else of the built-in one.")


@dataclass(kw_only=True)
class Data(Section):
    """Sources, packing into rows, the global batch, the cache."""

    sources: list[Source] = fixed(list, "What is trained on.")
    validation: list[Source] | None = fixed(None, "What is held out. Default, of each source of text: its last file in sorted order; of many small files as many, drawn by name, as make 1 % of the text and 200 kB (10 % at most). Of a single file, and of conversations in any number of files: every hundredth row of each, of few rows more. These are then not trained on.")
    held_out: dict[str, list[str]] | None = internal(None)  # of a run that goes on, by source
    readings: list[str] = internal(list)  # of such a run: Format.identity of its sources
    one_text_rows: bool = internal(False)  # by training/isolation.py
    row_tokens: int = fixed(2048, "Positions of a row that are trained on (a row stores one more). The default is 2048, or what the model can hold when that is less: model.n_positions, or those of model.start_from in a folder here.", minimum=8, maximum=MOST_POSITIONS)
    batch_tokens: int | None = fixed(None, "Row positions of one optimizer step over all processes. Exactly one of this and train.gradient_accumulation_steps.", minimum=1, maximum=10**12)
    packing: Literal["cut_and_fit", "best_fit_crop", "concat"] = fixed("cut_and_fit", "cut_and_fit loses no token and pads under 1 %; best_fit_crop is nanochat's, rows begin with BOS and tails are cropped; concat cuts one endless stream.")
    packing_documents: int = fixed(1024, "Documents of a cut_and_fit block, or of best_fit_crop's buffer.", minimum=1, maximum=10**7)
    isolate_documents: bool = fixed(False, "Documents of one row do not see each other (positions restart, block mask), in val/bpb neither; conversations of SFT never do. Where a model does not keep them apart (docs/isolation.md), which is tried before rows are made, each row holds one of them, padded.")
    max_row_overflow: Literal["cut", "drop"] = fixed("cut", "SFT: a conversation longer than a row is cut at its last whole turn that fits, or dropped; both are counted.")
    shard_rows: int = fixed(4096, "Rows of a sealed shard.", minimum=1, maximum=10**7)
    cache_dir: str | None = key(None, "Where tokenizers and shards are kept; default $TANDEM_CACHE, else ~/.cache/tandem.")
    max_bad_rows: int = key(0, "Rows that may be unreadable before the run stops with status 65 at its next checkpoint; each is named.", minimum=0)
    num_proc: int | None = key(None, "Processes that read and tokenize while preparing; default all cores, but no more than one for 16 MB of a source's files and for 2 GiB of free memory. A number that is given holds for the smallest source too. Without one of their own, threads of the tokenizer. Any number makes the same bytes.", minimum=1, maximum=4096)
    shards_from: str | None = key(None, "Where shards were published that are taken, verified, instead of being prepared: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or hf://datasets/NAMESPACE/NAME (also with @REVISION and /FOLDER). What is missing or damaged there is prepared here. Default: nowhere.")


@dataclass(kw_only=True)
class Adapter(Section):
    """Few new weights that are trained by PEFT in place of a model's own, which stay as they are: recipe keys by PEFT's names."""

    type: Literal["lora"] = fixed("lora", "Adapters of two thin matrices for each matrix that they change.")
    r: int = fixed(16, "Rank: the width between the two.", minimum=1, maximum=1_000_000)
    alpha: float | None = fixed(None, "PEFT's lora_alpha: what an adapter adds is multiplied by alpha / r, with use_rslora by alpha / sqrt(r); default 2 x r.", above=0, maximum=1e9)
    target: str | list[str] = fixed("all-linear", "PEFT's target_modules: all-linear (every linear layer but the head), a regular expression for the whole name of a module, or a list of the last parts of names, as [q_proj, v_proj].")
    dropout: float = fixed(0.0, "PEFT's lora_dropout: share of an adapter's inputs that is dropped while it trains.", minimum=0, below=1)
    use_dora: bool = fixed(False, "DoRA: also train the length of each changed column.")
    use_rslora: bool = fixed(False, "Divide by sqrt(r) and not by r, for large ranks.")
    modules_to_save: list[str] = fixed(list, "Modules that are trained whole, a copy of each, and saved with the adapter, by the last part of their names, as [embed_tokens, lm_head].")


@dataclass(kw_only=True)
class Model(Section):
    """Sizes and architecture. Without a preset the defaults are GPT-2's."""

    type: str = fixed("tandem", "tandem, the name of any causal LM of transformers (gpt2, llama, nanochat ...), or module:attr; default of preset portable qwen3.")
    start_from: str | None = fixed(None, "Weights to start from: a run, a folder, a Hub id, or latest:<recipe>, latest:pretrain, latest:sft; resolved once and saved with its hash.")
    preset: Literal["gpt2", "modern", "modern_bigram", "portable"] = fixed("gpt2", "modern switches on every option of the current nanochat; modern_bigram adds hashed embeddings of token pairs (bigram_embeddings, 16 rows for an id), for small models with a small vocabulary; portable is model.type qwen3 with this pipeline's initial weights, rates and a tokenizer.split_pattern that llama.cpp knows, saved as the Qwen3ForCausalLM that other programs run without our code; single keys below still win.")
    depth: int | None = fixed(None, "The dial: sets n_layer, width, heads, then horizon, batch, rates and decay where they are not given.", minimum=1, maximum=1000)
    aspect_ratio: int = fixed(64, "Width per layer of depth; the width is rounded up to a multiple of head_dim.", minimum=1, maximum=1_000_000)
    head_dim: int = fixed(128, "Width of an attention head under depth.", minimum=2, maximum=1_000_000)
    n_layer: int | None = fixed(None, "Blocks.", minimum=1, maximum=1000)
    n_embd: int | None = fixed(None, "Width.", minimum=1, maximum=1_000_000)
    n_head: int | None = fixed(None, "Query heads.", minimum=1, maximum=1_000_000)
    n_kv_head: int | None = fixed(None, "Key and value heads; default n_head.", minimum=1, maximum=1_000_000)
    n_inner: int | None = fixed(None, "Width of the MLP; default 4 x n_embd, and 8/3 of it (rounded up to a multiple of 64, below a width of 256 of 8) where the MLP of model.type has a third matrix, the gate.", minimum=1, maximum=10_000_000)
    n_positions: int | None = fixed(None, "Longest sequence; default data.row_tokens.", minimum=1, maximum=MOST_POSITIONS)
    options: dict[str, Any] = fixed(dict, "Fields of the model's config verbatim, e.g. {window_pattern: SSSL, final_logit_softcapping: 15} of TandemConfig, or any field of model.type's config class. What neither sizes nor options of a type of transformers name is filled in proportion to n_embd: head_dim, the MLP's width, experts' widths; numbers of experts stay the class's own.")
    start_config: dict[str, Any] | None = internal(None)  # config.json of start_from
    adapter: Adapter | None = fixed(None, "Train adapters by PEFT in place of the weights of start_from, which stay as they are: {type: lora, r: 16}. The run's model/ and checkpoints are then the adapter alone (docs/finetune.md). Needs the package peft.")
    embedding_dtype: Literal["float32", "bfloat16"] = fixed("float32", "How the token embedding and the value embeddings are stored while training, their gradients and optimizer state with them. bfloat16 halves their memory, as nanochat has it when it trains in bfloat16; for model.type tandem with an untied head.")
    attn_implementation: str | None = key(None, "eager, sdpa, flex_attention or a flash kernel as transformers names it; default: flex_attention for windows and isolated documents on CUDA, where it skips what is hidden, if a trial before step 1 gives the numbers of eager; else sdpa.")
    chosen_attention: str | None = internal(None)  # of this start, by run/checks.py

    @property
    def becomes_tandem(self) -> bool:
        """Return whether it is one of Tandem's, as far as its type tells before it is loaded (model/build.py)."""
        if self.start_from is None:
            return self.type == "tandem"
        return self.start_config is not None and self.start_config.get("model_type") in ("tandem", "gpt2", "nanochat")


@dataclass(kw_only=True)
class Group(Section):
    """Settings of one parameter group; what is not given is filled from the table of defaults (recipe/dial.py)."""

    learning_rate: float | None = fixed(None, "Peak rate.", minimum=0, maximum=1e38)
    betas: list[float] | None = fixed(None, "Adam's two averages.")
    eps: float | None = fixed(None, "Adam's epsilon.", minimum=0, maximum=1e6)
    weight_decay: float | None = fixed(None, "Decoupled decay.", minimum=0, maximum=1e6)
    momentum: float | None = fixed(None, "Muon's momentum at its peak.", minimum=0, maximum=1)


@dataclass(kw_only=True)
class Groups(Section):
    """The parameter groups of adamw and muon_adamw, by what a parameter does."""

    embeddings: Group = section(Group, "Token (and position) embeddings.")
    value_embeddings: Group = section(Group, "Value embeddings; default as embeddings at half the rate.")
    head: Group = section(Group, "The output head, when untied.")
    matrices: Group = section(Group, "Matrices of the blocks: Muon under muon_adamw.")
    scalars: Group = section(Group, "Norms, biases and residual lambdas.")
    x0_lambdas: Group = section(Group, "Scalars that mix the embedding back in.")
    gates: Group = section(Group, "Smear's gate and lambda, and backout's lambda.")


@dataclass(kw_only=True)
class Schedule(Section):
    """The shape of the rates over the run, in optimizer steps; step s (zero-based) has the multiplier lrm(s)."""

    warmup_steps: int = fixed(40, "Linear warm-up: lrm = (s + 1) / warmup_steps. The default is at most a fifth of the run; so is an inherited one that is longer than the run of a horizon named later (train.max_steps=20).", minimum=0)
    decay_fraction: float = fixed(0.65, "Share of the run, at its end, over which the rates fall.", minimum=0, maximum=1)
    decay: Literal["linear", "cosine", "1-sqrt"] = fixed("linear", "Shape of the fall.")
    final_fraction: float = fixed(0.05, "lrm that the fall ends at.", minimum=0, maximum=1)
    batch_warmup_steps: int = fixed(0, "Steps at the run's beginning with smaller batches: data.batch_tokens halved batch_halvings times, then doubled in equal parts of these steps. Rates are multiplied by the square root of the batch's share. A horizon in tokens or FLOPs then has more steps.", minimum=0, maximum=10**9)
    batch_halvings: int = fixed(2, "How often the first batch of batch_warmup_steps is halved.", minimum=1, maximum=16)
    momentum_warmup_steps: int = fixed(400, "Steps over which Muon's momentum rises from 0.85 to its peak.", minimum=0)
    weight_decay: Literal["constant", "cosine"] = fixed("cosine", "Muon's weight decay over the run: constant, or cosine to 0.")


@dataclass(kw_only=True)
class Optimizer(Section):
    """Who updates the weights."""

    type: str = fixed("trainer", "trainer: train's optim, learning_rate and scheduler as in transformers.Trainer; adamw or muon_adamw: the groups and schedule below; or module:attr.")
    rate_scale: float | None = fixed(None, "Multiplies every group's rate (0.8 for SFT after pretraining): the key for what train.learning_rate is with optimizer.type trainer, since groups have rates of their own; default 1; the depth dial sets sqrt(batch_tokens / 2^19).", above=0, maximum=1e6)
    decay_scale: float | None = fixed(None, "Multiplies every group's weight decay. For text that is seen many times: slowrun (100M tokens, many passes) decays 10 to 30 times as much as runs of one pass do. Default 1.", minimum=0, maximum=1e6)
    groups: Groups = section(Groups, "Rates, betas and decay per parameter group.")
    schedule: Schedule = section(Schedule, "Rates over the run.")


@dataclass(kw_only=True)
class Bpb(Section):
    """Bits per byte on validation text, every train.eval_steps and always at the end."""

    tokens: int = key(10_485_760, "Row positions scored for val/bpb; all there are when fewer. The bytes scored are part of the protocol.", minimum=1)
    document_bytes: int = key(4_000_000, "Bytes of whole documents scored for val/bpb_documents; 0 leaves it out.", minimum=0)
    at_start: bool = key(True, "Also score before the first step.")
    batch_rows: int | None = key(None, "Rows of one forward pass; default train.per_device_eval_batch_size. Does not change the value.", minimum=1, maximum=2**20)


@dataclass(kw_only=True)
class Core(Section):
    """CORE, 22 tasks centred on guessing: while training, and the defaults of python -m pipeline.evals RUN core."""

    every_steps: int | None = key(None, "Optimizer steps between two scorings while training, and at the end; default never.", minimum=1)
    bundle: str | None = key(None, "Folder of the eval_bundle, relative to the recipe's folder, then to the working folder; default the published files, fetched once and checked by hash.")
    max_per_task: int | None = key(500, "While training: the first so many items of each task, in an order that never changes; null: all.", minimum=1)
    long_prompts: Literal["fewer_shots", "crop"] = key("fewer_shots", "A prompt longer than the model's positions: fewer_shots leaves whole examples out and keeps BOS; crop keeps the last tokens, as nanochat does and as GPT-2's published scores were made.")


@dataclass(kw_only=True)
class OwnTask(Section):
    """A chat task of one's own: conversations whose last message, the assistant's, is the right answer."""

    name: str | None = key(None, "Its metric is chat/<name>.")
    files: str | list[str] | None = key(None, "Local files of the kinds that data.sources reads: a path or glob, or a list of them; relative to the recipe's folder, then to the working folder.")
    id: str | None = key(None, "A dataset instead, of the Hub or in a folder here.")
    config: str | None = key(None, "The dataset's configuration (its subset).")
    split: str = key("test", "The dataset's split.")
    revision: str | None = key(None, "Branch, tag or commit of the Hub dataset.")
    format: str | None = key(None, "How a row becomes a conversation, as data.sources has it; default messages.")
    checker: str = key("exact", "Whether an answer is right: exact (but for white space around it), contains (the right answer is in it), or module:attr of a function (messages, text) -> bool.")


@dataclass(kw_only=True)
class ChatTasks(Section):
    """Chat tasks while training; data and max_new_tokens are also those of python -m pipeline.evals RUN chat."""

    every_steps: int | None = key(None, "Optimizer steps between two scorings while training, and at the end; default never.", minimum=1)
    at_start: bool = key(False, "Score before the first step too: what training starts from, under the same template.")
    tasks: list[str] = key(["arc_easy", "arc_challenge", "mmlu", "gsm8k", "spelling_bee"], "Which: arc_easy, arc_challenge, mmlu (letters), gsm8k, humaneval, spelling_bee (generated).")
    own: list[OwnTask] = key(list, "Tasks of one's own, besides these.")
    data: str | None = key(None, "Folder with the tasks' files, relative to the recipe's folder, then to the working folder; default the Hub's.")
    max_per_task: int | None = key(200, "While training: the first so many items of each task; null: all.", minimum=1)
    max_new_tokens: int = key(512, "Longest answer of the generated tasks.", minimum=1, maximum=MOST_POSITIONS)
    execute: bool = key(False, "Run the programs that the model writes for humaneval, each in a sandbox; without it humaneval is refused.")


@dataclass(kw_only=True)
class Evals(Section):
    """Measures besides the loss; the cadence of bpb and tasks is train.eval_steps."""

    bpb: Bpb = section(Bpb, "Bits per byte.")
    core: Core = section(Core, "CORE.")
    chat: ChatTasks = section(ChatTasks, "Chat tasks.")
    tasks: list[str] = key(list, "Further tasks as module:attr, scored at every evaluation.", form=IMPORTABLE)
    unsafe_exec: bool = key(False, "Run humaneval's programs also where no sandbox can be had: with this user's rights, in a child process with a time limit.")


@dataclass(kw_only=True)
class Samples(Section):
    """Texts generated while training, with fixed prompts."""

    prompts: list[str] = key(["The capital of France is", "The chemical symbol of gold is", "If yesterday was Friday, then tomorrow will be", "The opposite of hot is", "The planets of the solar system are:", "My favorite color is", "If 5*x + 3 = 13, then x is"], "Continued at every sampling; in SFT they are the user's first message.")
    held_out: int = key(0, "So many prompts more: the first words of held-out documents, in SFT the first messages of held-out conversations; with the samples they are published when the run is pushed.", minimum=0, maximum=64)
    every_steps: int | None = key(None, "Optimizer steps between samplings; default at every evaluation; 0 never.", minimum=0)
    max_new_tokens: int = key(32, "Longest continuation.", minimum=1, maximum=MOST_POSITIONS)
    temperature: float = key(0.0, "0 takes the likeliest token.", minimum=0, maximum=1e6)
    top_k: int | None = key(None, "Sample from the k likeliest tokens.", minimum=1, maximum=MOST_IDS)
    top_p: float | None = key(None, "Sample from the likeliest tokens that hold this share.", minimum=0, maximum=1)
    seed: int = key(0, "Of the sampling alone; the training's random state never moves.")


@dataclass(kw_only=True)
class Monitor(Section):
    """Trackers and samplers of the numbers, besides metrics.jsonl and the console."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = key(["tensorboard"], "Trackers; WANDB_API_KEY and WANDB_MODE come from the environment. trackio needs its extra, and writes into the run directory only.")
    project: str = key("tandem", "Project name for W&B and Trackio.")
    gpu_hz: float = key(1.0, "Samples of each NVIDIA GPU a second (power, temperature, load, memory, clocks, throttling), by a thread, to gpu-<host>.csv; 0: none, and no gpu/* and no energy.", minimum=0, maximum=100)
    profile_steps: list[int] | None = key(None, "First and last step, zero-based as the console counts, of a torch.profiler trace of rank 0 in profile/: [10, 12]. These steps are slower.")
    on_nonfinite: Literal["stop", "skip"] = key("stop", "What a loss or gradient that is NaN or infinite does, before the update: stop ends the run with status 76, the tensor and the rows named; skip makes no update in that step, whose rows are used up while step and rates move on. A parameter that is not finite always stops. (What fp16's loss scaler skips is counted apart: 20 in a row stop.)")
    on_spike: Literal["warn", "skip", "stop"] = key("warn", "What a step's loss or gradient norm far above its last 128 values does. When the step is logged warn says and records it, and stop ends the run with status 76 and keeps the checkpoints. skip makes no update in one that spikes; for that the ranks sum its loss, and the host reads loss and norm, before each update.")
    max_skips: int = key(10, "Steps that on_nonfinite and on_spike may skip among any 1,000; one more ends the run with status 76: a few bad rows pass, a diverged run does not.", minimum=0)


@dataclass(kw_only=True)
class Hub(Section):
    """Publishing; the token comes from HF_TOKEN or `hf auth login` only."""

    id: str | None = key(None, "Repository to publish to; none: nothing is published.", form=REPOSITORY)
    strategy: Literal["end", "checkpoint"] = key("end", "What is published. end: the finished model. checkpoint: also, while training continues, the newest checkpoint's model and in last-checkpoint/ all that a continuation takes, so that the same command (run.resume: auto) continues exactly on a machine that has no checkpoint of the run.")
    revision: str | None = key(None, 'Branch to publish to, made when it is missing; "{run}" in it stands for the run\'s name. None: main.')
    wait_at_end_s: float = key(600.0, "Longest time that the end of a run waits for the upload of its model, less when the Hub does not answer. What is left then: python -m pipeline.hub push RUN.", minimum=0, maximum=10**8)
    private: bool = key(True, "Create the repository as private.")
    license: str | None = key(None, "License of the published model as the Hub spells it, such as apache-2.0 (huggingface.co/docs/hub/repositories-licenses), for its card; none: the card says that none is stated.", form=LICENSE)
    language: list[str] = key(list, "Languages of the text by ISO 639 code, such as [en], for the card's metadata.", form=LANGUAGE)
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "Type of the weights in model/, the one published at the end.")


@dataclass(kw_only=True)
class Recipe(Section):
    """One run. `train` holds transformers.TrainingArguments by their own names (recipe/schema.py)."""

    run: Run = field(default_factory=Run)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: dict[str, Any] = field(default_factory=dict)
    evals: Evals = field(default_factory=Evals)
    samples: Samples = field(default_factory=Samples)
    monitor: Monitor = field(default_factory=Monitor)
    hub: Hub = field(default_factory=Hub)
    # Set by the reader, and micro_batch where train.per_device_train_batch_size is auto.
    micro_batch: int | None = internal(None)
    path: str | None = internal(None)
    arguments: list[str] = internal(list, compare=False)  # that it was read from
    notes: list[str] = internal(list, compare=False)  # what was adapted
    stage: Literal["pretrain", "sft"] = internal("pretrain")
    code: CodeFolder = internal(CodeFolder(None), compare=False)
    earlier: Any = internal(None, repr=False, compare=False)  # runs, handed to read_recipe
    places: dict[str, str] = internal(dict, repr=False, compare=False)
    filled: dict[str, str] = internal(dict, repr=False, compare=False)

    def where(self, name: str) -> str:
        """Return `file:line: name`, the beginning of a message about the key; the file alone for a key that was not given."""
        return f"{self.places.get(name) or self.path or 'recipe'}: {name}"

    def source_settings(self) -> "SourceSettings":
        kind: Literal["text", "chat"] = "chat" if self.stage == "sft" else "text"
        seed = int(self.train.get("seed", 42))
        return SourceSettings(self.data, kind, seed, recipe_path=self.path, places=self.places, code=self.code)

    def tokenizer_settings(self) -> "TokenizerSettings":
        return TokenizerSettings(self.tokenizer, self.stage, recipe_path=self.path, cache_dir=self.data.cache_dir)

    @property
    def horizons(self) -> list[str]:
        """Return the names of the horizons that are given."""
        of_run = [name for name in ("tokens", "tokens_per_param", "flops", "minutes") if getattr(self.run, name) is not None]
        of_train = [name for name in ("max_steps", "num_train_epochs") if name in self.train]
        return [*(f"run.{name}" for name in of_run), *(f"train.{name}" for name in of_train)]

    @property
    def isolates_documents(self) -> bool:
        """Return whether documents of a row do not see each other: positions restart, and attention ends there."""
        # Rows of one text each have nothing to keep apart.
        return (self.stage == "sft" or self.data.isolate_documents) and not self.data.one_text_rows

    @property
    def is_auto(self) -> bool:
        """Return whether the micro-batch is to be found (plan/memory.py)."""
        return self.train.get("per_device_train_batch_size") == "auto"

    @property
    def micro_batch_rows(self) -> int:
        """Return the micro-batch, rows of one forward pass of one process: as given, or what `auto` came to."""
        rows = self.micro_batch if self.is_auto else self.train["per_device_train_batch_size"]
        assert rows is not None, "auto is a number once the plan is made"
        return rows

    @property
    def rows_per_step(self) -> int:
        """Return rows of one optimizer step over all processes. data.batch_tokens must be known, here and below."""
        assert self.data.batch_tokens, "data.batch_tokens is known once the number of processes is"
        return self.data.batch_tokens // self.data.row_tokens

    @property
    def step_rows(self) -> StepRows:
        """Return the rows of each of the run's steps."""
        schedule = self.optimizer.schedule
        if self.optimizer.type == "trainer" or not schedule.batch_warmup_steps:
            return StepRows(self.rows_per_step)
        return StepRows(self.rows_per_step, schedule.batch_warmup_steps, schedule.batch_halvings)

    def tokens_at(self, step: int) -> int:
        """Return row positions of the first `step` steps."""
        return self.step_rows.before(step) * self.data.row_tokens

    def micro_steps(self, ranks: int) -> int:
        """Return the micro-steps of an optimizer step: its rows dealt to the ranks, the last one filled up."""
        return math.ceil(self.rows_per_step / (ranks * self.micro_batch_rows))

    def global_batch_tokens(self, ranks: int) -> int:
        """Return the global batch in tokens: as given, or by train.gradient_accumulation_steps and the ranks."""
        if self.data.batch_tokens:
            return self.data.batch_tokens
        return ranks * self.micro_batch_rows * self.train["gradient_accumulation_steps"] * self.data.row_tokens


@dataclass(frozen=True)
class SourceSettings:
    """Values that open the sources of a run.

    seed: of the files' order. recipe_path, places: the recipe's file and `file:line` of its keys, for messages and
    paths relative to it; None for sources that no recipe names.
    """

    data: Data
    kind: Literal["text", "chat"]
    seed: int = 42
    recipe_path: str | None = None
    places: dict[str, str] = field(default_factory=dict)
    code: CodeFolder = CodeFolder(None)


@dataclass(frozen=True)
class TokenizerSettings:
    """Values that load or train the tokenizer of a run. recipe_path: paths are relative to this file first."""

    tokenizer: Tokenizer
    stage: Literal["pretrain", "sft"]
    recipe_path: str | None = None
    cache_dir: str | None = None



SECTIONS = tuple(f.name for f in fields(Recipe) if not f.metadata.get("internal"))





EXAMPLES = {
    "pretrain": ("quickstart_pretrain", "train.max_steps=100"),
    "sft": ("quickstart_sft", "train.num_train_epochs=2"),
}
WHAT = {"pretrain": "Stage 1: train a model on text.", "sft": "Stage 2: teach a pretrained model to chat."}


def help_text(stage: str) -> str:
    """Return what the entry of a stage prints for --help."""
    (recipe, setting), console = EXAMPLES[stage], os.environ.get(CONSOLE)
    entry = f"{console} {stage}" if console else f"accelerate launch pipeline/{stage}.py"
    example = f"{entry} {recipe if console else f'recipes/{recipe}.yaml'} {setting}"
    docs = {f.name: f.type.__doc__ for f in fields(Recipe)} | {"train": "transformers.TrainingArguments by their own names."}
    sections = "\n".join(f"  {name:<11}{docs[name]}" for name in SECTIONS)
    return f"""\
usage: {entry} RECIPE.yaml [section.key=value ...]

{WHAT[stage]} One recipe is one run; the same command again continues it.

sections of a recipe:
{sections}

example:
  {example}

Every key with its default: docs/recipes.md. The plan without training: {program("plan")} RECIPE.yaml
Status: 0 done, 64 recipe, 65 data, 66 input missing, 69 service away, 70 hang or lost rank, 71 out of
memory, 73 cannot write, 74 disk full, 75 stopped by a signal after a checkpoint, 76 diverged, 130 Ctrl-C after a
checkpoint, 1 our bug."""


# Support table of transformers.TrainingArguments: how each field is handled under `train:`.
#
# supported: passed to the Trainer unchanged, with transformers' default. overridden: passed, with our default instead of
# transformers'. managed: set by another key of the recipe, which the message names. rejected: would break a promise of this
# program, or do nothing in it; `text` says why. added: no field of TrainingArguments, but a key of `train:` all the same.
# tests/recipe/test_schema.py holds the table to the installed version.

SCHEDULERS = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]  # fmt: skip
OPTIMIZERS = Literal["adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "grokadamw", "stable_adamw"]  # fmt: skip
SCHEDULE_FREE = "its weights are averages that evaluations, samples and saves would have to switch to and back from, and its first update here fails"
REFUSED_OPTIMIZERS = {  # by their names in transformers: why, and what to take instead
    "schedule_free_adamw": (SCHEDULE_FREE, "optim: adamw_torch_fused with lr_scheduler_type: constant_with_warmup"),
    "schedule_free_radam": (SCHEDULE_FREE, "optim: adamw_torch_fused with lr_scheduler_type: constant_with_warmup"),
    "schedule_free_sgd": (SCHEDULE_FREE, "optim: sgd with lr_scheduler_type: constant_with_warmup"),
}
# The names that transformers 5.23 reads from optim_args. One that is not here reads names of its own or takes all.
OPTIM_ARGS = {
    "adafactor": (),
    "adagrad": ("lr_decay", "eps"),
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
    "sgd": ("momentum", "dampening", "nesterov"),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
}
# Of torch.compile: what trains, of the backends that accelerate passes on.
COMPILERS = Literal["inductor", "eager", "aot_eager", "cudagraphs"]
COMPILER_MODES = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CHECKPOINTING = {"every_n_layers": int, "offload": bool, "use_reentrant": bool, "preserve_rng_state": bool, "determinism_check": Literal["default", "none"], "debug": bool, "early_stop": bool}  # fmt: skip
ACCELERATE = {"split_batches": bool, "dispatch_batches": bool | None, "even_batches": bool, "use_seedable_sampler": bool, "non_blocking": bool, "use_configured_state": bool}  # fmt: skip
MOST_STEPS = 10**9  # a year of 30 steps a second
MOST_ROWS = 2**20  # of a forward pass
SEEDS = 2**32  # numpy's seeds lie below
LOG_LEVELS = Literal["debug", "info", "warning", "error", "critical", "passive"]


@dataclass(frozen=True)
class Argument:
    """One field. text: its meaning (supported, overridden, added), the owner key (managed) or the reason (rejected)."""

    kind: Literal["supported", "overridden", "managed", "rejected", "added"]
    text: str
    type: Any = None
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    keys: dict[str, Any] | None = None  # of a dictionary, with their types
    must_match: bool = False
    trainer_only: bool = False  # belongs to optimizer.type: trainer; refused beside adamw and muon_adamw
    only: str | None = None  # why no other value than the default is accepted

    @property
    def limits(self) -> dict[str, float | None]:
        return {"minimum": self.minimum, "maximum": self.maximum, "above": self.above, "below": self.below}

    @property
    def accepted(self) -> bool:
        return self.kind in ("supported", "overridden", "added")


def _accepted(kind: Any, type: Any, default: Any, text: str, **rest: Any) -> Argument:
    return Argument(kind, text, type, default, **rest)


supported, overridden, added = (partial(_accepted, kind) for kind in ("supported", "overridden", "added"))
managed, rejected = partial(Argument, "managed"), partial(Argument, "rejected")

RATE = {"trainer_only": True, "must_match": True}
NO_LOADER = "rows are read from memory maps by their number; there is no DataLoader to set up"
OWN_EVALUATION = "evaluation sums nats and bytes on the device over all ranks (evals.bpb); it keeps no logits and averages no batches"
LAST_MODEL = (
    "the finished model is that of the last step, after the rates have decayed; every checkpoint kept is a model too"
)
LAUNCHER = "the accelerate config file (accelerate launch --config_file)"
LAUNCHED = "the launcher says this, not the recipe"
NO_TRACKIO = "monitor.trackers writes Trackio's files into the run directory only"
NO_LIGER = (
    "it patches known model classes only and replaces the loss; the chunked cross-entropy here saves the same memory"
)
COMMAND = "the command says what is done: pipeline/pretrain.py, pipeline/sft.py or python -m pipeline.evals"

ARGUMENTS: dict[str, Argument] = {
    # Length and batch
    "max_steps": supported(int, None, "Horizon: optimizer steps. Exactly one horizon is given; see run.tokens.", minimum=1, maximum=MOST_STEPS, must_match=True),
    "num_train_epochs": supported(float, None, "Horizon: passes over the sources.", above=0, maximum=1e9, must_match=True),
    "per_device_train_batch_size": supported(int | Literal["auto"], 8, "Rows of one forward pass on one device (the micro-batch). Does not change the training. auto: the most that fit, tried on a GPU before the first step and estimated on a CPU; needs data.batch_tokens. A run keeps it on the same device while it fits.", minimum=1, maximum=MOST_ROWS),
    "gradient_accumulation_steps": supported(int, None, "Micro-steps of an optimizer step. Exactly one of this and data.batch_tokens, from which it is derived for any number of processes.", minimum=1, maximum=MOST_ROWS),
    "auto_find_batch_size": rejected("it changes the global batch in the middle of a run; train.per_device_train_batch_size: auto finds what fits before it, and the training stays the same"),
    "average_tokens_across_devices": overridden(bool, True, "The loss is the mean over all trained tokens of all devices.", only="without it the loss depends on the number of devices"),
    # Rates under optimizer.type: trainer
    "learning_rate": supported(float, 5e-5, "Peak rate.", minimum=0, **RATE),
    "lr_scheduler_type": supported(SCHEDULERS, "linear", "Shape of the rate over the run.", **RATE),
    "lr_scheduler_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {min_lr_rate: 0.1}.", **RATE),
    "warmup_steps": supported(float, 0.0, "Steps of warm-up; below 1 a share of the run.", minimum=0, maximum=MOST_STEPS, **RATE),
    "optim": supported(OPTIMIZERS, "adamw_torch_fused", "The optimizer, as transformers names it.", **RATE),
    "optim_args": supported(str | None, None, "Its further arguments, as `name=value,name=value`.", **RATE),
    "optim_target_modules": rejected("GaLore and APOLLO optimizers are not supported: their state does not fit the checkpoint's format"),
    "weight_decay": supported(float, 0.0, "Decoupled decay.", minimum=0, **RATE),
    "adam_beta1": supported(float, 0.9, "Adam's first average.", minimum=0, below=1, **RATE),
    "adam_beta2": supported(float, 0.999, "Adam's second average.", minimum=0, below=1, **RATE),
    "adam_epsilon": supported(float, 1e-8, "Adam's epsilon.", minimum=0, **RATE),
    "max_grad_norm": supported(float, 1.0, "Gradients are scaled down to this norm; 0 leaves them alone.", minimum=0),
    "label_smoothing_factor": rejected("the loss would no longer be the cross-entropy that loss, BPB and perplexity stand for"),
    "neftune_noise_alpha": supported(float | None, None, "Noise on the embeddings while training (NEFTune).", above=0, must_match=True),
    # Precision, memory, compilation
    "bf16": supported(bool | Literal["auto"], False, "bfloat16 autocast; weights stay float32. auto: where the hardware makes it faster."),
    "fp16": supported(bool, False, "float16 autocast with a loss scaler, for GPUs without bfloat16."),
    "fp8": added(bool, False, "Float8 products (torchao, scales per tensor) in the matrices of a Tandem's blocks without bias, with bf16 for the rest. Weights and checkpoints are as without it; evaluations and samples compute in bf16. Needs a GPU of compute capability 8.9 (Ada, Hopper) or later and the package torchao; a choice for models wide enough, best with torch_compile. Scales are of one micro-batch, so a step depends on the micro-batch, within float8's rounding."),
    "bf16_full_eval": rejected("it casts the weights themselves and the training goes on with the rounded ones"),
    "fp16_full_eval": rejected("it casts the weights themselves and the training goes on with the rounded ones"),
    "tf32": supported(bool | None, None, "TF32 matrix products on NVIDIA GPUs; default as torch has it."),
    "activation_checkpointing": supported(bool | None, None, "Recompute activations in the backward pass: less memory, about a third more time."),
    "activation_checkpointing_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {every_n_layers: 2}.", keys=CHECKPOINTING),
    "gradient_checkpointing": supported(bool | None, None, "The older name of activation_checkpointing."),
    "gradient_checkpointing_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {use_reentrant: false}.", keys=CHECKPOINTING),
    "torch_compile": supported(bool | Literal["auto"], False, "Compile the model into one static graph. auto: where it pays."),
    "torch_compile_backend": supported(COMPILERS | None, None, "Backend of the compiler; default inductor."),
    "torch_compile_mode": supported(COMPILER_MODES | None, None, "Mode of inductor, e.g. max-autotune."),
    "torch_empty_cache_steps": rejected("it waits for the device every time; against fragmented memory set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "use_liger_kernel": rejected(NO_LIGER),
    "liger_kernel_config": rejected(NO_LIGER),
    "use_cache": rejected("training never needs the cache; generation switches it on by itself"),
    "use_cpu": supported(bool, False, "Train on the CPU although there is an accelerator."),
    "full_determinism": supported(bool, False, "Only deterministic kernels: resuming on CUDA is then exact to the bit, and slower."),
    # Logging
    "logging_strategy": overridden(Literal["steps"], "steps", "When numbers are logged.", only="the cadence is logging_steps"),
    "logging_steps": overridden(int, 10, "Optimizer steps between rows of metrics and console lines.", minimum=1),
    "logging_first_step": overridden(bool, True, "Also log the first step."),
    "log_on_each_node": overridden(bool, False, "The first rank of the run logs.", only="one console.log and one metrics.jsonl belong to a run"),
    "logging_nan_inf_filter": overridden(bool, False, "transformers' filter logs a NaN as 0.", only="it would log a loss that is not a number as 0, and wait for the device at every micro-step"),
    "include_num_input_tokens_seen": overridden(Literal["no"], "no", "Tokens are counted from the rows (data/tokens).", only="it gathers over all ranks at every micro-step; data/tokens counts the same"),
    "log_level": supported(LOG_LEVELS, "passive", "Level of transformers' own log."),
    "log_level_replica": supported(LOG_LEVELS, "warning", "The same on the other ranks."),
    "disable_tqdm": overridden(bool, True, "No progress bar over the console lines."),
    "report_to": managed("monitor.trackers"),
    "run_name": managed("run.name"),
    "project": managed("monitor.project"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), rejected(NO_TRACKIO)),
    # Evaluation
    "eval_strategy": overridden(Literal["steps", "no"], "steps", "no: only at the end."),
    "eval_steps": overridden(int, 250, "Optimizer steps between evaluations; the last step is always evaluated.", minimum=1),
    "eval_delay": supported(float, 0.0, "Steps before the first evaluation on the cadence.", minimum=0),
    "per_device_eval_batch_size": supported(int, 8, "Rows of one forward pass of an evaluation. Does not change its value.", minimum=1, maximum=MOST_ROWS),
    "prediction_loss_only": overridden(bool, True, "No logits are kept.", only=OWN_EVALUATION),
    "eval_on_start": managed("evals.bpb.at_start"),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"), rejected(OWN_EVALUATION)),
    # Checkpoints
    "save_strategy": overridden(Literal["steps", "no"], "steps", "no: no checkpoint while training; a run that stops is lost."),
    "save_steps": supported(int, 500, "Optimizer steps between checkpoints; the last step is always saved.", minimum=1),
    "save_total_limit": overridden(int | None, 2, "The newest checkpoints that are kept, with those of run.keep_best and run.keep_every_steps; null keeps all.", minimum=1),
    "save_only_model": rejected("a checkpoint without the optimizer cannot be continued from"),
    "save_on_each_node": rejected("all nodes share one run directory"),
    "enable_jit_checkpoint": rejected("SIGTERM, SIGHUP and Ctrl-C always save a whole checkpoint here, agreed on by all ranks"),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), rejected(LAST_MODEL)),
    "resume_from_checkpoint": managed("run.resume"),
    "ignore_data_skip": rejected("rows are a function of the step: a resume is a seek and never skips"),
    "restore_callback_states_from_checkpoint": rejected("callbacks take up their state from the run directory"),
    "output_dir": managed("run.directory and run.name"),
    # Hub
    "push_to_hub": managed("hub.id"),
    "hub_model_id": managed("hub.id"),
    "hub_private_repo": managed("hub.private"),
    "hub_token": rejected("a recipe holds no token; set HF_TOKEN or run `hf auth login`"),
    "hub_strategy": managed("hub.strategy"),
    "hub_always_push": managed("hub.strategy"),
    "hub_revision": managed("hub.revision"),
    # Randomness and data
    "seed": supported(int, 42, "Of weights, data order and dropout.", minimum=0, maximum=SEEDS - 1, must_match=True),
    "data_seed": managed("train.seed"),
    **dict.fromkeys(("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"), rejected(NO_LOADER)),
    "remove_unused_columns": overridden(bool, False, "Rows carry what the model takes.", only="position_ids and shift_labels would be dropped for some models"),
    "label_names": rejected("every batch carries labels and shift_labels"),
    "train_sampling_strategy": managed("train.seed and data.sources (rows follow from the seed and the step)"),
    "length_column_name": rejected("rows all have data.row_tokens positions"),
    # Processes
    "accelerator_config": overridden(dict[str, Any], {"split_batches": False, "dispatch_batches": False, "even_batches": False}, "accelerate's own switches; keys not named keep these values.", keys=ACCELERATE),
    "ddp_find_unused_parameters": overridden(bool, False, "Every parameter is used; looking for unused ones costs a walk over the graph per step."),
    "ddp_bucket_cap_mb": supported(int | None, None, "Size of DDP's buckets.", minimum=1, maximum=2**20),
    "ddp_broadcast_buffers": supported(bool | None, None, "Broadcast buffers at every forward pass."),
    "ddp_static_graph": supported(bool | None, None, "The graph of the backward pass never changes."),
    "ddp_backend": supported(Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None, None, "Backend of the collectives; default by device."),
    "ddp_timeout": overridden(int, 7200, "Seconds a rank waits for the others.", minimum=1, maximum=10**8),
    **dict.fromkeys(("parallelism_config", "fsdp", "fsdp_config"), managed(LAUNCHER)),
    "deepspeed": rejected("it is not supported; several GPUs train with accelerate_configs/ddp.yaml"),
    "local_rank": rejected(LAUNCHED),
    # The rest
    "debug": supported(Literal["", "underflow_overflow"], "", "transformers' debug options: underflow_overflow names the module that makes the first number that is not finite."),
    "skip_memory_metrics": overridden(bool, True, "Trainer's own memory metrics are not taken.", only="they are taken once, around the whole training, and slow it down"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), rejected(COMMAND)),
}  # fmt: skip

DERIVED = ("max_steps", "num_train_epochs", "gradient_accumulation_steps")  # with other keys of the recipe


def defaults(*, trainer_optimizer: bool) -> dict[str, Any]:
    """Return what `train:` holds where the recipe says nothing. trainer_optimizer: optimizer.type is trainer."""
    return {
        name: argument.default
        for name, argument in ARGUMENTS.items()
        if argument.accepted and name not in DERIVED and (trainer_optimizer or not argument.trainer_only)
    }


def training_arguments(train: dict[str, Any], **decided: Any) -> dict[str, Any]:
    """Return the arguments for transformers.TrainingArguments. decided: those that are not the recipe's. "auto" of bf16 and
    torch_compile is left out: the hardware decides."""
    given = {}
    for name, value in train.items():
        if value not in (None, "auto") and name not in DERIVED and ARGUMENTS[name].kind != "added":
            given[name] = value
    return {
        **given,
        **decided,
        "report_to": "none",  # trackers are written by our own callbacks (monitor.trackers)
        "ignore_data_skip": True,  # rows are a function of the step
    }


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone; numbers before text, so that 16 stays a number."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def keys_of(cls: type) -> Iterator[tuple[Field, Any]]:
    """Yield the keys of a section, each with what it may hold."""
    hints = get_type_hints(cls)
    yield from ((f, hints[f.name]) for f in fields(cls) if not f.metadata.get("internal"))
