"""What counts as far outside the recent values."""

from collections import deque

import pytest

from pipeline.callbacks.spikes import ENOUGH, highest_usual


def test_nothing_is_unusual_before_there_are_enough_values():
    assert highest_usual(deque([1.0] * (ENOUGH - 1))) is None


def test_equal_values_leave_a_tenth():
    assert highest_usual(deque([2.0] * ENOUGH)) == pytest.approx(2.2)


def test_a_few_spikes_do_not_raise_what_is_usual():
    quiet = [3.0 + 0.1 * (i % 5) for i in range(60)]
    assert highest_usual(deque([*quiet, 50.0, 60.0])) == pytest.approx(highest_usual(deque(quiet)), rel=0.05)


def test_noise_widens_it():
    noisy = [3.0 + (i % 7 - 3) for i in range(70)]
    assert highest_usual(deque(noisy)) > 3.0 + 6 * 2.0
