"""A run's numbers as the rules of the diagnosis read them: finite values by step, each series read once."""

import math
from dataclasses import dataclass

import numpy as np

from pipeline.recipe.schema import Schedule
from pipeline.report.run_data import RunData

SD_OF_MAD = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
SE_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean, of normal values
# Series that have a value in each logged step: a log of another program may hold some of them only.
OF_A_STEP = ("train/loss", "train/loss_ema", "optim/lr", "optim/lrm", "optim/grad_norm", "perf/step_s", "data/samples")


def median(values: np.ndarray) -> float:
    return float(np.median(values))


def noise(values: np.ndarray) -> float:
    """Return the robust standard deviation of the values around their trend, from differences of neighbours."""
    differences = np.diff(values)
    if not differences.size:
        return 0.0
    # The trend is the median difference; a difference of two values has twice the variance of one.
    return SD_OF_MAD * median(np.abs(differences - np.median(differences))) / np.sqrt(2)


def windows(values: np.ndarray, count: int) -> np.ndarray:
    """Return the medians of `count` windows of (nearly) equal length, in order."""
    return np.array([np.median(part) for part in np.array_split(values, count)])


def error_of_difference(values: np.ndarray, length: int) -> float:
    """Return the standard error of the difference of the medians of two windows of that length."""
    return SE_OF_MEDIAN * noise(values) * float(np.sqrt(2 / length))


@dataclass(frozen=True)
class Series:
    """Values by step, in the order of the steps."""

    steps: np.ndarray
    values: np.ndarray

    def intervals(self) -> np.ndarray:
        """Return how many steps each value covers."""
        since = np.diff(self.steps)
        # A log may lack its first steps: the first interval is at most as long as the others usually are.
        usual = np.median(since) if since.size else np.inf
        return np.append(np.minimum(self.steps[:1], usual), since)

    def __len__(self) -> int:
        return self.values.size

    def where(self, kept: np.ndarray) -> "Series":
        return Series(self.steps[kept], self.values[kept])


class RunMetrics:
    """A run's series, recipe and manifest by dotted path. A log of another program may lack any of them."""

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

    def nonfinite_steps(self, name: str) -> list[int]:
        """Return steps at which the metric is NaN or infinite."""
        steps, values = self.data.curve(name)
        return steps[~np.isfinite(values)].tolist()

    def loss(self) -> Series:
        """Return the training loss that the run has; an export may hold only a smoothed one."""
        return self.series(self.data.loss_name())

    def clipped(self) -> Series:
        """Return the share of each interval's steps that were clipped; empty where it is not known."""
        share, limit = self.series("optim/clip_frac"), self.recipe("train.max_grad_norm")
        if len(share) or not limit:
            return share
        # Other programs log the norm alone, of one step of each interval.
        norm = self.series("optim/grad_norm")
        return Series(norm.steps, norm.values > limit)

    def rate(self) -> Series:
        """Return the learning rate, else its multiplier."""
        rate = self.series("optim/lr")
        return rate if len(rate) else self.series("optim/lrm")

    def step(self) -> int:
        """Return the number of optimizer steps that count."""
        steps = [0]
        for name in OF_A_STEP:
            steps += self.series(name).steps[-1:].tolist()
        return int(max(steps))

    def whole_steps(self) -> int:
        """Return the steps of the run: those made, or while it trains those that are planned."""
        if self.data.is_training:
            return max(self.step(), self.data.max_steps() or 0)
        return self.step()

    def is_warming_up(self) -> bool:
        """Return whether the run trains and its rates have yet to reach their peak."""
        return self.data.is_training and self.step() <= (self.warmup_steps() or 0)

    def passes(self) -> Series:
        """Return whole passes over the data before each step."""
        epoch = self.series("data/epoch")
        # Ours and nanochat's counts from one; the Trainer's is the fraction that was read.
        is_fraction = self.manifest("imported.program") == "Trainer"
        return epoch if is_fraction else Series(epoch.steps, epoch.values - 1)

    def timed(self, name: str) -> Series:
        """Return a series without the first logged value of each start, which holds compilation and cold caches."""
        series, starts = self.series(name), self.series("perf/first_step_s").steps
        kept = ~np.isin(series.steps, starts)
        kept[:1] = False
        return series.where(kept)

    def last(self, name: str) -> float | None:
        values = self.series(name).values
        return float(values[-1]) if values.size else None

    def starts_trained(self) -> bool:
        """Return whether the weights were trained before the first step."""
        return bool(self.recipe("model.start_from") or self.recipe("run.fork_from"))

    def schedule(self) -> Schedule | None:
        """Return the recipe's schedule of groups, None when it does not say."""
        settings, steps = self.recipe("optimizer.schedule"), self.data.max_steps()
        if not settings or self.recipe("optimizer.type", "trainer") == "trainer":
            return None
        known = settings.keys() & Schedule.__annotations__.keys()
        schedule = Schedule(**{key: settings[key] for key in known})
        # recipe.yaml is written before a horizon in epochs is known in steps, which shortens the default warm-up
        # (run/inputs.py).
        in_epochs = self.recipe("train.num_train_epochs") and not self.recipe("train.max_steps")
        if in_epochs and steps and schedule.warmup_steps == Schedule().warmup_steps:
            schedule.warmup_steps = min(schedule.warmup_steps, steps // 5)
        return schedule

    def warmup_steps(self) -> int | None:
        """Return steps of warm-up by the recipe, None when it does not say."""
        if self.recipe("optimizer.type", "trainer") != "trainer":
            schedule = self.schedule()
            return schedule.warmup_steps if schedule and "warmup_steps" in self.recipe("optimizer.schedule") else None
        warmup, steps = self.recipe("train.warmup_steps"), self.data.max_steps()
        if warmup is not None and warmup < 1:  # a share of the run
            return None if steps is None else math.ceil(warmup * steps)
        return None if warmup is None else int(warmup)
