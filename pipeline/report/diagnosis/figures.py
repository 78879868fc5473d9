"""A run's numbers in the form that rules read: finite values, each series read once."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.report.run_data import RunData


@dataclass(frozen=True)
class Series:
    """Values by step, in the order of the steps."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return self.values.size

    def where(self, kept: np.ndarray) -> "Series":
        return Series(self.steps[kept], self.values[kept])


class Figures:
    """What rules may read of a run: series, recipe and manifest by dotted path. Imported runs may lack any of it."""

    def __init__(self, data: RunData):
        self.data = data
        self._series: dict[str, Series] = {}

    def series(self, name: str) -> Series:
        """The finite values of a metric."""
        if name not in self._series:
            points = [(step, value) for step, value in self.data.series(name) if is_finite(value)]
            steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
            self._series[name] = Series(steps, values)
        return self._series[name]

    def timed(self, name: str) -> Series:
        """The same without the first logged value of each start, which holds compilation and cold caches."""
        series, starts = self.series(name), self.series("perf/first_step_s").steps
        kept = ~np.isin(series.steps, starts)
        kept[:1] = False
        return series.where(kept)

    def last(self, name: str) -> float | None:
        values = self.series(name).values
        return float(values[-1]) if values.size else None

    def total(self, *names: str) -> float:
        """The sum of all values of these metrics."""
        return float(sum(self.series(name).values.sum() for name in names))

    def seconds(self) -> float | None:
        """Seconds in steps over all attempts that count; None when nobody measured them."""
        total = self.last("perf/total_s")
        if total is None and len(self.timed("perf/step_s")):
            total = float(np.median(self.timed("perf/step_s").values)) * self.data.step()
        return total

    def recipe(self, path: str, default: Any = None) -> Any:
        return _at(self.data.recipe, path, default)

    def manifest(self, path: str, default: Any = None) -> Any:
        return _at(self.data.manifest, path, default)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rows of that event, as far as they count."""
        return [row for row in self.data.rows if row.get("event") == name]

    def is_recorded_by_us(self) -> bool:
        """Whether the rows are of this program, whose alarms look at every logged value as it comes."""
        return any(row.get("event") == "attempt" for row in self.data.all_rows)

    def starts_trained(self) -> bool:
        """Whether the weights were trained before the first step."""
        return bool(self.recipe("model.start_from") or self.recipe("run.fork_from"))

    def warmup_steps(self) -> int | None:
        """Steps of warm-up by the recipe, None when it does not say."""
        if self.recipe("optimizer.type", "trainer") != "trainer":
            return self.recipe("optimizer.schedule.warmup_steps")
        warmup = self.recipe("train.warmup_steps")
        if warmup is None or warmup >= 1:
            return None if warmup is None else int(warmup)
        steps = self.data.max_steps()
        return None if steps is None else math.ceil(warmup * steps)


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at(tree: Any, path: str, default: Any) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return default if tree is None else tree
