"""The Trainer of a recipe: model, rows, evaluation and meter put together."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.utils.generic import is_flash_attention_requested

from pipeline.data.row_plan import document_end_of
from pipeline.evals.bpb import compiled_nll, score_validation
from pipeline.hardware.device import (
    batch_rank,
    batch_ranks,
    compute_format,
    decide_bf16,
    decide_compile,
    device_info,
    shards_model,
)
from pipeline.model.build import ModelOptionsError, build_model, save_model
from pipeline.model.groups import store_embeddings
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.process.errors import DataError, InputMissingError, RecipeError, first_line
from pipeline.process.storage import read_json, remove_folder
from pipeline.process.user_code import guarded, import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.batch import isolates_documents, micro_batch, micro_steps, tokens_at
from pipeline.recipe.model_sizes import model_fields, sizes_from_model, sizes_of
from pipeline.recipe.schema import training_arguments
from pipeline.recipe.start_from import check_sizes
from pipeline.run_dir.checkpoints import by_step, problems, read_seal, whole_folder
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.chat import end_of_turn
from pipeline.tokenizer.encode import byte_lengths, document_start, is_byte_level
from pipeline.tokenizer.load import comes_back_beside
from pipeline.training.distributed import on_rank_0
from pipeline.training.guard import refuse_nonfinite
from pipeline.training.metrics import StepMeter
from pipeline.training.optimizer import look_for_lomo_once
from pipeline.training.trainer import TandemTrainer, balancing_loss

NUM_IDS = 8  # of the row that a model of another class is tried with


@contextmanager
def probed(model: Any) -> Iterator[torch.Tensor]:
    """Yield ids to try the model with, while it evaluates and attends as a CPU can: without dropout and flash
    kernels."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention != "sdpa":
        model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            yield torch.arange(NUM_IDS)[None] % model.config.get_text_config().vocab_size
    finally:
        model.train(training)
        model.config._attn_implementation = attention


def divides_by_num_items(model: Any) -> bool:
    """Return whether the loss is the cross-entropy of the model's own logits with shift_labels, summed, over
    num_items_in_batch, apart from a loss that balances experts.

    As transformers' causal LMs have it. A model that ignores the number gives the mean of its own micro-batch:
    gradients of micro-batches and ranks would not add up to the mean over a step's tokens. One that ignores
    shift_labels shifts the labels again, and learns to skip a token. Called as training calls it; a forward that does
    not take these arguments is one more way to be wrong.
    """
    with probed(model) as ids:
        labels = ids.roll(-1).index_fill(-1, torch.tensor([NUM_IDS - 1]), -100)
        try:
            output = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=torch.tensor(2.0))
        except TypeError:
            return False
    expected = torch.nn.functional.cross_entropy(output.logits[0].float(), labels[0], reduction="sum") / 2
    added = balancing_loss(model, output)
    if added is not None:
        expected = expected + added
    return bool((output.loss - expected).abs() <= 1e-4 * expected)


class KeepEnds(TrainerCallback):
    """Keeps the ids that end a generation: Trainer adds the tokenizer's eos, which may be a new token that no text
    has."""

    def __init__(self, model: Any):
        self.holders = [c for c in (model.config.get_text_config(), model.generation_config) if c is not None]
        self.ends = [getattr(holder, "eos_token_id", None) for holder in self.holders]

    def on_train_begin(self, args, state, control, **kwargs):
        for holder, ends in zip(self.holders, self.ends, strict=True):
            holder.eos_token_id = ends


class OneDeviceArguments(TrainingArguments):
    """One process stays on one device: with several in sight Trainer would wrap the model in DataParallel."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


def build_arguments(recipe: Recipe, run: RunDirectory, **decided: Any) -> TrainingArguments:
    """Return the recipe as TrainingArguments, for this number of processes. decided: values that the hardware decided,
    such as bf16 and torch_compile."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    arguments = training_arguments(
        recipe,
        output_dir=str(run.checkpoints),
        max_steps=recipe.train["max_steps"],
        gradient_accumulation_steps=micro_steps(recipe, batch_ranks(world_size)),
    )
    if not decided.get("torch_compile", arguments.get("torch_compile")):
        decided |= {"torch_compile_mode": None, "torch_compile_backend": None}  # given, they would switch it on
    if shards_model():  # reduced in every micro-step: to wait for the last one would take the memory of all gradients
        decided["accelerator_config"] = {
            **arguments["accelerator_config"],
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        }
    return OneDeviceArguments(**{**arguments, "per_device_train_batch_size": micro_batch(recipe), **decided})


def write_finished_model(
    run: RunDirectory,
    model: Any,
    tokenizer: Any,
    *,
    dtype: str,
    step: int,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model/ whole or not at all, in the type that hub.dtype names; one that an earlier start left stays when it
    is that one, unharmed. weights: those of a sharded model, whole."""
    facts = {"step": step, "run": run.name, "dtype": dtype}
    if run.model.exists():
        if not problems(run.model) and facts.items() <= read_seal(run.model).items():
            return
        remove_folder(run.model)
    with whole_folder(run.model, **facts) as folder:
        save_model(model, folder, dtype=getattr(torch, dtype), state_dict=weights)
        tokenizer.save_pretrained(folder)


def build_from_recipe(recipe: Recipe, tokenizer: Any) -> torch.nn.Module:
    """Return the model with fp32 weights (the embeddings in model.embedding_dtype): those of model.start_from, else
    initialised from train.seed.

    Raises RecipeError for options that its config refuses and for a model whose loss is no sum over tokens,
    InputMissingError when there is nothing to start from.
    """
    try:
        model: Any = _build(recipe, tokenizer)
    except ModelOptionsError as error:
        raise RecipeError(f"{recipe.path}: {error}") from error
    _check_planned(recipe, model, tokenizer)
    if not isinstance(model, TandemForCausalLM):
        _check_foreign(recipe, model, tokenizer)
        from pipeline.model.load import rope_notes

        on_rank_0(lambda: [print(line) for line in rope_notes(model.config, recipe.data.row_tokens)])
    if recipe.stage == "sft":
        _stop_at(end_of_turn(tokenizer), "the end of a turn", model, tokenizer)
    elif recipe.model.start_from:
        end = document_end_of(recipe, tokenizer)
        follows = document_start(tokenizer) if end is None else end
        _stop_at(follows, "which follows each document", model, tokenizer)
    if recipe.model.embedding_dtype != "float32":
        if not isinstance(model, TandemForCausalLM) or model.config.tie_word_embeddings:
            kind = f"{type(model).__name__} with {'a tied' if model.config.tie_word_embeddings else 'an untied'} head"
            raise RecipeError(
                f"{recipe.where('model.embedding_dtype')}: is {recipe.model.embedding_dtype}, and model.start_from "
                f"gives a {kind}: only a Tandem's embeddings can be stored so, and only beside a head of their own. "
                "Remove the key: float32 is used."
            )
        store_embeddings(model, getattr(torch, recipe.model.embedding_dtype))
    if recipe.train.get("fp8"):
        from pipeline.training.sharding import refuse_without_fp8

        refuse_without_fp8(model, recipe.where("train.fp8"))
    return model


def _check_planned(recipe: Recipe, model: Any, tokenizer: Any) -> None:
    """Raise RecipeError when horizon, memory and MFU were computed for a model of another size than the one that was
    built."""
    if recipe.model.start_from:  # whose sizes are those of its weights (check_sizes)
        return
    try:
        planned = sizes_of(recipe, len(tokenizer)).parameters()["total"]
    except ValueError:  # nothing was planned
        return
    built = sum(parameter.numel() for parameter in model.parameters())
    if planned != built:
        raise RecipeError(
            f"{recipe.where('model.type')}: {recipe.model.type} is planned with {planned:,} parameters and was built "
            f"with {built:,}, so horizon, memory and MFU would be those of another model. Give the sizes that its "
            "config calls otherwise in model.options."
        )


def _check_foreign(recipe: Recipe, model: Any, tokenizer: Any) -> None:
    """Check what another model class may do differently, and nobody would notice."""
    where, kind = recipe.where("model.type"), type(model).__name__
    try:
        summed = divides_by_num_items(model)
    except Exception as error:  # whatever a model without its pictures ends in
        raise RecipeError(
            f"{where}: {kind} computes nothing from text alone ({first_line(error)}), so it cannot be trained here. "
            "Save its text part as a model of its own and start from that."
        ) from error
    if not summed:
        raise RecipeError(
            f"{where}: {kind} does not give the summed loss of shift_labels over num_items_in_batch, so the loss "
            "would depend on micro-batch and processes, or be that of other tokens. Let forward take **kwargs and "
            "hand them to self.loss_function, as transformers' own models do."
        )
    rows = max(
        recipe.evals.bpb.batch_rows or recipe.train["per_device_eval_batch_size"],  # of evaluations, always isolated
        micro_batch(recipe) if isolates_documents(recipe) else 1,
    )
    if rows > 1 and is_flash_attention_requested(model.config):
        raise RecipeError(
            f"{recipe.where('model.attn_implementation')}: the flash kernels of transformers keep packed documents "
            f"apart in batches of one row only, and a {kind} would see through them in its batches of {rows}. Write "
            "sdpa."
        )
    if not comes_back_beside(model.config, tokenizer):
        raise RecipeError(
            f"{where}: beside a {kind}, transformers loads a tokenizer class of its own instead of the saved one, so "
            "the model could not be used with the ids that it was trained on. Take another model.type, or start from "
            "a model of this type with its own tokenizer."
        )


def _refuse_quantized(model: Any, where: str) -> None:
    """Raise DataError where transformers keeps weights of the model quantized.

    Floats that it quantizes in each step (BitNet's) can be trained.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(model, "is_quantized", False) and not getattr(quantizer, "is_qat_trainable", False):
        method = getattr(model.config.quantization_config, "quant_method", "unknown method")
        raise DataError(
            f"{where}: its weights are quantized ({getattr(method, 'value', method)}), which no step can change. "
            "Start from the same model in bf16 or fp32."
        )


def _build(recipe: Recipe, tokenizer: Any) -> torch.nn.Module:
    start, attention = recipe.model.start_from, recipe.model.chosen_attention or recipe.model.attn_implementation
    seed = int(recipe.train.get("seed", 42))
    if start:
        from pipeline.evals.subject import open_model

        try:
            where = recipe.where("model.start_from")
            model = open_model(
                start,
                code=recipe.code,
                where=where,
                dtype=torch.float32,
                attn_implementation=attention,
                text_type=_begun_type(recipe),
            )
        except OSError as error:
            raise InputMissingError(
                f"{recipe.path}: model.start_from: {start}: no model can be loaded ({error})."
            ) from error
        model.config.get_text_config().use_cache = False  # Trainer does so of a model of text alone
        on_rank_0(lambda: [print(line) for line in model.notes])  # one call: ranks may have other notes
        check_sizes(recipe, model.config)
        where = f"{recipe.where('model.start_from')}: {start}"
        _refuse_quantized(model, where)
        refuse_nonfinite(model.state_dict(), where=where, instead="Start from other weights.")
        return _with_rows_for(tokenizer, model, seed)
    fields = model_fields(
        recipe,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind = recipe.model.type
    if ":" not in kind:
        own_start = recipe.model.preset == "portable"
        return build_model(kind, fields, attn_implementation=attention, seed=seed, identity_blocks=own_start)
    where = recipe.where("model.type")
    own = import_attribute(kind, recipe.code, where=where)
    with guarded(f"{where}: {kind}"):
        return build_model(own, fields, attn_implementation=attention, seed=seed)


def _begun_type(recipe: Recipe) -> str | None:
    """Return the model_type of the checkpoints that the recipe's run has; a text part alone stays that."""
    if recipe.run.name is None:
        return None
    checkpoints = by_step(RunDirectory(Path(recipe.run.directory) / recipe.run.name).checkpoints)
    configs = [folder / "config.json" for folder in checkpoints if (folder / "config.json").exists()]
    return read_json(configs[-1]).get("model_type") if configs else None


def _stop_at(end: int | None, what: str, model: Any, tokenizer: Any) -> None:
    """Add to the generation config what ends an answer or a text, where it is not there: `generate` would go on."""
    config = model.generation_config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if end is None or end in known:
        return
    config.eos_token_id = [end, *(i for i in known if i is not None)]
    on_rank_0(
        lambda: print(
            f"model: generation also ends at {tokenizer.convert_ids_to_tokens(end)!r}, {what} (eos_token_id of "
            "generation_config.json)"
        )
    )


def _with_rows_for(tokenizer: Any, model: Any, seed: int) -> torch.nn.Module:
    """Return the model with an embedding for every id: a foreign one lacks rows for the control tokens that chat
    added."""
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        on_rank_0(
            lambda: print(
                f"model: {len(tokenizer) - rows} embeddings added for new tokens ({rows} -> {len(tokenizer)})"
            )
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # new rows are drawn around the mean of the old ones: the same at every start
            model.resize_token_embeddings(len(tokenizer))
    return model


def build_trainer(
    recipe: Recipe,
    run: RunDirectory,
    *,
    model: Any,
    tokenizer: Any,
    rows: Any,
    validation: Any,
    watched: Callable[..., Iterable] = iter,
    eval_on_start: bool = False,
) -> TandemTrainer:
    """Return the Trainer of both stages. rows, validation: as the data room opens them; recipe.train holds max_steps
    by now.

    watched: what the batches of evaluations go through, so that a signal can end them.
    """
    bf16 = decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16")))
    compiled = decide_compile(recipe.train.get("torch_compile"))
    args = build_arguments(
        recipe,
        run,
        bf16=bf16,
        torch_compile=compiled and not shards_model(),  # the Trainer would compile the whole model, hooks included
        use_cpu=device_info().kind == "cpu",
        eval_on_start=eval_on_start,
    )
    peaks = device_info().peak_flops or {}
    meter = StepMeter(
        tokens_at=partial(tokens_at, recipe),
        max_steps=args.max_steps,
        world_size=args.world_size,
        sizes=sizes_from_model(model, recipe.data.row_tokens),
        peak=peaks.get(
            compute_format(bf16=bf16, fp16=bool(args.fp16), tf32=bool(args.tf32), fp8=bool(recipe.train.get("fp8")))
        ),
        bf16_peak=peaks.get("bfloat16"),
    )
    lengths_V = byte_lengths(tokenizer) if is_byte_level(tokenizer) else None
    score = partial(
        score_validation,
        validation=validation,
        byte_lengths_V=lengths_V,
        stage=recipe.stage,
        rows=recipe.evals.bpb.batch_rows or args.per_device_eval_batch_size,
        rank=batch_rank(args.process_index),
        world_size=batch_ranks(args.world_size),
        device=args.device,
        autocast_dtype=torch.bfloat16 if bf16 else torch.float16 if args.fp16 else None,
        nll=compiled_nll(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        if args.torch_compile
        else None,
    )

    tasks = {}
    if recipe.evals.tasks:
        where = f"{recipe.path}: evals.tasks"
        from pipeline.evals.tasks import load_tasks

        tasks = load_tasks(recipe.evals.tasks, folder=recipe.code, where=where)

    def evaluate(model: torch.nn.Module, watched: Callable) -> dict[str, float]:
        numbers = score(model, watched=watched)
        if tasks:
            from pipeline.evals.tasks import score_tasks

            numbers |= score_tasks(tasks, model, tokenizer, watched=watched)
        return numbers

    look_for_lomo_once()
    if shards_model():
        options = {name: recipe.train.get(f"torch_compile_{name}") for name in ("backend", "mode")}
        given = {k: v for k, v in options.items() if v} if compiled else None
        from pipeline.training.sharding import shard_model

        shard_model(model, compile_options=given)
        args.torch_compile = compiled
    trainer = TandemTrainer(
        model=model,
        args=args,
        recipe=recipe,
        run=run,
        tokenizer=tokenizer,
        rows=rows,
        evaluate_model=evaluate,
        watched=watched,
        meter=meter,
        byte_lengths_V=lengths_V,
    )
    if recipe.stage == "pretrain" and recipe.model.start_from:
        trainer.add_callback(KeepEnds(model))
    return trainer
