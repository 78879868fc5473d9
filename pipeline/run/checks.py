"""Checks before step 1: the recipe, its plan and this machine. Whether the run fits its devices and its disk:
plan/capacity.py."""

import functools
import importlib.util
import inspect
import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import can_compile, decide_bf16, device_info
from pipeline.hardware.processor import cpu_can_compile
from pipeline.process.errors import (
    CannotWriteError,
    DataError,
    InputMissingError,
    RecipeError,
    TandemError,
    raise_errors,
    raised,
)
from pipeline.process.storage import NOT_WRITABLE, cache_dir, can_be_used, is_cache, nearest_existing
from pipeline.process.user_code import import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.batch import isolates_documents
from pipeline.recipe.identity import run_folder
from pipeline.recipe.located_yaml import show
from pipeline.recipe.model_sizes import model_fields
from pipeline.recipe.resolve import warmup_of
from pipeline.recipe.schema import ARGUMENTS, with_values
from pipeline.recipe.sizes import Sizes
from pipeline.recipe.start_from import becomes_tandem, drops_attention, previous_attempt, start_folder
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, unexpected_model_files
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.open import open_sources, with_recorded_inputs

if TYPE_CHECKING:
    from pipeline.plan.plan import Plan
    from pipeline.recipe.model_statistics import CountedSizes

# A check of one thing raises what is wrong with it; one of several things yields or returns it.


# Formats and kernels that a recipe asks for and this machine may lack. Imports torch.


def kernel_problems(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    """fp16, tf32, fp8, torch.compile and attention kernels against the device of this process."""
    found = [*_formats(recipe, device), *_float8(recipe, device), *raised(_compiler, recipe, device)]
    if recipe.model.attn_implementation not in (None, "eager", "sdpa"):
        from pipeline.run.kernels import refuse_attention

        found += raised(refuse_attention, recipe, device)
    return found


def _formats(recipe: Recipe, device: DeviceInfo) -> Iterator[TandemError]:
    if recipe.train.get("fp16") and device.kind == "cpu":
        where = recipe.where("train.fp16")
        yield RecipeError(f"{where}: fp16 needs a GPU, and this run is on a CPU. Write bf16: auto and remove fp16.")
    if recipe.train.get("tf32") and not _has_tf32(device):
        yield RecipeError(f"{recipe.where('train.tf32')}: {device.name} has no TF32. Remove the key; fp32 is used.")


def _has_tf32(device: DeviceInfo) -> bool:
    import torch

    return device.kind == "cuda" and (torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8)


def _float8(recipe: Recipe, device: DeviceInfo) -> Iterator[TandemError]:
    if recipe.train.get("fp8"):
        from pipeline.run.kernels import float8_problems

        yield from float8_problems(recipe, device)
    elif os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        message = (
            "accelerate's config file has mixed_precision: fp8 and the recipe does not, whose choice it is. Write "
            "train.fp8: true beside bf16: true, or mixed_precision: bf16 there."
        )
        yield RecipeError(f"{recipe.where('train.fp8')}: {message}")


def _compiler(recipe: Recipe, device: DeviceInfo) -> None:
    if recipe.train.get("torch_compile") is not True:
        return
    # Without torch, which brings Triton, nothing is known of a GPU.
    has_torch = importlib.util.find_spec("torch") is not None
    if not (can_compile() if has_torch else device.kind != "cpu" or cpu_can_compile()):
        raise InputMissingError(
            f"{recipe.where('train.torch_compile')}: torch.compile finds no compiler here (on a CPU: g++ and Python's "
            "headers; on a GPU: Triton), or TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is 1. Install or unset them, "
            "or write torch_compile: auto."
        )


# Choice of the attention that a run trains with: a kernel is tried on its device before it is believed.

AS_ASKED = "as the recipe says"


def choose_attention(
    recipe: Recipe,
    device: DeviceInfo,
    sizes: "Sizes | CountedSizes | None",
    *,
    trial: Callable[..., float] | None = None,
) -> tuple[str | None, str]:
    """Return the attention implementation by its name in transformers (None leaves it to transformers), and why.

    What the recipe names is kept, and tried as what is chosen here is. trial: as difference_from_eager of
    run/kernels.py, which it is by default. Raises RecipeError when what the recipe names does not work on this
    device.
    """
    asked = recipe.model.attn_implementation
    if asked in ("eager", "sdpa") or (asked and (device.kind != "cuda" or sizes is None)):
        return asked, AS_ASKED
    if asked:
        from pipeline.run.kernels import try_attention

        worked, found = try_attention(asked, recipe, sizes, trial)
        if worked:
            return asked, f"{AS_ASKED}; {found}"
        raise RecipeError(
            f"{recipe.where('model.attn_implementation')}: {asked} does not give this model's attention on "
            f"{device.name} ({found}). Write sdpa, or remove the key."
        )
    if not becomes_tandem(recipe) or sizes is None:
        return None, "transformers' choice for a model that is not known as Tandem's before it is loaded"
    hidden = _hidden(recipe, sizes)
    if not hidden:
        return "sdpa", "every layer sees all of its row before it"
    if drops_attention(recipe):
        return "sdpa", f"{hidden}, by a dense mask: flex_attention has no dropout, and the model's attention has some"
    if device.kind != "cuda":
        # The place of a kernel that skips blocks on other devices: FlexAttention has no backward pass there.
        return "sdpa", f"{hidden}, by a dense mask: flex_attention has no backward pass on {device.kind}"
    if not can_compile():
        return "sdpa", f"{hidden}, by a dense mask: flex_attention needs a compiler, and Triton is not here"
    from pipeline.run.kernels import try_attention

    worked, found = try_attention("flex_attention", recipe, sizes, trial)
    if worked:
        return "flex_attention", f"{hidden}, whose hidden blocks it skips; {found}"
    return "sdpa", f"{hidden}, by a dense mask: flex_attention does not work here ({found})"


def attention_line(implementation: str | None, why: str) -> str:
    return f"attention: {implementation or 'default'} ({why})"


def _hidden(recipe: Recipe, sizes: "Sizes | CountedSizes") -> str:
    """Return what causal attention over the whole row would see and the model does not; empty when nothing."""
    window = min(sizes.windows)
    parts = [f"windows of {window:,} in rows of {sizes.row_tokens:,} tokens"] * (window < sizes.row_tokens)
    return " and ".join(parts + ["documents that do not see each other"] * isolates_documents(recipe))


# What a run will lack for its length: a rate that reaches its peak, checkpoints to go on from, validation on the way.

LONG_WARMUP = 0.5


def cadence_notes(recipe: Recipe, steps: int) -> list[str]:
    """Sentences on what happens too late, or never, in a run of so many steps. A warm-up longer than it is refused
    when the recipe is read."""
    train, notes = recipe.train, []
    name, warmup = warmup_of(recipe, steps)
    if warmup > LONG_WARMUP * steps:
        notes.append(
            f"{recipe.where(name)}: {warmup} of the run's {steps} steps are warm-up: the rate is at its peak for "
            "little of it, and nothing learned there tells of a longer run. Shorten the warm-up, or train longer."
        )
    if train["save_strategy"] == "no":
        notes.append(
            f"{recipe.where('train.save_strategy')}: is no: a run that stops before its end is lost. Remove it to "
            "save every train.save_steps steps."
        )
    elif train["save_steps"] >= steps:
        notes.append(
            f"{recipe.where('train.save_steps')}: is {train['save_steps']}, and the run has {steps} steps: nothing is "
            "saved before its end, and one that is killed is lost. Lower it to continue such a run."
        )
    if train["eval_strategy"] == "no":
        notes.append(
            f"{recipe.where('train.eval_strategy')}: is no: validation is scored at the end alone, and what goes "
            "wrong before is not seen. Remove it to score every train.eval_steps steps."
        )
    elif train["eval_steps"] >= steps:
        notes.append(
            f"{recipe.where('train.eval_steps')}: is {train['eval_steps']}, and the run has {steps} steps: validation "
            "is scored at the end alone. Lower it to see how the run goes."
        )
    return notes


# What transformers makes of `train:`, tried before data are prepared: its arguments, its optimizer and its
# schedule.

SIDE = 128  # of the matrix that is updated: from 4,096 elements on some optimizers keep their state in 8 bits
STEPS = 100  # of a run whose length only the data know


def trainer_problems(recipe: Recipe) -> list[TandemError]:
    """Return what transformers refuses of the recipe's `train:`, by the key without which it refuses nothing."""
    reason = _refusal(recipe)
    if reason is None:
        return []
    given = [name for name in recipe.train if f"train.{name}" in recipe.places]
    defaults = ((name, {f"train.{name}": ARGUMENTS[name].default}) for name in given)
    wrong = next((name for name, default in defaults if _refusal(with_values(recipe, default)) is None), None)
    if wrong is None:
        what = f"train: is refused by transformers ({reason}). Change the keys that it speaks of."
        return [RecipeError(f"{recipe.path}: {what}")]
    what = f"is {show(recipe.train[wrong])}, which cannot be used here ({reason}). Correct it, or leave it out."
    return [RecipeError(f"{recipe.where(f'train.{wrong}')}: {what}")]


def _refusal(recipe: Recipe) -> str | None:
    """Return why transformers would not train with these settings, in its words; None when it would."""
    import torch
    from safetensors.torch import load, save
    from transformers import Trainer, get_scheduler

    from pipeline.training.build import build_arguments
    from pipeline.training.checkpoint import load_optimizer_state, optimizer_settings, optimizer_tensors

    steps = recipe.train.get("max_steps") or STEPS
    known = with_values(recipe, {"train.max_steps": steps})
    decided: dict[str, Any] = {
        "bf16": decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16"))),
        "torch_compile": False,
        "use_cpu": device_info().kind == "cpu",
    }
    try:
        args = build_arguments(known, RunDirectory.of(recipe.run), **decided)
        if recipe.optimizer.type != "trainer":
            return None
        model = torch.nn.Linear(SIDE, SIDE, bias=False, device=args.device)
        model.weight.grad = torch.ones_like(model.weight)
        # These optimizers need no model: those that do are refused (optim_target_modules), or not among
        # recipe/schema.py's.
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = optimizer_class([{"params": [model.weight], "weight_decay": args.weight_decay}], **settings)
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            # Text is for its own command line
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
        optimizer.step()
        schedule.step()
        tensors = load(save(optimizer_tensors(optimizer, model)))
        settings = json.loads(json.dumps(optimizer_settings(optimizer)))
        load_optimizer_state(optimizer, model, tensors, settings=settings)
    except Exception as error:  # of transformers, torch, and the packages of optimizers
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def check_before_training(recipe: Recipe, *, processes: int) -> Recipe:
    """Return the recipe with the attention that rank 0 chooses for all. Raises on every rank what rank 0 finds on its
    machine, all in one message; notes go to the console.

    A run that has finished needs nothing any more: it is not checked.
    """
    from pipeline.plan.plan import make_plan
    from pipeline.training.distributed import on_rank_0, refuse_unshared

    plan = make_plan(recipe, device_info(), processes=processes)
    recipe = plan.recipe  # with the planned micro-batch, where it is auto

    def decide() -> tuple[str | None, str] | None:
        if "finished" in RunDirectory(run_folder(recipe)).read_manifest():
            return None
        from pipeline.plan.capacity import find_notes, find_problems

        problems = [
            *machine_problems(plan),
            *find_problems(plan, on_this_machine=True),
            *trainer_problems(recipe),
            *named_code_problems(recipe),
        ]
        notes = find_notes(plan)
        for more_problems, more_notes in (reading_findings(recipe), service_findings(recipe)):
            problems, notes = problems + more_problems, notes + more_notes
        raise_errors(problems)
        for note in notes:
            print(f"note: {note}", flush=True)
        chosen = choose_attention(recipe, plan.device, plan.sizes)
        if chosen[1] != AS_ASKED:
            print(attention_line(*chosen), flush=True)
        return chosen

    chosen = on_rank_0(decide)
    if chosen is None:
        return recipe
    refuse_unshared(run_folder(recipe))
    refuse_unshared(cache_dir(recipe.data.cache_dir), key="data.cache_dir")  # rank 0 prepares rows for all
    return with_values(recipe, {"model.chosen_attention": chosen[0]})


def machine_problems(plan: "Plan") -> list[TandemError]:
    """Return what would end the run on this machine, beside what does not fit: its packages, kernels, folders and
    benchmarks."""
    return [
        *_versions(),
        *raised(_start, plan),
        *kernel_problems(plan.recipe, plan.device),
        *_writing(plan),
        *raised(benchmarks_of, plan.recipe),
    ]


def benchmarks_of(recipe: Recipe) -> list[Any]:
    """Return the benchmarks with a cadence (evals.core.every_steps, evals.chat.every_steps), whose files are fetched
    now and read through. Raises what their files raise."""
    benchmarks: list[Any] = []
    if recipe.evals.core.every_steps is not None:
        from pipeline.evals.core import CoreBenchmark

        benchmarks.append(CoreBenchmark(recipe.evals.core, cache=recipe.data.cache_dir))
    if recipe.evals.chat.every_steps is not None:
        from pipeline.evals.chat import benchmark_of_recipe

        benchmarks.append(
            benchmark_of_recipe(
                recipe.evals.chat,
                unsafe_exec=recipe.evals.unsafe_exec,
                code=recipe.code,
                folder=str(Path(recipe.path).parent) if recipe.path else None,
                cache=recipe.data.cache_dir,
                where=recipe.where("evals.chat"),
            )
        )
    return benchmarks


def _start(plan: "Plan") -> None:
    """Refuse a checkpoint of a run that is training now: that run deletes it in time, and this one compares it at
    every start."""
    recipe, folder = plan.recipe, Path(plan.recipe.model.start_from or "")
    run = RunDirectory(folder.parent.parent)
    begun = previous_attempt(recipe).get("model.start_from") == str(folder)
    if not begun and folder.parent == run.checkpoints and run.in_use():
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: run {run.path} is training, and may delete {folder.name} once it "
            f"has newer ones (train.save_total_limit): this run could not be continued then. Wait for {run.model}, or "
            "start from a copy of the checkpoint."
        )


def _versions() -> Iterator[TandemError]:
    """Installed packages outside what pyproject.toml asks for."""
    from packaging.requirements import Requirement

    for line in _requirements():
        requirement = Requirement(line)
        found = _installed(requirement.name)
        if found == "not" or not requirement.specifier.contains(found, prereleases=True):
            yield InputMissingError(
                f"{requirement.name}: {found} installed, and Tandem needs {requirement.name}{requirement.specifier}. "
                f"Run: pip install '{requirement.name}{requirement.specifier}'"
            )


@functools.cache
def _installed(name: str) -> str:
    """Return the version of a package or "not"; reading one from the disk takes a millisecond."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not"


def _requirements() -> list[str]:
    """From the clone's pyproject.toml, or the installed distribution's metadata where there is no clone."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        return tomllib.loads(file.read_text())["project"]["dependencies"]
    try:
        return [line for line in requires("tandem-llm") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return []


def _writing(plan: "Plan") -> Iterator[TandemError]:
    folders = {"run.directory": run_folder(plan.recipe), "data.cache_dir": cache_dir(plan.recipe.data.cache_dir)}
    for key, folder in folders.items():
        try:
            tempfile.TemporaryFile(dir=nearest_existing(folder)).close()
        except OSError as error:
            if key == "data.cache_dir" and error.errno in NOT_WRITABLE and is_cache(folder):
                continue  # what it lacks is refused when it is to be prepared, before step 1
            yield CannotWriteError(f"{folder}: cannot be written ({error.strerror}). Set {key} to a folder that can.")


# What the recipe names and only Python can look up: callbacks, tasks, an optimizer, the options of the model.
# Imports torch.


def named_code_problems(recipe: Recipe) -> list[TandemError]:
    """Return each name that cannot be used. A model that starts from weights has their options."""
    own_model = "" if recipe.model.start_from else recipe.model.type  # one that starts from weights is theirs
    own = [("optimizer.type", recipe.optimizer.type), ("model.type", own_model)]
    return [
        *(problem for name in recipe.run.callbacks for problem in raised(_callback, recipe, name)),
        *raised(_tasks, recipe),
        *(problem for key, name in own if ":" in name for problem in raised(_factory, recipe, key, name)),
        *raised(_split_pattern, recipe),
        *raised(_model, recipe),
    ]


def _callback(recipe: Recipe, name: str) -> None:
    where = recipe.where("run.callbacks")
    try:
        inspect.signature(import_attribute(name, recipe.code, where=where)).bind()
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{where}: {name} cannot be used ({error}). Name a TrainerCallback class that is made without arguments."
        ) from error


def _tasks(recipe: Recipe) -> None:
    if tasks := recipe.evals.tasks:
        from pipeline.evals.tasks import load_tasks

        load_tasks(tasks, folder=recipe.code, where=recipe.where("evals.tasks"))


def _factory(recipe: Recipe, key: str, name: str) -> None:
    if not callable(import_attribute(name, recipe.code, where=recipe.where(key))):
        raise RecipeError(f"{recipe.where(key)}: {name} cannot be called. Name a function or a class.")


def _split_pattern(recipe: Recipe) -> None:
    if recipe.tokenizer.path or recipe.tokenizer.split_pattern in ("nanochat", "gpt2"):
        return
    from tokenizers import Regex

    try:
        Regex(recipe.tokenizer.split_pattern)
    except Exception as error:  # tokenizers raises bare Exceptions
        where = recipe.where("tokenizer.split_pattern")
        raise RecipeError(f"{where}: is no regular expression ({error}). Correct it.") from error


def _model(recipe: Recipe) -> None:
    """Build the model once without its weights: its config refuses now what it would refuse after the data are
    prepared."""
    if recipe.model.start_from or ":" in recipe.model.type:
        return
    import torch

    from pipeline.model.build import ModelOptionsError, build_model

    fields = model_fields(
        recipe, vocab_size=recipe.tokenizer.vocab_size or 512, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    try:
        with torch.device("meta"):
            build_model(recipe.model.type, fields, seed=0)
    except ModelOptionsError as error:
        key = str(error).partition(":")[0]
        raise RecipeError(f"{recipe.places.get(key) or recipe.path}: {error}") from error
    except Exception as error:  # a value that its config took and its layers do not
        raise RecipeError(
            f"{recipe.where('model.options')}: {recipe.model.type} cannot be built with them ({type(error).__name__}: "
            f"{error}). Correct the value."
        ) from error


def service_findings(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes) of the services that the recipe asks for: the Hub and trackers."""
    problems: list[TandemError] = []
    notes: list[str] = []
    if recipe.hub.id is not None:
        from pipeline.hub.write_access import write_findings

        hub_problems, hub_notes = write_findings(
            recipe.hub, RunDirectory.of(recipe.run), where=recipe.where("hub.id")
        )
        problems += hub_problems
        notes += hub_notes
    if recipe.monitor.trackers:
        from pipeline.callbacks.trackers import tracker_findings

        tracker_problems, tracker_notes = tracker_findings(recipe)
        problems += tracker_problems
        notes += tracker_notes
    return problems, notes


# What the run will read: its sources, its tokenizer, the weights that it starts from, all opened before step 1.


def reading_findings(
    recipe: Recipe, *, only: Sequence[str] = ("sources", "tokenizer", "weights")
) -> tuple[list[TandemError], list[str]]:
    """(problems, notes) of what the recipe names; model.start_from is resolved by now.

    only: `changes` is for who trains nothing: what becomes of a ready tokenizer is said again when a run loads it.
    """
    found: list[TandemError] = []
    notes: list[str] = []
    checks = {"sources": _sources, "tokenizer": _tokenizer, "weights": _weights, "changes": _changes}
    for what in only:
        try:
            notes += checks[what](recipe) or []
        except TandemError as error:
            found.append(error)
    return found, notes


def _sources(recipe: Recipe) -> list[str]:
    """Opened as the stage will open them; what is found out about a file is kept, so that this costs the start
    nothing."""
    if not can_be_used(cache_dir(recipe.data.cache_dir)):  # where it is kept; the check of the folders says so
        return []
    run = RunDirectory.of(recipe.run)
    goes_on = run.has_trained()
    if goes_on:
        recipe = with_recorded_inputs(recipe, run.read_manifest().get("inputs", {}))
    train, validation = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    if goes_on:  # it was said before the first step
        return []
    from pipeline.data.overlap import overlap_of

    note = overlap_of(train, validation).note()
    return [f"{recipe.where('data.validation')}: {note}"] if note else []


def _tokenizer(recipe: Recipe) -> None:
    """A ready tokenizer can be read, its ids have no holes, and they are those that the weights were trained with."""
    path, start = recipe.tokenizer.path, start_folder(recipe)
    if path is None:
        return
    from pipeline.tokenizer.load import open_tokenizer, ready_tokenizer

    tokenizer, _ = ready_tokenizer(recipe)
    where, ids = recipe.where("tokenizer.path"), tokenizer.get_vocab()
    token, largest = max(ids.items(), key=lambda pair: pair[1])
    rows = max(len(tokenizer), _rows(start))
    if largest >= rows:
        raise RecipeError(
            f"{where}: {path} has the id {largest} for {token!r} and {len(ids)} ids in all: the model would have "
            f"{rows} embeddings and none for it. Number its ids without holes, or take another tokenizer."
        )
    if start is None or Path(path) == start or not (start / "tokenizer.json").is_file():
        return
    own = open_tokenizer(str(start), revision=None, beside=None, where="model.start_from").get_vocab()
    moved = sorted((number, token) for token, number in own.items() if ids.get(token) != number)
    if moved:
        number, token = moved[0]
        raise RecipeError(
            f"{where}: {path} gives other ids than the tokenizer that {start} was trained with ({len(moved):,} of "
            f"{len(own):,} tokens; {token!r} was {number} and is {ids.get(token, 'none')}), so its embeddings would "
            "stand for other text. Leave tokenizer.path out: the tokenizer comes with the weights."
        )


def _changes(recipe: Recipe) -> list[str]:
    """Return what a run keeps of the ready tokenizer and of the vocabulary, and each change to them."""
    if recipe.tokenizer.path is None:
        return []
    from pipeline.tokenizer.load import ready_tokenizer

    try:
        tokenizer, lines = ready_tokenizer(recipe)
    except TandemError:  # which `tokenizer` has found as well
        return []
    have = _rows(start_folder(recipe))
    if have:
        added = max(0, len(tokenizer) - have)
        changed = f"{added} embeddings are added for new tokens ({have:,} -> {len(tokenizer):,})"
        lines.append(f"model: {changed if added else f'its {have:,} embeddings stay as they are; none is added'}")
    return lines or [
        f"tokenizer: {recipe.tokenizer.path} keeps its chat template and its {len(tokenizer):,} ids; nothing is added"
    ]


def _rows(start: Path | None) -> int:
    if start is None:
        return 0
    return int(json.loads((start / "config.json").read_text(encoding="utf-8")).get("vocab_size") or 0)


def _weights(recipe: Recipe) -> None:
    """Sealed weights are whole, and a folder that something else wrote has weights at all.

    A run with a checkpoint of its own goes on from that one and reads them no more.
    """
    start = recipe.model.start_from
    if start is None or not Path(start).is_dir() or by_step(RunDirectory.of(recipe.run).checkpoints):
        return
    folder, where = Path(start), recipe.where("model.start_from")
    if (folder / SEAL).is_file():
        damaged = problems(folder) or [f"{name} does not belong to it" for name in unexpected_model_files(folder)]
        if damaged:
            raise DataError(
                f"{where}: {folder} is damaged ({'; '.join(damaged)}). Copy it again, or start from another "
                "checkpoint of that run."
            )
    elif (folder / "adapter_config.json").is_file():
        raise InputMissingError(
            f"{where}: {folder} is an adapter (LoRA), no whole model. Merge it (docs/build_on.md)."
        )
    elif not any(p.suffix == ".safetensors" or p.name.startswith("pytorch_model") for p in folder.iterdir()):
        raise InputMissingError(
            f"{where}: {folder} holds no weights (*.safetensors or pytorch_model*.bin). Name a folder that "
            "save_pretrained wrote, or a run."
        )
