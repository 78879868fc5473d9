"""What a training step is made of: operators, host time between steps, waits for the device and copies.

    python benchmarks/profile_step.py [--recipe recipes/quickstart_pretrain.yaml] [--steps 10] [--warm-up 5] [--top 15] [section.key=value ...]

Runs the pretraining entry in this process, with its callbacks and guards, and torch.profiler over so many steps after the
first ones. Everything is given per step. wall: with the profiler's own cost, so no figure of speed. between steps: from the
end of the update to the first forward pass of the next step, when the device has nothing new to do. device busy: all
kernels' time. The second block counts what makes the host wait or copies memory; then the operators by their own time, on
the device where there is one. --trace FILE writes the timeline for chrome://tracing or ui.perfetto.dev.
"""

import argparse
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import DEVICE, ROOT, TRAIN_ONLY, show, wait_for_device
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from pipeline import pretrain
from pipeline.run_dir.rows import read_rows
from pipeline.training.trainer import TandemTrainer

WAITS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::copy_",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaLaunchKernel",
)

# What kernels do, by their names; the first that fits.
KINDS = {
    "attention": r"flash|fmha|attention|flex|triton_tem",
    "products": r"gemm|cutlass|nvjet|cublas|xmma|matmul",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies": r"memcpy|memset",
    "fused": r"triton",
}


class Steps:
    """The profiler over some steps of a run, and when each of them began and was over."""

    def __init__(self, *, warm_up: int, steps: int):
        self.warm_up, self.steps, self.made = warm_up, steps, 0
        on_device = [ProfilerActivity.CUDA] if DEVICE == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *on_device])
        self.started = self.wall_s = self.updated = 0.0
        self.plain_step_s = self.loss = 0.0  # before the profiler; of the last step
        self.between: list[float] = []

    @property
    def profiling(self) -> bool:
        return self.warm_up < self.made <= self.warm_up + self.steps

    def watch(self) -> None:
        batches, forward = TandemTrainer.get_batch_samples, TandemTrainer.training_step

        def begin(trainer: TandemTrainer, *given: Any) -> Any:
            self._begin()
            return batches(trainer, *given)

        def micro_step(trainer: TandemTrainer, *given: Any, **named: Any) -> Any:
            if self.updated and self.profiling:
                self.between.append(time.perf_counter() - self.updated)
            self.updated = 0.0
            return forward(trainer, *given, **named)

        def updated(*_: Any) -> None:
            self.updated = time.perf_counter()

        TandemTrainer.get_batch_samples = begin  # type: ignore[method-assign]
        TandemTrainer.training_step = micro_step  # type: ignore[method-assign]
        register_optimizer_step_post_hook(updated)

    def _begin(self) -> None:
        """A step begins; the one before is over."""
        if self.made in (self.warm_up, self.warm_up + self.steps):
            wait_for_device()
        if self.made == self.warm_up:
            self.profiler.start()
            self.started = time.perf_counter()
        elif self.made == self.warm_up + self.steps:
            self.wall_s = time.perf_counter() - self.started
            self.profiler.stop()
        self.made += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "quickstart_pretrain.yaml"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_intermixed_args()
    given = {"warm_up": options.warm_up, "steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        steps = profile_run(options.recipe, options.overrides, folder=Path(folder), **given)
    if options.trace:
        steps.profiler.export_chrome_trace(str(options.trace))
    show(options, table(steps, top=options.top))


def profile_run(recipe: str, overrides: list[str], *, warm_up: int, steps: int, folder: Path) -> Steps:
    """Return the profile of a run's steps after the first ones."""
    found = Steps(warm_up=warm_up, steps=steps)
    found.watch()
    fixed = [
        "run.name=profile",
        f"run.directory={folder}",
        f"train.max_steps={warm_up + steps + 1}",
        "optimizer.schedule.warmup_steps=1",  # of so few steps
        "train.logging_steps=1",
        *TRAIN_ONLY,
    ]
    given = {override.partition("=")[0] for override in overrides}
    pretrain.main([recipe, *(key for key in fixed if key.partition("=")[0] not in given), *overrides])
    rows = [row for row in read_rows(folder / "profile" / "metrics.jsonl") if "train/loss" in row]
    found.loss = rows[-1]["train/loss"]
    plain = [row["perf/step_s"] for row in rows if warm_up / 2 < row["step"] < warm_up and "perf/step_s" in row]
    found.plain_step_s = median(plain)
    return found


def kinds(steps: Steps) -> dict[str, float]:
    """Return the milliseconds of a step's kernels by what they do; empty without a device."""
    spent: dict[str, float] = {}
    for event in steps.profiler.key_averages():
        own_us = event.self_device_time_total
        if own_us and event.device_type != DeviceType.CPU:
            kind = next(
                (name for name, pattern in KINDS.items() if re.search(pattern, event.key, re.IGNORECASE)), "other"
            )
            spent[f"{kind}_ms"] = spent.get(f"{kind}_ms", 0.0) + own_us / 1e3 / steps.steps
    return spent


def table(steps: Steps, *, top: int) -> list[dict]:
    operators = {event.key: event for event in steps.profiler.key_averages()}
    device_us = sum(event.self_device_time_total for event in operators.values())
    between_ms = 1e3 * median(steps.between) if steps.between else 0.0
    rows = [
        {"per step": "wall", "host_ms": 1e3 * steps.wall_s / steps.steps},
        {"per step": "between steps (median)", "host_ms": between_ms},
        {"per step": "device busy", "device_ms": device_us / 1e3 / steps.steps},
    ]

    def row(event: Any) -> dict:
        own = {"host_ms": event.self_cpu_time_total / 1e3 / steps.steps}
        if DEVICE == "cuda":
            own["device_ms"] = event.self_device_time_total / 1e3 / steps.steps
        return {"per step": event.key[:60], "calls": event.count / steps.steps, **own}

    rows += [row(operators[name]) if name in operators else {"per step": name, "calls": 0.0} for name in WAITS]
    time_of = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    others = [event for name, event in operators.items() if name not in WAITS]
    rows += [row(event) for event in sorted(others, key=lambda event: -getattr(event, time_of))[:top]]
    return rows if DEVICE == "cuda" else [row for row in rows if row["per step"] != "device busy"]


if __name__ == "__main__":
    main()
