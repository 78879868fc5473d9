"""What watching over a step costs it: everything that is there for safety, timed inside a real run.

    python benchmarks/guards.py [--steps 60] [--recipe recipes/quickstart_pretrain.yaml]

Runs the recipe in this process, with a clock around each guard that acts in a step: the check for numbers that are not
finite, signals, the look at the writer of checkpoints, heartbeats, the ranks' own times. ratio: of a guard's time to the
step's, step by step. On a GPU the first guard also waits for the device, which has its work still to do: there the sum is no
cost.
"""

import tempfile
import time
from collections import defaultdict

from common import ROOT, arguments, compared, show

from pipeline import pretrain
from pipeline.callbacks.alarms import SlowRank
from pipeline.callbacks.stop_signals import StopSignals
from pipeline.monitor import heartbeat
from pipeline.training.checkpoint import CheckpointSaver
from pipeline.training.guard import StepGuard
from pipeline.training.meters import RankStepTimer
from pipeline.training.trainer import TandemTrainer

GUARDS = {
    "finite numbers": [(StepGuard, "begin"), (StepGuard, "judge")],
    "signals": [(StopSignals, "on_step_end")],
    "writer": [(CheckpointSaver, "check")],
    "own time": [(RankStepTimer, "begin"), (RankStepTimer, "before_backward")],
    "stragglers": [(SlowRank, "on_log")],
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


def a_heartbeat() -> float:
    """Seconds of one."""
    started = time.perf_counter()
    for _ in range(100_000):
        heartbeat.beat()
    return (time.perf_counter() - started) / 100_000


def main() -> None:
    options = arguments(__doc__, steps=60, recipe=str(ROOT / "recipes" / "quickstart_pretrain.yaml"))
    clock = Clock()
    for guard, methods in GUARDS.items():
        for owner, method in methods:
            clock.around(owner, method, guard)
    clock.of_steps()
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["run.name=guards", f"run.directory={folder}", f"train.max_steps={options.steps}"]
        overrides += ["train.eval_strategy=no", "evals.bpb.at_start=false", "optimizer.schedule.warmup_steps=5"]
        pretrain.main([options.recipe, *overrides])
    beat_s = a_heartbeat()
    steps = [{**step, "a heartbeat": beat_s} for step in clock.steps[5:]]  # the first ones fill caches
    names = [*GUARDS, "a heartbeat"]
    times = {name: [(step.get(name, 0.0), step["step"]) for step in steps] for name in names}
    times["all guards"] = [(sum(step.get(name, 0.0) for name in names), step["step"]) for step in steps]
    show(options, [{"ours": name, "other": "step", **compared(pairs)} for name, pairs in times.items()])


if __name__ == "__main__":
    main()
