"""What watching over a step costs it: everything that is there for safety, timed inside a real run.

    python benchmarks/guards.py [RECIPE] [--steps 60]

Runs the recipe (default: the quickstart) in this process, with a clock around each guard that acts in a step: the check
for numbers that are not finite, signals, the look at the writer of checkpoints, heartbeats, the ranks' own times. Prints
each one's median a step and the sum's share of the step, and as the last line the same as JSON. On a GPU the first guard
also waits for the device, which has its work still to do: there the sum is no cost.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline import pretrain
from pipeline.callbacks.stop_signals import StopSignals
from pipeline.callbacks.stragglers import Stragglers
from pipeline.hardware.device import device_info
from pipeline.monitor import heartbeat
from pipeline.training.guard import StepGuard
from pipeline.training.own_time import OwnTime
from pipeline.training.saver import CheckpointSaver
from pipeline.training.trainer import TandemTrainer

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart_pretrain.yaml"
GUARDS = {
    "finite numbers": [(StepGuard, "begin"), (StepGuard, "judge")],
    "signals": [(StopSignals, "on_step_end")],
    "writer": [(CheckpointSaver, "check")],
    "own time": [(OwnTime, "begin"), (OwnTime, "before_backward")],
    "stragglers": [(Stragglers, "on_log")],
}


class Clock:
    """Seconds of each guard in the step that is being made, and of each step that was."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        self.began = 0.0

    def around(self, owner: type, method: str, guard: str) -> None:
        plain = getattr(owner, method)

        def timed(*args, **settings):
            started = time.perf_counter()
            try:
                return plain(*args, **settings)
            finally:
                self.now[guard] += time.perf_counter() - started

        setattr(owner, method, timed)

    def of_steps(self) -> None:
        """A step begins where its rows are fetched; what lies between two such places is one step."""
        plain = TandemTrainer.get_batch_samples

        def timed(*args, **settings):
            now = time.perf_counter()
            if self.began:
                self.steps.append({**self.now, "step": now - self.began})
            self.now.clear()
            self.began = now
            return plain(*args, **settings)

        TandemTrainer.get_batch_samples = timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(RECIPE))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    clock = Clock()
    for guard, methods in GUARDS.items():
        for owner, method in methods:
            clock.around(owner, method, guard)
    clock.of_steps()
    started = time.perf_counter()
    for _ in range(100_000):
        heartbeat.beat()
    beat_s = (time.perf_counter() - started) / 100_000
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["run.name=guards", f"run.directory={folder}", f"train.max_steps={options.steps}"]
        overrides += ["train.eval_strategy=no", "evals.bpb.at_start=false", "optimizer.schedule.warmup_steps=5"]
        pretrain.main([options.recipe, *overrides])
    steps = clock.steps[5:]  # the first ones fill caches
    medians = {guard: statistics.median(step.get(guard, 0.0) for step in steps) for guard in GUARDS}
    medians["a heartbeat"] = beat_s
    guards_s, step_s = sum(medians.values()), statistics.median(step["step"] for step in steps)
    print(f"{device_info().name}, {len(steps)} steps of {1e3 * step_s:.1f} ms")
    for guard, seconds in medians.items():
        print(f"{guard:<16} {1e6 * seconds:>9.1f} us a step")
    print(f"all guards       {1e6 * guards_s:>9.1f} us a step: {100 * guards_s / 0.1:.3f} % of a step of 100 ms")
    found = {"guards_s": guards_s, "step_s": step_s, **medians}
    print(json.dumps({"device": device_info().name, "recipe": Path(options.recipe).name, **found}))


if __name__ == "__main__":
    main()
