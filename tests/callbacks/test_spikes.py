"""What counts as far outside the recent values."""

from collections import deque

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from pipeline.artifacts.errors import DivergedError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.callbacks.spikes import ENOUGH, Spikes, highest_usual


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


def test_a_step_that_the_loss_scaler_skipped_is_no_spike_and_leaves_the_usual_values_as_they_are(tmp_path):
    spikes = Spikes(RunDirectory(tmp_path), policy="stop", attempt=1)
    about = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerState(), TrainerControl()
    for norm in [1.0] * ENOUGH + [float("inf"), float("nan")] * ENOUGH:
        spikes.on_log(*about, logs={"optim/grad_norm": norm})
    with pytest.raises(DivergedError, match=rf"is 2, above 1.1, the highest usual by its last {ENOUGH} values"):
        spikes.on_log(*about, logs={"optim/grad_norm": 2.0})
