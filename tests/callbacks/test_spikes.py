"""Spikes in logged rows."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from pipeline.callbacks.log import Spikes
from pipeline.metrics import ENOUGH
from pipeline.process.errors import DivergedError
from pipeline.run_dir.run_directory import RunDirectory


def test_a_step_that_the_loss_scaler_skipped_is_no_spike_and_leaves_the_usual_values_as_they_are(tmp_path):
    spikes = Spikes(RunDirectory(tmp_path), policy="stop", attempt=1)
    about = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerState(), TrainerControl()
    for norm in [1.0] * ENOUGH + [float("inf"), float("nan")] * ENOUGH:
        spikes.on_log(*about, logs={"optim/grad_norm": norm})
    with pytest.raises(
        DivergedError, match=rf"is 2, above 1.1, the highest usual by its last {ENOUGH} values"
    ) as raised:
        spikes.on_log(*about, logs={"optim/grad_norm": 2.0})
    assert raised.value.facts == {
        "step": 0,
        "name": "optim/grad_norm",
        "value": 2.0,
        "highest_usual": pytest.approx(1.1),
    }
