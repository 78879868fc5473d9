"""What counts as far above the recent values."""

import pytest

from pipeline.metrics import ENOUGH, RecentValues


def test_nothing_is_unusual_before_there_are_enough_values():
    assert RecentValues([1.0] * (ENOUGH - 1)).highest_usual() is None


def test_equal_values_leave_a_tenth():
    assert RecentValues([2.0] * ENOUGH).highest_usual() == pytest.approx(2.2)


def test_a_few_spikes_do_not_raise_what_is_usual():
    quiet = [3.0 + 0.1 * (i % 5) for i in range(60)]
    spiked = RecentValues([*quiet, 50.0, 60.0]).highest_usual()
    assert spiked == pytest.approx(RecentValues(quiet).highest_usual(), rel=0.05)


def test_noise_widens_it():
    noisy = [3.0 + (i % 7 - 3) for i in range(70)]
    assert RecentValues(noisy).highest_usual() > 3.0 + 6 * 2.0


def test_a_level_that_stays_becomes_the_usual_one():
    values = RecentValues([1.0] * 200)
    for _ in range(70):
        values.append(5.0)
    assert values.highest_usual() > 5.0
