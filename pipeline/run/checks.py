"""Checks before step 1: the recipe, its plan, this machine, and all that the run will read. plan/capacity.py checks
whether the run fits its devices and its disk.

A check of one thing raises what is wrong with it; one of several things returns it.
"""

import importlib.util
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import (
    autocast_dtype,
    can_compile,
    decide_bf16,
    decide_compile,
    device_info,
    shards_model,
    tensor_parallel_size,
)
from pipeline.hardware.processor import cpu_can_compile
from pipeline.plan.capacity import find_notes, find_problems
from pipeline.plan.plan import Plan, make_plan
from pipeline.process.commands import command
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
from pipeline.process.user_code import CodeFolder, import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.located_yaml import show
from pipeline.recipe.model_sizes import model_fields
from pipeline.recipe.resolve import warmup_of
from pipeline.recipe.schema import ARGUMENTS, Adapter, Model, with_values
from pipeline.recipe.sizes import options_of
from pipeline.recipe.start_from import drops_attention, start_folder
from pipeline.run.attention import AS_RECIPE, AttentionNeeds, attention_line, choose_attention, refuse_attention
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, unexpected_model_files
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.open import open_sources, with_recorded_inputs

LONG_WARMUP = 0.5  # share of the steps
SIDE = 128  # of the matrix that an optimizer updates: from 4,096 elements on some keep their state in 8 bits
STEPS = 100  # of a run whose length only the data know
# By the beginning of its keys: what a run lacks that does it at the end alone, by its strategy or by its cadence.
CADENCES = {
    "save": (
        "a run that stops before its end is lost. Remove it to save",
        "nothing is saved before its end, and one that is killed is lost. Lower it to continue such a run.",
    ),
    "eval": (
        "validation is scored at the end alone, and what goes wrong before is not seen. Remove it to score",
        "validation is scored at the end alone. Lower it to see how the run goes.",
    ),
}


def kernel_problems(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    """Return the formats and kernels that the recipe names and the device of this process lacks. Imports torch."""
    found: list[TandemError] = []
    if recipe.train.get("fp16") and device.kind == "cpu":
        where = recipe.where("train.fp16")
        found.append(RecipeError(f"{where}: fp16 needs a GPU, and this run is on a CPU. Write bf16: auto instead."))
    if recipe.train.get("tf32") and not has_capability(device, (8, 0), amd=True):
        where = recipe.where("train.tf32")
        found.append(RecipeError(f"{where}: {device.name} has no TF32. Remove the key; fp32 is used."))
    if recipe.train.get("fp8"):
        found += float8_problems(recipe.model, device, where=recipe.where("train.fp8"))
    elif os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        found.append(
            RecipeError(
                f"{recipe.where('train.fp8')}: accelerate's config file has mixed_precision: fp8, and the recipe "
                "decides the format. Write train.fp8: true and bf16: true, or mixed_precision: bf16 there."
            )
        )
    where = recipe.where("train.torch_compile")
    found += raised(partial(_compiler, recipe.train.get("torch_compile"), device, where=where))
    if recipe.model.attn_implementation not in (None, "eager", "sdpa"):
        found += raised(refuse_attention, attention_needs(recipe), device)
    return found


def attention_needs(recipe: Recipe) -> AttentionNeeds:
    """Return what of the recipe decides its attention implementation."""
    return AttentionNeeds(
        named=recipe.model.attn_implementation,
        where=recipe.where("model.attn_implementation"),
        is_tandem=recipe.model.becomes_tandem,
        isolated=recipe.isolates_documents,
        has_dropout=drops_attention(recipe.model),
        starts_from_config=bool(recipe.model.start_config),
        dtype=autocast_dtype(recipe.train),
        compiled=decide_compile(recipe.train.get("torch_compile")),
    )


def has_capability(device: DeviceInfo, least: tuple[int, int], *, amd: bool = False) -> bool:
    """Return whether the GPU is NVIDIA's of at least that compute capability, or with amd one of AMD's."""
    import torch

    if device.kind != "cuda":
        return False
    return amd if torch.version.hip is not None else torch.cuda.get_device_capability() >= least


def float8_problems(model: Model, device: DeviceInfo, *, where: str) -> list[TandemError]:
    """Return what train.fp8 lacks: the device, its package, or matrices that it would convert."""
    found = list[TandemError]()
    if not has_capability(device, (8, 9)):
        message = f"float8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or later, not {device.name}"
        found.append(RecipeError(f"{where}: {message}. Remove the key; bf16 stays."))
    if importlib.util.find_spec("torchao") is None:
        message = "float8 needs the package torchao. Install it (pip install 'torchao>=0.18'), or remove the key."
        found.append(InputMissingError(f"{where}: {message}"))
    started = model.start_config
    if model.start_from is not None and started is None:
        return found  # of such a model it is reported when its weights are here (training/build.py)
    # Where the config does not say: GPT-2's matrices have biases, nanochat's have none.
    has_bias = started is None or started.get("model_type") != "nanochat"
    options = started if started is not None else options_of(model)
    if not model.becomes_tandem:
        found.append(RecipeError(f"{where}: is for model.type tandem, and this model is another one. Remove the key."))
    elif options.get("use_bias", has_bias):
        cure = "Remove the key" if started else "Remove the key, or set model.options.use_bias: false"
        message = f"this model's matrices have biases, as GPT-2's, and such are not converted. {cure}."
        found.append(RecipeError(f"{where}: {message}"))
    return found


def _compiler(torch_compile: bool | str | None, device: DeviceInfo, *, where: str) -> None:
    if torch_compile is not True:
        return
    # Without torch, which brings Triton, nothing is known of a GPU.
    compiles = device.kind != "cpu" or cpu_can_compile()
    if importlib.util.find_spec("torch") is not None:
        compiles = can_compile()
    if not compiles:
        raise InputMissingError(
            f"{where}: torch.compile finds no compiler (on a CPU: g++ and Python's headers; on a GPU: Triton), or "
            "TORCH_COMPILE_DISABLE is 1. Install or unset it, or write auto."
        )


def cadence_notes(recipe: Recipe, steps: int) -> list[str]:
    """Return sentences on what happens too late, or never, in a run of so many steps. A warm-up longer than it is
    refused when the recipe is read."""
    train, notes = recipe.train, []
    name, warmup = warmup_of(recipe.optimizer, train, steps)
    if warmup > LONG_WARMUP * steps:
        notes.append(
            f"{recipe.where(name)}: {warmup} of the run's {steps} steps are warm-up: the rate is at its peak for "
            "little of it, and nothing learned there tells of a longer run. Shorten the warm-up, or train longer."
        )
    for kind, (never, late) in CADENCES.items():
        strategy, cadence = f"train.{kind}_strategy", f"train.{kind}_steps"
        every = train[f"{kind}_steps"]
        if train[f"{kind}_strategy"] == "no":
            notes.append(f"{recipe.where(strategy)}: is no: {never} every {cadence} steps.")
        elif every >= steps:
            notes.append(f"{recipe.where(cadence)}: is {every}, and the run has {steps} steps: {late}")
    return notes


def trainer_problems(recipe: Recipe) -> list[TandemError]:
    """Return what transformers refuses of the recipe's `train:`, by the key without which it refuses nothing."""
    reason = _refusal(recipe)
    if reason is None:
        return []
    for name, value in recipe.train.items():
        key = f"train.{name}"
        # The first that was given and without which nothing is refused.
        if key in recipe.places and _refusal(with_values(recipe, {key: ARGUMENTS[name].default})) is None:
            what = f"is {show(value)}, which cannot be used here ({reason}). Correct it, or leave it out."
            return [RecipeError(f"{recipe.where(key)}: {what}")]
    what = f"train: is refused by transformers ({reason}). Change the keys that it speaks of."
    return [RecipeError(f"{recipe.path}: {what}")]


def _refusal(recipe: Recipe) -> str | None:
    """Return why transformers would not train with these settings, in its words; None when it would."""
    import torch
    from safetensors.torch import load, save
    from transformers import Trainer, get_scheduler

    from pipeline.training.build import build_arguments
    from pipeline.training.optimizer_state import load_optimizer_state, optimizer_settings, optimizer_tensors

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
        # One real step on one matrix, saved and loaded: what an optimizer lacks shows now, not at the first checkpoint.
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
    from pipeline.training.distributed import on_rank_0
    from pipeline.training.shared_folder import refuse_unshared

    plan = make_plan(recipe, device_info(), processes=processes)
    recipe = plan.recipe  # with the planned micro-batch, where it is auto

    def decide() -> tuple[str | None, str] | None:
        if "finished" in RunDirectory.of(recipe.run).read_manifest():
            return None
        # Everything at once: a start on a cluster may wait hours for the next mistake.
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
        chosen = choose_attention(attention_needs(recipe), plan.device, plan.sizes)
        if chosen[1] != AS_RECIPE:
            print(attention_line(*chosen), flush=True)
        return chosen

    chosen = on_rank_0(decide)
    if chosen is None:
        return recipe
    refuse_unshared(RunDirectory.of(recipe.run).path)
    refuse_unshared(cache_dir(recipe.data.cache_dir), key="data.cache_dir")  # rank 0 prepares rows for all
    return with_values(recipe, {"model.chosen_attention": chosen[0]})


def machine_problems(plan: Plan) -> list[TandemError]:
    """Return what would end the run on this machine, apart from what does not fit: kernels, folders and
    benchmarks."""
    return [
        *raised(_start, plan),
        *raised(_adapter, plan.recipe.model.adapter, plan.recipe.where("model.adapter")),
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

        folder = None
        if recipe.path:
            folder = str(Path(recipe.path).parent)
        benchmarks.append(
            benchmark_of_recipe(
                recipe.evals.chat,
                unsafe_exec=recipe.evals.unsafe_exec,
                code=recipe.code,
                folder=folder,
                cache=recipe.data.cache_dir,
                where=recipe.where("evals.chat"),
            )
        )
    return benchmarks


def _start(plan: Plan) -> None:
    """Refuse a checkpoint of a run that is training now: that run deletes it in time, and this one compares it at
    every start."""
    recipe, folder = plan.recipe, Path(plan.recipe.model.start_from or "")
    run = RunDirectory(folder.parent.parent)
    attempt = EarlierRuns().previous_attempt(recipe.run.directory, recipe.run.name)
    begun = attempt.get("model.start_from") == str(folder)
    if not begun and folder.parent == run.checkpoints and run.in_use():
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: run {run.path} is training, and may delete {folder.name} once it "
            f"has newer ones (train.save_total_limit): this run could not be continued then. Wait for {run.model}, or "
            "start from a copy of the checkpoint."
        )


def _writing(plan: Plan) -> Iterator[TandemError]:
    recipe = plan.recipe
    folders = {"run.directory": RunDirectory.of(recipe.run).path, "data.cache_dir": cache_dir(recipe.data.cache_dir)}
    for key, folder in folders.items():
        try:
            tempfile.TemporaryFile(dir=nearest_existing(folder)).close()
        except OSError as error:
            if key == "data.cache_dir" and error.errno in NOT_WRITABLE and is_cache(folder):
                continue  # what it lacks is refused when it is to be prepared, before step 1
            yield CannotWriteError(f"{folder}: cannot be written ({error.strerror}). Set {key} to a folder that can.")


def named_code_problems(recipe: Recipe) -> list[TandemError]:
    """Return each name that cannot be used. A model that starts from weights has their options."""
    code, model = recipe.code, recipe.model
    found = []
    for name in recipe.run.callbacks:
        found += raised(_callback, name, code, recipe.where("run.callbacks"))
    if recipe.evals.tasks:
        from pipeline.evals.tasks import load_tasks

        where = recipe.where("evals.tasks")
        found += raised(partial(load_tasks, recipe.evals.tasks, folder=code, where=where))
    own = {"optimizer.type": recipe.optimizer.type}
    if not model.start_from:  # one that starts from weights is theirs
        own["model.type"] = model.type
    for key, name in own.items():
        if ":" in name:
            found += raised(_factory, name, code, recipe.where(key))
    if not model.start_from and ":" not in model.type:
        found += raised(_model, recipe)
    return found


def _adapter(adapter: Adapter | None, where: str) -> None:
    if adapter is None:
        return
    from pipeline.evals.subject import refuse_without_peft

    refuse_without_peft(where)
    if shards_model() or tensor_parallel_size() > 1:
        raise RecipeError(
            f"{where}: adapters are trained with the whole base on every device, and the launcher cuts it (FSDP or "
            "tensor parallelism). Take accelerate_configs/ddp.yaml."
        )


def _callback(name: str, code: CodeFolder, where: str) -> None:
    try:
        inspect.signature(import_attribute(name, code, where=where)).bind()
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{where}: {name} cannot be used ({error}). Name a TrainerCallback class that is made without arguments."
        ) from error


def _factory(name: str, code: CodeFolder, where: str) -> None:
    if not callable(import_attribute(name, code, where=where)):
        raise RecipeError(f"{where}: {name} cannot be called. Name a function or a class.")


def _model(recipe: Recipe) -> None:
    """Build the model once without its weights: its config refuses now what it would refuse after the data are
    prepared."""
    import torch

    from pipeline.model.build import build_model
    from pipeline.model.errors import ModelOptionsError

    fields = model_fields(
        recipe.model, vocab_size=recipe.tokenizer.vocab_size or 512, bos_token_id=0, eos_token_id=0, pad_token_id=0
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
    run = RunDirectory.of(recipe.run)
    problems: list[TandemError] = []
    notes: list[str] = []
    if recipe.hub.id is not None:
        from pipeline.hub.write_access import write_findings

        problems, notes = write_findings(recipe.hub, run, where=recipe.where("hub.id"))
    if recipe.monitor.trackers:
        from pipeline.callbacks.trackers import tracker_findings

        where = recipe.where("monitor.trackers")
        found = tracker_findings(recipe.monitor.trackers, where=where, has_trained=run.has_trained())
        problems, notes = [*problems, *found[0]], [*notes, *found[1]]
    return problems, notes


def reading_findings(
    recipe: Recipe, *, only: Sequence[str] = ("sources", "tokenizer", "weights")
) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes) of what the recipe names; model.start_from is resolved by now.

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
    """Open the sources as the stage will, and return notes; what is found out about a file is kept, so that this costs
    the start nothing."""
    if not can_be_used(cache_dir(recipe.data.cache_dir)):  # where it is kept; the check of the folders says so
        return []
    run = RunDirectory.of(recipe.run)
    goes_on = run.has_trained()
    if goes_on:
        data = with_recorded_inputs(recipe.data, run.read_manifest().get("inputs", {}))
        recipe = with_values(recipe, {"data": data})
    train, validation = open_sources(recipe.source_settings())
    if goes_on:  # it was said before the first step
        return []
    from pipeline.data.overlap import overlap_of

    note = overlap_of(train, validation).note()
    return [f"{recipe.where('data.validation')}: {note}"] if note else []


def _tokenizer(recipe: Recipe) -> None:
    """Refuse a ready tokenizer that cannot be read, whose ids have holes, or other ones than the weights were trained
    with."""
    path, start = recipe.tokenizer.path, start_folder(recipe)
    if path is None:
        return
    from pipeline.tokenizer.load import open_tokenizer, ready_tokenizer

    tokenizer, _ = ready_tokenizer(recipe.tokenizer_settings())
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
        tokenizer, lines = ready_tokenizer(recipe.tokenizer_settings())
    except TandemError:  # which `tokenizer` has found as well
        return []
    have = _rows(start_folder(recipe))
    if have:
        added = max(0, len(tokenizer) - have)
        changed = f"its {have:,} embeddings stay as they are; none is added"
        if added:
            changed = f"{added} embeddings are added for new tokens ({have:,} -> {len(tokenizer):,})"
        lines.append(f"model: {changed}")
    return lines or [
        f"tokenizer: {recipe.tokenizer.path} keeps its chat template and its {len(tokenizer):,} ids; nothing is added"
    ]


def _rows(start: Path | None) -> int:
    if start is None:
        return 0
    return int(json.loads((start / "config.json").read_text(encoding="utf-8")).get("vocab_size") or 0)


def _weights(recipe: Recipe) -> None:
    """Refuse sealed weights that are damaged, and a folder of something else that has no weights.

    A run that has a checkpoint continues from it and reads them no more.
    """
    start = recipe.model.start_from
    if start is None or not Path(start).is_dir() or by_step(RunDirectory.of(recipe.run).checkpoints):
        return
    folder, where = Path(start), recipe.where("model.start_from")
    if any((folder / place / "adapter_config.json").is_file() for place in ("", "model")):  # of a run, too
        raise InputMissingError(
            f"{where}: {folder} is an adapter (LoRA), no whole model. Merge it: "
            f"{command('hub', 'export', folder, '--merge')}, and start from that."
        )
    if (folder / SEAL).is_file():
        damaged = problems(folder) or [f"{name} does not belong to it" for name in unexpected_model_files(folder)]
        if damaged:
            raise DataError(
                f"{where}: {folder} is damaged ({'; '.join(damaged)}). Copy it again, or start from another "
                "checkpoint of that run."
            )
    elif not any(p.suffix == ".safetensors" or p.name.startswith("pytorch_model") for p in folder.iterdir()):
        raise InputMissingError(
            f"{where}: {folder} holds no weights (*.safetensors or pytorch_model*.bin). Name a folder that "
            "save_pretrained wrote, or a run."
        )
