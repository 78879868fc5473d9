"""What the Trainer adds to a step, against a bare PyTorch loop over the same model, rows, optimizer and schedule.

    python benchmarks/trainer_tax.py [--size 5ms] [--blocks 12] [--block-steps 20] [--recipe recipes/quickstart_pretrain.yaml]

Runs the recipe in this process; between blocks of steps of the Trainer, with all its callbacks, guards, logging and
telemetry, come blocks of bare steps, which move the same training on: rows to the device, forward under autocast, backward,
clip, optimizer, schedule, zero_grad, the loss read every `logging_steps`. added_ms is the median over pairs of neighbours.
--size: 5ms, 50ms and 300ms are models and batches that take about so long on two CPU cores; `recipe` leaves the recipe's.
"""

import contextlib
import math
import statistics
import tempfile
import time
from typing import Any

import torch
from common import DEVICE, ROOT, TRAIN_ONLY, arguments, compared, show, wait_for_device

from pipeline import pretrain
from pipeline.training.trainer import TandemTrainer

SIZES = {
    "5ms": (1, 64, 64, 128),  # layers, width, row_tokens, batch_tokens
    "50ms": (2, 128, 128, 1024),
    "300ms": (4, 256, 256, 2048),
    "recipe": None,
}


class Blocks:
    """Blocks of the Trainer's steps and of bare ones in turns, inside one run."""

    def __init__(self, steps: int):
        self.steps = steps
        self.made, self.started, self.times = 0, 0.0, list[tuple[float, float]]()

    def around(self, plain: Any) -> Any:
        """get_batch_samples, which begins each of the Trainer's steps."""

        def begin(trainer: TandemTrainer, *given: Any) -> Any:
            if self.made % self.steps == 0:
                wait_for_device()
                trained = time.perf_counter() - self.started
                if self.made > self.steps:  # the first block compiles and fills caches
                    self.times.append((trained / self.steps, self.bare(trainer) / self.steps))
                wait_for_device()
                self.started = time.perf_counter()
            self.made += 1
            return plain(trainer, *given)

        return begin

    def bare(self, trainer: TandemTrainer) -> float:
        args, rows, step = trainer.args, trainer.rows, trainer.state.global_step
        model = trainer.model_wrapped
        forward = model if args.torch_compile else getattr(model, "_original_forward", model.forward)
        autocast = torch.autocast(DEVICE, torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        optimizer, schedule = trainer.optimizer.optimizer, trainer.lr_scheduler
        kept = schedule.state_dict()
        parameters = list(trainer.model.parameters())
        started = time.perf_counter()
        for number in range(self.steps):
            total = torch.zeros((), device=args.device)
            targets = torch.full((), float(rows.num_targets(step)), device=args.device)
            for micro_step in range(args.gradient_accumulation_steps):
                size = args.per_device_train_batch_size
                batch = rows.micro_batch(step, micro_step, rank=0, world_size=1, rows=size)
                batch = {name: tensor.to(args.device, non_blocking=True) for name, tensor in batch.items()}
                with autocast:
                    loss = forward(**batch, num_items_in_batch=targets).loss
                loss.backward()
                total += loss.detach()
            if args.max_grad_norm < math.inf:
                torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if number % args.logging_steps == 0:
                total.item()
        wait_for_device()
        elapsed = time.perf_counter() - started
        schedule.load_state_dict(kept)
        return elapsed


def size_overrides(size: str) -> list[str]:
    """The recipe's keys that make a step of about that length; none for the recipe's own."""
    if SIZES[size] is None:
        return []
    layers, width, row_tokens, batch_tokens = SIZES[size]
    return [
        f"model.n_layer={layers}",
        f"model.n_embd={width}",
        f"model.n_head={width // 64}",
        f"data.row_tokens={row_tokens}",
        f"data.batch_tokens={batch_tokens}",
        f"train.per_device_train_batch_size={batch_tokens // row_tokens}",
    ]


def main() -> None:
    options = arguments(
        __doc__, size="5ms", blocks=12, block_steps=20, recipe=str(ROOT / "recipes" / "quickstart_pretrain.yaml")
    )
    blocks = Blocks(options.block_steps)
    TandemTrainer.get_batch_samples = blocks.around(TandemTrainer.get_batch_samples)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "run.name=tax",
            f"run.directory={folder}",
            f"train.max_steps={(options.blocks + 2) * blocks.steps}",
            "train.torch_compile=false",
            *TRAIN_ONLY,
            *size_overrides(options.size),
        ]
        pretrain.main([options.recipe, *overrides])
    found = compared(blocks.times)
    added = statistics.median(own - other for own, other in blocks.times)
    show(options, [{"size": options.size, **found, "added_ms": 1e3 * added}])


if __name__ == "__main__":
    main()
