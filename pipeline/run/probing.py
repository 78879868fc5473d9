"""`python -m pipeline.run.probing SECONDS RECIPE [section.key=value ...]`: the steps that a probe measures
(plan/probe.py).

The Trainer of the stages makes them on random rows, without callbacks, evaluations and checkpoints. The result is
printed as one line of JSON, and nothing of it is kept.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from pipeline.hardware.device import device_info
from pipeline.hardware.processor import peak_bytes
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.plan.plan import make_plan
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import with_values
from pipeline.run.attention import choose_attention
from pipeline.run.checks import attention_needs
from pipeline.run.start_process import resolve_open_values, start_process
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.load import load_ready
from pipeline.training.build import build_from_recipe, build_trainer, resolve_rows
from pipeline.training.distributed import on_rank_0

LEFT_OUT = 2  # steps: the first one compiles, and takes the optimizer's state; the second one may compile again
MOST_STEPS = 200
DOCUMENTS_A_ROW = 4  # where documents are kept apart


class RandomRows:
    """Rows of random ids in the form of data/rows.py; every position is a target."""

    def __init__(self, *, row_tokens: int, rows_per_step: int, isolated: bool, vocab_size: int):
        self.row_tokens, self.rows_per_step = row_tokens, rows_per_step
        self.isolated, self.vocab_size = isolated, vocab_size
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


class StepTimer(TrainerCallback):
    """Times the steps, and ends the process when enough seconds of them were measured.

    device_peak: returns the most bytes that the device has given.
    """

    def __init__(self, seconds: float, device_peak: Callable[[], int]):
        self.seconds, self.device_peak, self.ends = seconds, device_peak, list[float]()

    def on_train_begin(self, args, state, control, **rest):
        self.ends = [time.perf_counter()]

    def on_step_end(self, args, state, control, **rest):
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.ends.append(time.perf_counter())
        # The wall between the ends of two steps: what callbacks and the loader take is in it.
        taken = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        measured = taken[LEFT_OUT:]
        if not on_rank_0(lambda: bool(measured) and (sum(measured) >= self.seconds or len(taken) >= MOST_STEPS)):
            return
        if state.is_world_process_zero:
            result = {
                "step_s": median(measured),  # other programs that come and go make some of the few steps slow
                "steps": len(measured),
                "first_step_s": taken[0],
                "peak_bytes": peak_bytes(),
            }
            if args.device.type == "cuda":
                result["peak_bytes"] = self.device_peak()
            print(json.dumps(result), flush=True)
        os._exit(0)  # on every rank: nothing of the training is kept


def main(argv: list[str]) -> None:
    recipe = read_recipe(argv[1:], earlier=EarlierRuns())
    processes = start_process(recipe)
    recipe = resolve_open_values(recipe, processes)
    # No evaluation, no save, and more steps than are measured: StepTimer ends the process.
    few = {"train.eval_strategy": "no", "train.save_strategy": "no", "train.max_steps": 10 * MOST_STEPS}
    plan = make_plan(with_values(recipe, few), device_info(), processes=processes)
    needs = attention_needs(plan.recipe)
    attention = on_rank_0(lambda: choose_attention(needs, plan.device, plan.sizes))[0]
    recipe = with_values(plan.recipe, {"model.chosen_attention": attention})
    if recipe.tokenizer.path and os.path.isdir(recipe.tokenizer.path):
        tokenizer = load_ready(recipe.tokenizer_settings())
    else:
        tokenizer = tokenizer_of_size(recipe.tokenizer.vocab_size or 0)
    model: Any = build_from_recipe(recipe, tokenizer)
    if not isinstance(model, TandemForCausalLM):
        recipe = resolve_rows(recipe, model)
    rows = RandomRows(
        row_tokens=recipe.data.row_tokens,
        rows_per_step=recipe.rows_per_step,
        isolated=recipe.isolates_documents,
        vocab_size=len(tokenizer),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        trainer = build_trainer(recipe, run, model=model, tokenizer=tokenizer, rows=rows, validation=None)
        trainer.add_callback(StepTimer(float(argv[0]), trainer.log_row.memory.peak))
        trainer.resume(None)


def tokenizer_of_size(num_ids: int) -> Any:
    """Return a tokenizer that only has so many ids: rows are random."""
    ids = {f"<{n}>": n for n in range(num_ids)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<0>")),
        bos_token="<1>",
        eos_token="<2>",
        pad_token="<3>",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
