"""Power laws through few points: loss over compute, with the interval in which a further run is to be expected.

The errors are taken as equal in log space. Three or four points bear two parameters, y = exp(a) x^b: a straight line in
log space, of whose noise one or two degrees of freedom are left to judge. An irreducible term E, y = E + exp(a) x^b, takes
five points at least, and is kept only where its own interval leaves 0 out: otherwise it is a name for the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST, LEAST_WITH_FLOOR = 3, 5  # different x
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last one, for more of them too, errs on the wide side.
T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860)  # fmt: skip


@dataclass(frozen=True)
class PowerLaw:
    """y = floor + exp(a) x^b. covariance: of (a, b), or (a, b, floor) where there is a floor; noise: of ln y, standard deviation."""

    a: float
    b: float
    floor: float
    covariance: list[list[float]]
    noise: float
    freedom: int

    def predict(self, x: float) -> tuple[float, float, float]:
        """y at x, and the 95 % prediction interval of one further run there (its own noise included)."""
        y, gradient = _value_and_gradient(self.a, self.b, self.floor, x, with_floor=len(self.covariance) == 3)
        spread = sum(
            gi * cij * gj
            for gi, row in zip(gradient, self.covariance, strict=True)
            for cij, gj in zip(row, gradient, strict=True)
        )
        half = t_975(self.freedom) * math.sqrt(max(spread, 0.0) + self.noise**2)
        return y, y * math.exp(-half), y * math.exp(half)


def t_975(freedom: int) -> float:
    return T_975[min(freedom, len(T_975)) - 1]


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Least squares in log space. Raises ValueError for fewer than three different x."""
    if len(set(x)) < LEAST:
        raise ValueError(f"{len(set(x))} different x, and a line with an interval takes {LEAST}")
    line = _fit(x, y, start=_line(x, y, floor=0.0), with_floor=False)
    assert line is not None
    if len(set(x)) < LEAST_WITH_FLOOR:
        return line
    lowest = min(y)
    starts = [_line(x, y, floor=lowest * i / 200) for i in range(1, 200)]
    best = min(starts, key=lambda start: _error(x, y, *start))
    curve = _fit(x, y, start=best, with_floor=True)
    if curve is None or curve.floor <= t_975(curve.freedom) * math.sqrt(curve.covariance[2][2]):
        return line
    return curve


def _line(x: Sequence[float], y: Sequence[float], *, floor: float) -> tuple[float, float, float]:
    """a, b and floor by linear regression of ln(y - floor) on ln x."""
    u, v = [math.log(value) for value in x], [math.log(value - floor) for value in y]
    u_mean, v_mean = sum(u) / len(u), sum(v) / len(v)
    b = sum((p - u_mean) * (q - v_mean) for p, q in zip(u, v, strict=True)) / sum((p - u_mean) ** 2 for p in u)
    return v_mean - b * u_mean, b, floor


def _fit(
    x: Sequence[float], y: Sequence[float], *, start: tuple[float, float, float], with_floor: bool
) -> PowerLaw | None:
    """Gauss-Newton from a start; None where it leaves the law's domain. A line is exact from its start."""
    import numpy as np

    a, b, floor = start
    for _ in range(50 if with_floor else 1):
        values, rows = zip(*(_value_and_gradient(a, b, floor, p, with_floor=with_floor) for p in x), strict=True)
        jacobian = np.array(rows)
        residuals = np.array([math.log(q / value) for q, value in zip(y, values, strict=True)])
        if not with_floor:
            break
        step = np.linalg.lstsq(jacobian, residuals, rcond=None)[0]
        a, b, floor = a + step[0], b + step[1], floor + step[2]
        if not 0 < floor < min(y):
            return None
        if max(abs(step)) < 1e-12:
            break
    freedom = len(x) - jacobian.shape[1]
    noise = math.sqrt(float(residuals @ residuals) / freedom)
    covariance = noise**2 * np.linalg.pinv(jacobian.T @ jacobian)
    return PowerLaw(float(a), float(b), float(floor), covariance.tolist(), noise, freedom)


def _value_and_gradient(a: float, b: float, floor: float, x: float, *, with_floor: bool) -> tuple[float, list[float]]:
    """y, and the derivatives of ln y by a, b and the floor."""
    power = math.exp(a + b * math.log(x))
    y = floor + power
    share = power / y
    return y, [share, share * math.log(x), *([1 / y] if with_floor else [])]


def _error(x: Sequence[float], y: Sequence[float], a: float, b: float, floor: float) -> float:
    return sum(
        math.log(q / _value_and_gradient(a, b, floor, p, with_floor=True)[0]) ** 2 for p, q in zip(x, y, strict=True)
    )
