"""The recent values of one number, and which value is far above them."""

import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 128  # values that are remembered
ENOUGH = 20  # before that nothing is called unusual: losses fall fast in the beginning
DEVIATIONS = 6.0


class RecentValues(deque[float]):
    """The last WINDOW values, spikes included: a level that stays becomes the usual one."""

    def __init__(self, values: Iterable[float] = ()):
        super().__init__(values, maxlen=WINDOW)

    def highest_usual(self) -> float | None:
        """Return the median and DEVIATIONS robust standard deviations (1.4826 x median absolute deviation), at least a tenth
        above the median; None while there are too few values."""
        if len(self) < ENOUGH:
            return None
        middle = statistics.median(self)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self)
        return middle + max(DEVIATIONS * spread, 0.1 * abs(middle))
