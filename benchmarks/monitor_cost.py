"""What sampling the GPUs and the host beside a training costs its steps, and how often the GPUs are really sampled.

    python benchmarks/monitor_cost.py [--hz 10] [--size 50ms] [--blocks 40] [--block-steps 20] [--recipe recipes/quickstart_pretrain.yaml]

Runs the recipe in this process. Blocks of steps in which the sampler runs and its numbers join the logged rows come in turns
with blocks in which it stands still (SIGSTOP) and is not read; ratio is of neighbours. On a busy machine their spread is wider
than what is looked for; sturdier are sampler_cpu, its CPU seconds a second, and reading_share, the time of joining its numbers
to the rows as a share of the steps' time. reached_hz: samples of a GPU a second while it ran, from gpu-<host>.csv.
Without NVIDIA's driver the stand-in of the tests answers, two GPUs at no time at all: then sampler_cpu is Python's and the
file's share only. On a machine with GPUs, for the true rate: python benchmarks/monitor_cost.py --hz 100
"""

import ctypes
import itertools
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, TRAIN_ONLY, arguments, compared, show, wait_for_device
from trainer_tax import size_overrides

from pipeline import pretrain
from pipeline.callbacks.machine import Machine
from pipeline.monitor.client import why_no_driver
from pipeline.monitor.sampler import read_gpus
from pipeline.training.trainer import TandemTrainer
from tests.monitor.stand_in import compiled

# After the first block, which is not counted, in pairs.
WATCHED = itertools.chain([True], itertools.cycle([True, False, False, True]))


class Turns:
    """Blocks of steps with and without the monitor, inside one run."""

    def __init__(self, steps: int):
        self.steps, self.made, self.started = steps, 0, 0.0
        self.watched = True
        self.sampler: psutil.Process | None = None
        self.blocks: list[tuple[bool, float]] = []
        self.cpu_s = self.cpu_at = self.reading_s = 0.0

    def watch(self) -> None:
        begin, end, numbers = Machine.on_train_begin, Machine.on_train_end, Machine.numbers
        batches = TandemTrainer.get_batch_samples

        def train_begins(machine: Machine, *given: Any, **named: Any) -> None:
            begin(machine, *given, **named)
            assert machine.gpus is not None
            assert machine.gpus.process is not None, "there is nothing to sample"
            self.sampler = psutil.Process(machine.gpus.process.pid)

        def train_ends(machine: Machine, *given: Any, **named: Any) -> None:
            self.let_go()
            end(machine, *given, **named)

        def read(machine: Machine) -> dict[str, float]:
            if not self.watched:
                return {}
            started = time.perf_counter()
            row = numbers(machine)
            self.reading_s += time.perf_counter() - started
            return row

        def step(trainer: TandemTrainer, *given: Any) -> Any:
            if self.made % self.steps == 0:
                self._turn()
            self.made += 1
            return batches(trainer, *given)

        Machine.on_train_begin, Machine.on_train_end, Machine.numbers = train_begins, train_ends, read  # type: ignore[method-assign]
        TandemTrainer.get_batch_samples = step  # type: ignore[method-assign]

    def _turn(self) -> None:
        """A block is over, and the next one begins."""
        assert self.sampler is not None
        wait_for_device()
        if self.made > self.steps:  # the first block compiles and fills caches
            self.blocks.append((self.watched, time.perf_counter() - self.started))
            self.cpu_s += self._cpu_s() - self.cpu_at
        else:
            self.reading_s = 0.0
        self.watched = next(WATCHED)
        self.sampler.send_signal(signal.SIGCONT if self.watched else signal.SIGSTOP)
        self.cpu_at, self.started = self._cpu_s(), time.perf_counter()

    def let_go(self) -> None:
        """A sampler that stands still would not see that the run is over."""
        if self.sampler is not None and self.sampler.is_running():
            self.sampler.send_signal(signal.SIGCONT)

    def _cpu_s(self) -> float:
        assert self.sampler is not None
        times = self.sampler.cpu_times()
        return times.user + times.system

    def found(self) -> dict[str, float]:
        pairs = [dict(self.blocks[n : n + 2]) for n in range(0, len(self.blocks) - 1, 2)]
        times = [(pair[True] / self.steps, pair[False] / self.steps) for pair in pairs]
        watched_s = sum(seconds for watched, seconds in self.blocks if watched)
        cost = {"sampler_cpu": self.cpu_s / watched_s, "reading_share": self.reading_s / watched_s}
        return compared(times) | cost


def main() -> None:
    options = arguments(
        __doc__,
        hz=10.0,
        size="50ms",
        blocks=40,
        block_steps=20,
        recipe=str(ROOT / "recipes" / "quickstart_pretrain.yaml"),
    )
    turns = Turns(options.block_steps)
    turns.watch()
    with tempfile.TemporaryDirectory() as folder:
        driver = "NVIDIA's"
        if why_no_driver():
            library = compiled(Path(folder))
            assert library is not None, "neither a driver nor a C compiler for the stand-in"
            ctypes.CDLL(str(library))
            driver, os.environ["LD_PRELOAD"] = "stand-in", str(library)
        overrides = [
            "run.name=monitored",
            f"run.directory={folder}",
            f"train.max_steps={(options.blocks + 1) * turns.steps + 1}",
            f"monitor.gpu_hz={options.hz}",
            "train.torch_compile=false",
            *TRAIN_ONLY,
            *size_overrides(options.size),
        ]
        try:
            pretrain.main([options.recipe, *overrides])
        finally:
            turns.let_go()
        gpus = [gpu for path in Path(folder, "monitored").glob("gpu-*.csv") for gpu in read_gpus(path)]
        # The median distance: while the sampler stands still there are none.
        distances = [b - a for gpu in gpus for a, b in itertools.pairwise(gpu.times)]
        facts = {"driver": driver, "gpus": len(gpus), "reached_hz": 1 / statistics.median(distances)}
    show(options, [{**facts, **turns.found()}])


if __name__ == "__main__":
    main()
