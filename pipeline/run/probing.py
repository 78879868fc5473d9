"""`python -m pipeline.run.probing SECONDS RECIPE [section.key=value ...]`: the steps that a probe measures (preflight/plan.py).

The Trainer of the stages on random rows, without callbacks, evaluations and checkpoints. Prints the result as one line of
JSON and ends at once: nothing of it is kept.
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

from pipeline.data.rows import on_device
from pipeline.evals.bpb import per_token_nll
from pipeline.hardware import device_info, peak_bytes
from pipeline.preflight.checks import choose_attention
from pipeline.preflight.plan import make_plan
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.resolve import isolates_documents, rows_per_step

# What a stage imports and a probe does not need counts in its memory.
from pipeline.recipe.schema import with_values
from pipeline.run.open_run import resolve_open_values, start_process
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.load import load_ready
from pipeline.training.build import build_from_recipe, build_trainer
from pipeline.training.distributed import on_rank_0

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
    """Times the steps, and ends the process when enough were measured. evaluate: done once then, for the memory it takes; peak:
    bytes that the device gave at most."""

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


if __name__ == "__main__":
    main(sys.argv[1:])
