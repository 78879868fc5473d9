"""Power laws through few points: loss over compute, with the interval in which a further run is to be expected.

y = floor + exp(a) x^b, with equal noise of ln y. Few points tell an irreducible term (the floor) from none badly, and far beyond
them all depends on it; so none is chosen. For each floor of a grid the law is fitted, and all of them stand together, each with
the weight that the points give it (a posterior). Before the points, no floor has half of the weight, floors up to 0.9 of the
lowest y share the other half evenly; exponents between -0.01 and -1, and noises between 0.03 and 2 %, are equally likely by their
logarithm. What the interval covers in simulation stands in docs/log.md (`python -m benchmarks.coverage`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEAST = 3  # different x
NO_FLOOR, HIGHEST_FLOOR, FLOORS = 0.5, 0.9, 60
EXPONENTS = (0.01, 1.0)
LEAST_NOISE, MOST_NOISE, NOISES = 0.0003, 0.02, 14


@dataclass(frozen=True)
class PowerLaw:
    """y = floor + exp(a + b (ln x - middle)) for F floors and N noises of ln y, and how likely each pair is.

    floors, a, b, middle, a_variance, b_variance: (F,), variances in units of the noise's. noises: (N,). weights: (F, N), of sum 1.
    """

    floors: "np.ndarray"
    a: "np.ndarray"
    b: "np.ndarray"
    middle: "np.ndarray"
    a_variance: "np.ndarray"
    b_variance: "np.ndarray"
    noises: "np.ndarray"
    weights: "np.ndarray"

    def predict(self, x: float) -> tuple[float, float, float]:
        """Return the median at x, and the 95 % prediction interval of one further run there (its own noise included)."""
        median, low, high = (self._quantile(x, chance) for chance in (0.5, 0.025, 0.975))
        return median, low, high

    def chance_below(self, y: float, x: float) -> float:
        """Return the chance that a further run at x ends below y."""
        means, errors = self._further_run(x)
        return self._chance_below(math.log(y), means, errors)

    def likeliest(self) -> tuple[float, float, float]:
        """Return floor, factor and exponent of y = floor + factor x^exponent that the points speak for most."""
        best = int(self.weights.sum(axis=1).argmax())
        a, b, middle = (float(values[best]) for values in (self.a, self.b, self.middle))
        return float(self.floors[best]), math.exp(a - b * middle), b

    def highest_floor(self) -> float:
        """Return the floor that 97.5 % of the weight do not exceed."""
        return float(self.floors[int((self.weights.sum(axis=1).cumsum() < 0.975).sum())])

    def _further_run(self, x: float) -> "tuple[np.ndarray, np.ndarray]":
        """(F, 1) ln y at x, and (F, N) its standard deviation."""
        import numpy as np

        away = math.log(x) - self.middle
        power = np.exp(self.a + self.b * away)
        y = self.floors + power
        spread = 1 + (power / y) ** 2 * (self.a_variance + away**2 * self.b_variance)
        return np.log(y)[:, None], np.sqrt(spread)[:, None] * self.noises

    def _chance_below(self, log_y: float, means: "np.ndarray", errors: "np.ndarray") -> float:
        return float((self.weights * _normal_below((log_y - means) / errors)).sum())

    def _quantile(self, x: float, chance: float) -> float:
        means, errors = self._further_run(x)
        low, high = float((means - 8 * errors).min()), float((means + 8 * errors).max())
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._chance_below(middle, means, errors) < chance else (low, middle)
        return math.exp(high)


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Return the laws through the points. Raises ValueError for fewer than three different x, and where y does not fall."""
    import numpy as np

    if len(set(x)) < LEAST:
        raise ValueError(f"{len(set(x))} different x, and a law with an interval takes {LEAST}")
    u, ys = np.log(np.array(x)), np.array(y)
    floors = np.append(0.0, HIGHEST_FLOOR * min(y) * (np.arange(FLOORS) + 0.5) / FLOORS)
    prior = np.append(NO_FLOOR, np.full(FLOORS, (1 - NO_FLOOR) / FLOORS))
    # ln(y - floor) is a line in ln x; its noise is that of ln y times y / (y - floor), hence the weights.
    over = ys - floors[:, None]
    share, v = over / ys, np.log(over)
    weight = share**2
    total = weight.sum(axis=1)
    middle, a = (weight * u).sum(axis=1) / total, (weight * v).sum(axis=1) / total
    du, dv = u - middle[:, None], v - a[:, None]
    across = (weight * du**2).sum(axis=1)
    b = (weight * du * dv).sum(axis=1) / across
    squares = (((dv - b[:, None] * du) * share) ** 2).sum(axis=1)
    possible = (-b > EXPONENTS[0]) & (-b < EXPONENTS[1])
    if not possible.any():
        raise ValueError(
            f"y changes as x^{b[0]:.3f}, and a law takes an exponent from -{EXPONENTS[0]} to -{EXPONENTS[1]}"
        )
    # Points that fit no law to 2 % bring their own measure of noise.
    most = max(MOST_NOISE, 4 * math.sqrt(squares.min() / len(x)))
    noises = np.geomspace(LEAST_NOISE, most, NOISES)
    # a and b integrated out: they leave a factor noise^2 / sqrt(total across), and their prior 1 / |b|.
    by_floor = np.where(possible, np.log(prior) - np.log(total * across) / 2 - np.log(np.abs(b)), -np.inf)
    logs = by_floor[:, None] - (len(x) - 2) * np.log(noises) - squares[:, None] / (2 * noises**2)
    weights = np.exp(logs - logs.max())
    return PowerLaw(floors, a, b, middle, 1 / total, 1 / across, noises, weights / weights.sum())


def _normal_below(z: "np.ndarray") -> "np.ndarray":
    """The normal distribution's chance below z, to 1e-7. Source: Abramowitz and Stegun, 7.1.26."""
    import numpy as np

    t = 1 / (1 + 0.3275911 * np.abs(z) / math.sqrt(2))
    powers = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    beyond = powers * np.exp(-(z**2) / 2) / 2
    return np.where(z < 0, beyond, 1 - beyond)
