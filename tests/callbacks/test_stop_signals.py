"""A signal in the middle of an evaluation whose forwards need every rank: all ranks give up at the same batch."""

import datetime
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline.callbacks.stop_signals import StopSignals
from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.evals.core import score_rows
from pipeline.run_dir.failures import Signals
from tests.model.tiny_models import tiny
from tests.ranks import on_ranks

pytestmark = pytest.mark.full

WAIT = datetime.timedelta(seconds=20)  # for a rank that has left the others in their forward


def rank_main(rank, rendezvous):
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=WAIT)
    model = fully_shard(tiny("gpt2"), mesh=init_device_mesh("cpu", (2,)))
    signals = Signals()
    stop = StopSignals(signals)
    stop.on_train_begin(None, None, None)
    signals.training = True
    begun = []

    def signalled_before_the_third(batches):
        for number, batch in enumerate(batches):
            if number == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                while not signals.received:
                    time.sleep(0.01)
            yield batch

    def watched(batches):
        for batch in stop.on_every_rank(signalled_before_the_third(batches), lockstep=True):
            begun.append(batch)
            yield batch

    rows = [(np.random.default_rng(n).integers(3, 101, 20), 10) for n in range(6)]
    scored = {"device": "cpu", "batch_tokens": 1}
    try:
        score_rows(model, rows, **scored, watched=watched)
        raise AssertionError("nobody gave up")
    except EvaluationInterrupted:
        assert len(begun) == 2
        assert signals.received == signal.SIGTERM
        assert signals.stopping
    assert np.isfinite(score_rows(model, rows, **scored).nats).all()  # the ranks are still in step
    destroy_process_group()
    os._exit(0)  # a library's thread that outlives the interpreter would now and then end it by SIGABRT


def test_ranks_that_score_in_lockstep_give_up_at_the_same_batch(tmp_path):
    on_ranks(rank_main, str(tmp_path / "rendezvous"))
