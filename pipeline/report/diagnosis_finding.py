"""Rules of the diagnosis and their findings."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.recipe.schema import Schedule
from pipeline.report.run_data import RunData
from pipeline.run_dir.columns import Columns

# Statistics that a few wild values do not move.

SD_OF_MAD = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
SE_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean, of normal values


def median(values: np.ndarray) -> float:
    return float(np.median(values))


def noise(values: np.ndarray) -> float:
    """Return the robust standard deviation of the values around their own trend: from the differences of
    neighbours."""
    differences = np.diff(values)
    return SD_OF_MAD * median(np.abs(differences - np.median(differences))) / np.sqrt(2) if differences.size else 0.0


def windows(values: np.ndarray, count: int) -> np.ndarray:
    """Return the medians of `count` windows of (nearly) equal length, in order."""
    return np.array([np.median(part) for part in np.array_split(values, count)])


def error_of_difference(values: np.ndarray, length: int) -> float:
    """Return the standard error of the difference of the medians of two windows of that length."""
    return SE_OF_MEDIAN * noise(values) * float(np.sqrt(2 / length))


# A run's numbers in the form that rules read: finite values, each series read once.

OF_A_STEP = ("train/loss", "train/loss_ema", "optim/lr", "optim/lrm", "optim/grad_norm", "perf/step_s", "data/samples")


@dataclass(frozen=True)
class Series:
    """Values by step, in the order of the steps."""

    steps: np.ndarray
    values: np.ndarray

    def intervals(self) -> np.ndarray:
        """Return of how many steps each value is. The first steps of a log may be missing: its first interval is no
        longer than others."""
        since = np.diff(self.steps)
        return np.append(np.minimum(self.steps[:1], np.median(since) if since.size else np.inf), since)

    def __len__(self) -> int:
        return self.values.size

    def where(self, kept: np.ndarray) -> "Series":
        return Series(self.steps[kept], self.values[kept])


class Figures:
    """A run as rules read it: series, recipe and manifest by dotted path. Imported runs may lack any of it."""

    def __init__(self, data: RunData):
        self.data, self.recipe, self.manifest = data, data.setting, data.fact
        self._series: dict[str, Series] = {}

    def series(self, name: str) -> Series:
        """Return the finite values of a metric."""
        if name not in self._series:
            steps, values = self.data.curve(name)
            finite = np.isfinite(values)
            self._series[name] = Series(steps[finite], values[finite].astype(np.float64))
        return self._series[name]

    def wild(self, name: str) -> list[int]:
        """Return steps at which the metric is NaN or infinite."""
        steps, values = self.data.curve(name)
        return [int(step) for step in steps[~np.isfinite(values)]]

    def loss(self) -> Series:
        """Return the training loss that the run has; an export may hold only a smoothed one."""
        return self.series(self.data.loss_name())

    def usual_norm(self) -> Series:
        """Return each interval's median gradient norm; of earlier versions and other programs the one norm that they
        have."""
        usual = self.series("optim/grad_norm_median")
        return usual if len(usual) else self.series("optim/grad_norm")

    def clipped(self) -> Series:
        """Return the share of each interval's steps that were clipped; none where neither that nor the limit is
        known."""
        share, limit = self.series("optim/clip_frac"), self.recipe("train.max_grad_norm")
        if len(share) or not limit:
            return share
        norm = self.series("optim/grad_norm")
        return Series(norm.steps, norm.values > limit)

    def by_step(self, series: Series) -> np.ndarray:
        """Return which of the logged values stand for steps that were all looked at, as they are since norms have a
        median."""
        return np.isin(series.steps, self.series("optim/grad_norm_median").steps)

    def rate(self) -> Series:
        """Return the learning rate, else its multiplier."""
        return self.series("optim/lr") if len(self.series("optim/lr")) else self.series("optim/lrm")

    def step(self) -> int:
        """Return optimizer steps that count; an export may hold everything but the loss."""
        return int(max((self.series(name).steps[-1] for name in OF_A_STEP if len(self.series(name))), default=0))

    def whole_steps(self) -> int:
        """Return the steps of the run: those made, or while it trains those that are planned."""
        planned = self.data.max_steps() if self.data.is_training else None
        return max(self.step(), planned or 0)

    def is_warming_up(self) -> bool:
        """Return whether the run trains and its rates have yet to reach their peak."""
        return self.data.is_training and self.step() <= (self.warmup_steps() or 0)

    def passes(self) -> Series:
        """Return whole passes over the data before each step."""
        epoch = self.series("data/epoch")
        # Ours and nanochat's counts from one; the Trainer's is the fraction that was read.
        is_fraction = self.manifest("imported.program") == "Trainer"
        return Series(epoch.steps, epoch.values if is_fraction else epoch.values - 1)

    def timed(self, name: str) -> Series:
        """Return the same without the first logged value of each start, which holds compilation and cold caches."""
        series, starts = self.series(name), self.series("perf/first_step_s").steps
        kept = ~np.isin(series.steps, starts)
        kept[:1] = False
        return series.where(kept)

    def last(self, name: str) -> float | None:
        values = self.series(name).values
        return float(values[-1]) if values.size else None

    def seconds(self) -> float | None:
        """Return seconds in steps over all attempts that count; None when nobody measured them."""
        total = self.last("perf/total_s")
        if total is None and len(self.timed("perf/step_s")):
            total = float(np.median(self.timed("perf/step_s").values)) * self.step()
        return total

    def is_watched(self) -> bool:
        """Return whether our own alarm looked at every value as it came: then its events tell the spikes."""
        return not self.manifest("imported") and bool(self.data.events("attempt"))

    def restarts(self) -> tuple[int, int]:
        """Return (restarts, optimizer steps that were made again after them)."""
        written = Columns.of(self.data.all_rows)
        rows, _ = written.column(self.data.loss_name())
        steps, attempts = written.beside("step", rows, missing=0), written.column("attempt")[1]
        lost, began = 0, 0
        for row, attempt in written.events("attempt"):
            before = steps[(rows >= began) & (rows < row)]
            lost, began = lost + max(int(before.max(initial=0)) - attempt["step"], 0), row
        return max(int(attempts.max(initial=1)) - 1, 0), lost

    def starts_trained(self) -> bool:
        """Return whether the weights were trained before the first step."""
        return bool(self.recipe("model.start_from") or self.recipe("run.fork_from"))

    def schedule(self) -> Schedule | None:
        """Return the recipe's schedule of groups, None when it does not say.

        recipe.yaml is written before a horizon in epochs is known in steps, which shortens the default warm-up
        (run/inputs.py).
        """
        settings, steps = self.recipe("optimizer.schedule"), self.data.max_steps()
        if not settings or self.recipe("optimizer.type", "trainer") == "trainer":
            return None
        schedule = Schedule(**{key: value for key, value in settings.items() if key in Schedule.__annotations__})
        in_epochs = self.recipe("train.num_train_epochs") and not self.recipe("train.max_steps")
        if in_epochs and steps and schedule.warmup_steps == Schedule().warmup_steps:
            schedule.warmup_steps = min(schedule.warmup_steps, steps // 5)
        return schedule

    def warmup_steps(self) -> int | None:
        """Return steps of warm-up by the recipe, None when it does not say."""
        if self.recipe("optimizer.type", "trainer") != "trainer":
            schedule = self.schedule()
            return schedule.warmup_steps if schedule and "warmup_steps" in self.recipe("optimizer.schedule") else None
        warmup = self.recipe("train.warmup_steps")
        if warmup is None or warmup >= 1:
            return None if warmup is None else int(warmup)
        steps = self.data.max_steps()
        return None if steps is None else math.ceil(warmup * steps)


LONG_ENOUGH_S = 600.0  # shorter runs: start-up, saves and evaluations are a large share of any, and cost little
Level = Literal["healthy", "note", "trouble", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """A rule's judgement.

    level: trouble asks for an investigation, a note is worth knowing, unknown: the numbers that the rule needs are not
    there. evidence: numbers and steps, "" when unknown.
    """

    level: Level
    title: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """Result of one rule for one run."""

    rule: str
    threshold: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sign of health or trouble. judge gives None when the numbers it needs are not there or are too few.

    name: the healthy state. threshold, reason: as docs/diagnosis.md prints them.
    """

    name: str
    judge: Callable[[Figures], Verdict | None]
    needs: str
    threshold: str
    reason: str
    advice: str

    def finding(self, figures: Figures) -> Finding:
        verdict = self.judge(figures) or Verdict("unknown", self.needs, "")
        return Finding(**vars(verdict), rule=self.name, threshold=self.threshold, advice=self.advice)


def rule(
    name: str, *, needs: str, threshold: str, reason: str, advice: str
) -> Callable[[Callable[[Figures], Verdict | None]], Rule]:
    """Make the function below it the judge of a rule of that name."""
    return lambda judge: Rule(name=name, judge=judge, needs=needs, threshold=threshold, reason=reason, advice=advice)


def graded(value: float, *, note: float, trouble: float, titles: tuple[str, str], evidence: str) -> Verdict:
    """Return a verdict on a number that is better when it is small. titles: when it is below both limits, and else."""
    level: Level = "trouble" if value >= trouble else "note" if value >= note else "healthy"
    return Verdict(level, titles[level != "healthy"], evidence)
