"""Times of steps, and of the start."""

import time

import psutil
import pytest

from pipeline.training.meter import StepMeter


def test_the_first_row_of_a_start_tells_how_long_the_process_took_to_the_end_of_its_first_step():
    meter = StepMeter(
        batch_tokens=1, max_steps=10, world_size=1, flops_per_token={"exact_causal": 1.0}, peak=None, bf16_peak=None
    )
    meter.begin()
    meter.step(1)
    meter.begin()  # of the second step: the first one has ended
    ended = time.time() - psutil.Process().create_time()
    time.sleep(0.05)
    meter.step(1)
    first = meter.read(step=2, loss=1.0, wait_s=0.0)
    assert first["perf/first_step_s"] == pytest.approx(ended, abs=0.03)
    meter.begin()
    meter.step(1)
    assert "perf/first_step_s" not in meter.read(step=3, loss=1.0, wait_s=0.0)
