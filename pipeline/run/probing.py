"""Trials on the device before step 1: a probe's steps, and the micro-batch that fits.

`python -m pipeline.run.probing SECONDS RECIPE [section.key=value ...]` makes the steps that a probe measures
(plan/plan.py): the Trainer of the stages on random rows, without callbacks, evaluations and checkpoints. It
prints the result as one line of JSON and ends at once: nothing of it is kept. The micro-batch is resolved in the
training's own process.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from pipeline.data.loader import on_device
from pipeline.evals.bpb import per_token_nll
from pipeline.hardware.device import batch_ranks, device_info
from pipeline.hardware.processor import peak_bytes
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.plan.memory import CPU_POSITIONS, CPU_SHARE, options
from pipeline.plan.plan import make_plan
from pipeline.process.errors import OutOfMemoryError
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.batch import KEY, isolates_documents, micro_batch, micro_steps, rows_per_step

# What a stage imports and a probe does not need counts in its memory.
from pipeline.recipe.schema import with_values
from pipeline.run.checks import choose_attention
from pipeline.run.open_run import OpenRun, resolve_open_values, start_process
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.load import load_ready
from pipeline.training.build import build_from_recipe, build_trainer
from pipeline.training.causes import fits
from pipeline.training.distributed import from_every_rank, on_rank_0
from pipeline.training.isolation import resolve_rows
from pipeline.training.trainer import TandemTrainer

LEFT_OUT = 2  # steps: the first one compiles, and takes the optimizer's state; the second one may compile again
MOST_STEPS = 200
DOCUMENTS_A_ROW = 4  # where documents are kept apart


class RandomRows:
    """Rows of random ids in the form of data/rows.py; every position is a target."""

    def __init__(self, recipe: Recipe, vocab_size: int):
        self.row_tokens, self.rows_per_step = recipe.data.row_tokens, rows_per_step(recipe)
        self.isolated, self.vocab_size = isolates_documents(recipe), vocab_size
        self.random = torch.Generator().manual_seed(0)

    def micro_rows(self, step: int, rows: int) -> int:
        return rows

    def micro_batch(self, step: int, micro_step: int, *, rank: int, world_size: int, rows: int) -> dict[str, Any]:
        ids = torch.randint(self.vocab_size, (rows, self.row_tokens + 1), generator=self.random)
        labels = ids[:, 1:].contiguous()
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "shift_labels": labels}
        if self.isolated:
            document = -(-self.row_tokens // DOCUMENTS_A_ROW)
            batch["position_ids"] = (torch.arange(self.row_tokens) % document).repeat(rows, 1)
        return batch

    def num_targets(self, step: int) -> int:
        return self.rows_per_step * self.row_tokens

    def position(self, step: int) -> dict[str, Any]:
        return {}

    def consumed(self, step: int) -> dict[str, Any]:
        return {}

    def num_retries(self) -> int:
        return 0

    def origins(self, step: int) -> list:
        return []


class Clock(TrainerCallback):
    """Times the steps, and ends the process when enough were measured. evaluate: done once then, for the memory it
    takes; peak: bytes that the device gave at most."""

    def __init__(self, seconds: float, evaluate: Callable[[], Any], peak: Callable[[], int]):
        self.seconds, self.evaluate, self.peak, self.ends = seconds, evaluate, peak, list[float]()

    def on_train_begin(self, args, state, control, **rest):
        self.ends = [time.perf_counter()]

    def on_step_end(self, args, state, control, **rest):
        if torch.cuda.is_available() and args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.ends.append(time.perf_counter())
        taken = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        measured = taken[LEFT_OUT:]
        if not on_rank_0(lambda: bool(measured) and (sum(measured) >= self.seconds or len(taken) >= MOST_STEPS)):
            return
        with torch.no_grad():
            self.evaluate()
        if state.is_world_process_zero:
            result = {
                "step_s": median(measured),  # other programs that come and go make some of the few steps slow
                "low_s": min(measured),
                "high_s": max(measured),
                "steps": len(measured),
                "first_step_s": taken[0],
                "peak_bytes": self.peak() if args.device.type == "cuda" else peak_bytes(),
                "time": time.time(),
            }
            print(json.dumps(result), flush=True)
        os._exit(0)


def main(argv: list[str]) -> None:
    recipe = read_recipe(argv[1:])
    processes = start_process(recipe)
    recipe = resolve_open_values(recipe, processes)
    few = {"train.eval_strategy": "no", "train.save_strategy": "no", "train.max_steps": 10 * MOST_STEPS}
    recipe = with_values(recipe, few)
    plan = make_plan(recipe, device_info(), processes=processes)
    recipe = plan.recipe
    attention = on_rank_0(lambda: choose_attention(recipe, plan.device, plan.sizes))[0]
    recipe = with_values(recipe, {"model.chosen_attention": attention})
    tokenizer = _tokenizer(recipe)
    model: Any = build_from_recipe(recipe, tokenizer)
    if not isinstance(model, TandemForCausalLM):
        recipe = resolve_rows(recipe, model)
    rows = RandomRows(recipe, len(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        trainer = build_trainer(recipe, run, model=model, tokenizer=tokenizer, rows=rows, validation=None)
        scored = recipe.evals.bpb.batch_rows or trainer.args.per_device_eval_batch_size
        batch = on_device(rows.micro_batch(0, 0, rank=0, world_size=1, rows=scored), trainer.args.device)
        dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
        evaluate = partial(per_token_nll, model, batch, autocast_dtype=dtype)
        trainer.add_callback(Clock(float(argv[0]), evaluate, trainer.log_row.memory.peak))
        trainer.resume(None)


def _tokenizer(recipe: Recipe) -> Any:
    """Return the recipe's ready one where it lies here, else one that only has as many ids: rows are random anyway."""
    if recipe.tokenizer.path and os.path.isdir(recipe.tokenizer.path):
        return load_ready(recipe)
    ids = {f"<{n}>": n for n in range(recipe.tokenizer.vocab_size or 0)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<0>")),
        bos_token="<1>",
        eos_token="<2>",
        pad_token="<3>",
    )


# `train.per_device_train_batch_size: auto` becomes a number: tried on the device before the first step, where memory
# refuses what it does not have, else as planned.
#
# The training does not depend on it but for the last bits: so a run that has begun keeps its own on the same device
# while it fits. It stands in the manifest's `shape`.

RESERVE = 0.05  # of the memory, left free while trying: for evaluations, the update's products, the collectives
# Bytes of address space for the threads that the training starts: glibc maps 64 MiB for the memory of each.
THREADS = 512 << 20


def resolve_micro_batch(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> Recipe:
    """Return the recipe with a number for `auto`, the same on all ranks, before anything of the training is made from
    it. Every rank calls it, and the trainer has it from then on.

    Raises OutOfMemoryError when not even one row fits.
    """
    args = trainer.args
    possible = options(recipe, args.world_size)
    # Ranks may see other devices and other free memory: the first one's word counts.
    kept, rows = on_rank_0(lambda: (_kept(run, possible), micro_batch(recipe)))
    why = f"the largest divisor of {possible[0]} that fits"
    # Of a sharded model nothing is tried: a rank that runs out of memory would leave the others in a collective.
    refuses = not trainer.is_sharded and any(from_every_rank(_memory_refuses(args.device)))
    if refuses and run.step < args.max_steps:
        tried = (kept and _tried(trainer, [kept], run.step)) or _tried(trainer, possible, run.step)
        if tried is None:
            raise OutOfMemoryError(
                f"{recipe.where(KEY)}: auto finds no micro-batch: not even one row of {recipe.data.row_tokens} tokens "
                f"fits into the memory of {device_info().name}. Set train.gradient_checkpointing: true, shorten "
                "data.row_tokens, or take a smaller model."
            )
        rows, why = tried, f"{why}, as was just tried"
    elif kept is not None and kept <= rows:
        rows = kept
    if not refuses:
        why += " by arithmetic"
    if args.device.type == "cpu" and not refuses:
        why += (
            f" into {100 * CPU_SHARE:.0f} % of the memory that is free, at most {CPU_POSITIONS:,} positions on a CPU"
        )
    recipe = with_values(recipe, {"micro_batch": rows})
    trainer.set_micro_batch(recipe, rows=rows, micro_steps=micro_steps(recipe, batch_ranks(args.world_size)))
    if trainer.is_world_process_zero():
        print(f"{KEY}: auto is {rows}: {'as this run began' if rows == kept else why}", flush=True)
    return recipe


def _kept(run: OpenRun, possible: list[int]) -> int | None:
    """Return what the run's last start had, if that was on this device and still divides the rows."""
    shape = run.directory.read_manifest().get("shape") or {}
    same = shape.get("device") == device_info().name and shape.get("micro_batch") in possible
    return shape["micro_batch"] if same else None


def _memory_refuses(device: torch.device) -> bool:
    """Return whether too large an allocation is an error: a CPU swaps or is killed, but under a limit of the address
    space."""
    return device.type == "cuda" or _address_space() >= 0


def _address_space() -> int:
    """Return the bytes of address space that the process may have; -1 where they are not limited, as on Windows."""
    try:
        import resource
    except ImportError:
        return -1
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _tried(trainer: TandemTrainer, possible: list[int], step: int) -> int | None:
    """Return the first of these micro-batches that fits on every rank."""
    args, model = trainer.args, trainer.model
    model.train()
    if args.activation_checkpointing:  # as Trainer does it when the training begins
        kwargs: Any = args.activation_checkpointing_kwargs  # text only as a command line gives it
        given = dict(kwargs or {})
        layers, offload = given.pop("every_n_layers", 1), given.pop("offload", False)
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=given or None, every_n_layers=layers, offload=offload
        )
    # DDP will hold the gradients a second time.
    reserve = sum(p.nbytes for p in model.parameters() if p.requires_grad) if args.world_size > 1 else 0
    on_cuda = args.device.type == "cuda"
    limit = torch.cuda.mem_get_info(args.device)[1] if on_cuda else _address_space()
    reserve += max(int(RESERVE * max(limit, 0)), 0 if on_cuda else THREADS)  # a limit of -1 is none
    found = next((n for n in possible if all(from_every_rank(fits(trainer, n, step=step, reserve=reserve)))), None)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(args.device)  # the training's own peak is what memory_hint tells
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
