"""Uncertainty of scores: 95 % intervals of shares and of means over tasks, and Student's t for few repeats.

What they cover in simulation is in docs/log.md; `python -m benchmarks.coverage` makes that table.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
NORMAL = 1.959963984540054  # 97.5 % quantile of the normal distribution
DRAWS = 2000


@lru_cache(maxsize=1024)
def share_interval(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `right` out of `n`: mid-P, of the exact binomial tails.

    It is never a point, also where none or all are right: the other end then is a share under which that has a chance
    of 5 %. Against Wilson's it is narrower on average, and covers 92 % of shares or more where Wilson's falls to 84 %
    (shares of about 0.18 / n). Source: Berry and Armitage, Mid-P confidence intervals: a brief review (1995).
    """
    assert 0 <= right <= n > 0, (right, n)
    return _lower_end(right, n), 1 - _lower_end(n - right, n)


def mean_interval(shares: Sequence[tuple[int, int]], *, slopes: Sequence[float], value: float) -> tuple[float, float]:
    """Return the 95 % interval of a mean over tasks, each (right, n) times its slope (1 / (1 - baseline) where it is
    centred).

    value: the mean. Its distance from each end is the root of the summed squares of the tasks' distances, so that
    tasks with none right add their doubt too. Source: Zou and Donner, Construction of confidence limits ...: a general
    approach (2008).
    """
    below = above = 0.0
    for (right, n), slope in zip(shares, slopes, strict=True):
        low, high = share_interval(right, n)
        below += (slope * (right / n - low)) ** 2
        above += (slope * (high - right / n)) ** 2
    return value - math.sqrt(below) / len(shares), value + math.sqrt(above) / len(shares)


def interval_of_error(value: float, stderr: float, n: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over n items whose standard error is known: of a share of right ones, where
    it is one.

    A share is known by its error, the root of p (1 - p) / (n - 1). None where an error of 0 says nothing: one item
    alone.
    """
    right = round(value * n)
    if n > 1 and 0 <= right <= n and abs(value * n - right) < 1e-6:
        share = right / n
        if math.isclose(stderr, math.sqrt(share * (1 - share) / (n - 1)), rel_tol=1e-3, abs_tol=1e-9):
            return share_interval(right, n)
    if stderr > 0:
        return value - NORMAL * stderr, value + NORMAL * stderr
    return None


def bootstrap_means(correct: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return (DRAWS,) accuracies of as many items drawn from these with replacement; the same for the same seed.

    For the mean over many tasks: of one task, or of few, use the functions above, as none right gives draws of 0
    alone. Of right and wrong only their number matters, so each draw is one from a binomial distribution.
    """
    return np.random.default_rng(seed).binomial(len(correct), correct.mean(), size=DRAWS) / len(correct)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Return the middle 95 %."""
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def two_sided(t: float, freedom: float) -> float:
    """Return the chance of |T| >= |t| under Student's distribution, by Simpson's rule over the angle atan(t /
    sqrt(freedom)).

    Within 1e-4 of scipy 1.17, relatively, down to chances of 1e-9. Not scipy itself: 113 MB for these 20 lines and the
    mid-P tails, which it does not have.
    """
    if math.isinf(freedom):
        return math.erfc(abs(t) / math.sqrt(2))
    # With T = sqrt(v) tan(a) the density is proportional to cos(a)^(v - 1) on (-pi/2, pi/2).
    steps = 2000
    angle = math.atan(abs(t) / math.sqrt(freedom))
    # The density is about exp(-v x^2 / 2) for large v: further out than 12 / sqrt(v) nothing is left.
    width = min(math.pi / 2 - angle, 12 / math.sqrt(freedom)) / steps
    density = np.cos(angle + width * np.arange(steps + 1)).clip(0.0) ** (freedom - 1)
    tail = width / 3 * (density[0] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum() + density[-1])
    log_whole = 0.5 * math.log(math.pi) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    return min(float(2 * tail) / math.exp(log_whole), 1.0)


def student_t(chance: float, freedom: float) -> float:
    """Return the t that |T| reaches with this chance under Student's distribution: 12.71 for 0.05 and one degree of
    freedom."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > chance:
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        if two_sided(middle, freedom) > chance:
            low = middle
        else:
            high = middle
    return high


def _lower_end(right: int, n: int) -> float:
    """Return the share under which more than `right` and half of exactly `right` have a chance of 2.5 %."""
    if right == 0:
        return 0.0
    k = np.arange(right, n + 1)
    ways = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])  # log binomial
    low, high = 0.0, right / n
    for _ in range(50):
        share = (low + high) / 2
        chances = np.exp(ways + k * math.log(share) + (n - k) * math.log1p(-share))
        if chances.sum() - chances[0] / 2 < (1 - CONFIDENCE) / 2:
            low = share
        else:
            high = share
    return high
