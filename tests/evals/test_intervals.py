"""Intervals cover what they claim: by exact sums for shares, by seeded simulation for means."""

import math
import random

import numpy as np
import pytest

from pipeline.evals.intervals import (
    bootstrap_means,
    interval,
    interval_of_error,
    mean_interval,
    share_interval,
    student_t,
    two_sided,
)


def coverage_of_share(ends, n, share):
    """The chance that the interval of n items holds the share that they were drawn from."""
    return sum(
        math.comb(n, right) * share**right * (1 - share) ** (n - right)
        for right in range(n + 1)
        if ends(right, n)[0] <= share <= ends(right, n)[1]
    )


@pytest.mark.parametrize("n", [24, 32, 100, 200])
def test_the_interval_of_a_share_covers_shares_near_0_too(n):
    covered = [coverage_of_share(share_interval, n, share) for share in np.geomspace(0.002, 0.5, 60)]
    assert min(covered) > 0.915
    assert 0.94 < np.mean(covered) < 0.98


@pytest.mark.parametrize(("right", "n"), [(15, 50), (1, 1319), (0, 20), (20, 20), (7, 8), (3000, 10042)])
def test_the_ends_of_a_share_leave_2_5_percent_beyond_each(right, n):
    low, high = share_interval(right, n)
    assert 0 <= low <= right / n <= high <= 1
    assert low < high
    assert share_interval(n - right, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    if right == 0:
        assert (low, (1 - high) ** n) == (0.0, pytest.approx(0.05))
    elif n < 100:  # more than were found, and half of just as many
        chances = [math.comb(n, k) * low**k * (1 - low) ** (n - k) for k in range(right, n + 1)]
        assert sum(chances) - chances[0] / 2 == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("n", "shares", "baselines"),
    [(24, [0.3, 0.25, 0.27, 0.02, 0.01], [0.25] * 3 + [0, 0]), (100, [0.6, 0.4, 0.35, 0.05, 0.0], [0.25] * 3 + [0, 0]), (24, [0.01] * 5, [0.0] * 5)],
)  # fmt: skip
def test_the_interval_of_a_mean_covers_95_percent_despite_zero_scores(n, shares, baselines):
    draws, slopes = np.random.default_rng(0), 1 / (1 - np.array(baselines))
    truth, held = float(np.mean((np.array(shares) - baselines) * slopes)), 0
    for right in draws.binomial(n, shares, size=(1000, len(shares))):
        mean = float(np.mean((right / n - baselines) * slopes))
        low, high = mean_interval([(int(r), n) for r in right], slopes=slopes.tolist(), value=mean)
        held += low <= truth <= high
    assert 0.92 < held / 1000 < 0.98


def test_draws_with_replacement_give_the_interval_that_drawing_item_by_item_gives():
    correct = np.array([True] * 30 + [False] * 70)
    resampled = [np.mean(random.Random(n).choices(correct, k=100)) for n in range(4000)]
    assert interval(bootstrap_means(correct)) == pytest.approx(np.percentile(resampled, (2.5, 97.5)), abs=0.011)


def test_a_mean_with_binomial_error_has_the_interval_of_a_share():
    assert interval_of_error(0.3, math.sqrt(0.21 / 99), 100) == share_interval(30, 100)
    assert interval_of_error(0.0, 0.0, 24) == share_interval(0, 24)
    assert interval_of_error(0.3, 0.02, 100) == pytest.approx((0.3 - 1.96 * 0.02, 0.3 + 1.96 * 0.02), abs=1e-5)
    assert interval_of_error(12.5, 0.0, 1) is None


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (3.250, 9, 0.01), (2.042, 30, 0.05), (1.96, float("inf"), 0.05)],
)  # fmt: skip
def test_students_chances_and_quantiles_are_those_of_the_tables(t, freedom, chance):
    assert two_sided(t, freedom) == pytest.approx(chance, rel=2e-3)
    assert student_t(chance, freedom) == pytest.approx(t, rel=1e-3)
    assert two_sided(0.0, freedom) == pytest.approx(1.0)


def test_small_chances_of_students_t_match_scipy_at_any_freedom():
    # scipy 1.17.1: 2 * stats.t.sf(t, freedom)
    scipy = {(10, 1.5): 2.3659355e-2, (5, 7.3): 1.3827744e-3, (5, 100): 2.4501734e-6, (5, 1e5): 5.7427017e-7}
    for (t, freedom), chance in scipy.items():
        assert two_sided(t, freedom) == pytest.approx(chance, rel=1e-4)
