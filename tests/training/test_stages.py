"""The slowest rank, and the stages that a thread may be in."""

import pytest

from pipeline.callbacks.samples import Samples
from pipeline.training.checkpoint import CheckpointSaver
from pipeline.training.meters import slowest
from pipeline.training.stages import ORDER, STAGES
from pipeline.training.trainer import TandemTrainer


def test_the_slowest_rank_is_measured_against_the_mean_of_the_others():
    assert slowest([1.0, 2.0]) == {"perf/slowest_rank": 2.0, "perf/slowest_rank_id": 1}
    assert slowest([9.0, 1.0, 2.0]) == {"perf/slowest_rank": pytest.approx(6.0), "perf/slowest_rank_id": 0}
    assert slowest([1.0, 1.0])["perf/slowest_rank"] == 1.0


def test_every_stage_is_a_function_of_the_training():
    for name in STAGES:
        assert any(callable(getattr(owner, name, None)) for owner in (TandemTrainer, CheckpointSaver, Samples)), name
    assert ORDER == ["step", "save", "evaluation", "sampling", "data", "forward+backward"]
