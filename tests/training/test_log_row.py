"""The parts of a logged row that a run of one process cannot show."""

import math
import os
import types

import pytest
import torch
from torch.distributed import init_process_group

from pipeline.data.rows import Consumed
from pipeline.process.network import note_retry
from pipeline.recipe.schema import Hub, Monitor
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.guard import StepGuard
from pipeline.training.log_row import LogRow, data_numbers
from pipeline.training.meters import GIB
from tests.ranks import on_ranks
from tests.training.test_meters import Allocator


def log_row_in(folder, **more):
    parts = {
        "is_first": True, "rows": None, "meter": None, "guard": None, "timer": None, "train_bpb": None, "saver": None,
        "stage": "pretrain", "hub": Hub(),
    }  # fmt: skip
    return LogRow(RunDirectory(folder), device=torch.device("cpu"), **parts | more)


def rank_main(rank, folder):
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    row = log_row_in(
        folder,
        timer=types.SimpleNamespace(read=lambda: [0.2, 0.5][rank]),
        train_bpb=types.SimpleNamespace(
            read=lambda: {"nats": [math.log(2), 3 * math.log(2)][rank], "bytes": [3, 1][rank]}
        ),
    )
    cuda = Allocator()
    cuda.hold([30, 40][rank])
    cuda.hold([20, 10][rank])
    cuda.retries, cuda.ooms = [1, 2][rank], rank
    row.memory.cuda, row.memory.device = cuda, torch.device("cuda")
    for _ in range(2 * rank):
        note_retry()
    numbers = row._of_all_ranks({"data/wait_s": [0.01, 0.04][rank], "perf/step_s": 0.1})
    assert numbers["data/wait_s"] == 0.04
    assert numbers["data/wait_frac"] == pytest.approx(0.4)
    assert (numbers["mem/allocated_gib"], numbers["mem/peak_allocated_gib"]) == (20, 40)
    assert (numbers["mem/alloc_retries"], numbers["mem/ooms"], numbers["data/retries"]) == (3, 1, 2)
    assert (numbers["perf/slowest_rank_id"], numbers["perf/slowest_rank"]) == (1, pytest.approx(2.5))
    assert numbers["train/bpb"] == pytest.approx(1.0)  # of the sums, not the mean of 1/3 and 3
    assert row.state_dict()["peak_bytes"] == 40 * GIB  # also on the rank that writes the checkpoint
    os._exit(0)  # not through the interpreter's end, where a thread of gloo may make the process abort


def test_two_ranks_log_the_longest_wait_fullest_device_and_summed_failures(tmp_path):
    on_ranks(rank_main, tmp_path)


def test_the_hub_lags_by_the_steps_since_the_newest_that_it_has(tmp_path):
    saver, hub = types.SimpleNamespace(last_good=(20, 1234)), Hub(id="me/model", strategy="checkpoint")
    log_row = log_row_in(tmp_path, saver=saver, hub=hub)
    published = tmp_path / "hub_queue" / "published.jsonl"
    assert log_row._of_checkpoints(24) == {
        "ckpt/age_steps": 4,
        "ckpt/last_good_step": 20,
        "ckpt/bytes": 1234,
        "ckpt/hub_lag_steps": 24,
    }
    published.parent.mkdir()
    published.write_text('{"step": 10, "repo_id": "me/model"}\n{"step": 20, "repo_id": "me/other"}\n')
    assert log_row._of_checkpoints(24)["ckpt/hub_lag_steps"] == 14
    with open(published, "a") as file:
        file.write('{"step": 30, "repo_id": "me/model"}\n')  # then the run went back
    assert log_row._of_checkpoints(24)["ckpt/hub_lag_steps"] == 14
    assert log_row._of_checkpoints(31)["ckpt/hub_lag_steps"] == 1
    at_the_end = log_row_in(tmp_path, saver=saver, hub=Hub(id="me/model", strategy="end"))
    assert "ckpt/hub_lag_steps" not in at_the_end._of_checkpoints(31)


def test_a_fork_and_its_restarts_leave_the_parents_time_out_of_goodput(tmp_path):
    meter = types.SimpleNamespace(total_s=500.0)
    row = log_row_in(tmp_path, meter=meter)
    row.load_state_dict({"before_s": 7.0, "peak_bytes": 9}, is_fork=True)
    assert row.state_dict() == {"before_s": 500.0, "peak_bytes": 0}
    meter.total_s = 600.0
    again = log_row_in(tmp_path, meter=meter)
    again.load_state_dict(row.state_dict(), is_fork=False)
    assert again.state_dict() == row.state_dict()


def test_sums_over_sources_are_left_out_where_one_is_not_known():
    one = Consumed(samples=4, tokens=30, padded=2, documents=5, bad_rows=1)
    old = Consumed(samples=4, tokens=20, padded=6, documents=None, bad_rows=0)
    assert data_numbers({"a": one}, row_tokens=8) == {
        "data/bad_rows": 1,
        "data/pad_frac": 2 / 32,
        "data/documents": 5,
    }
    both = data_numbers({"a": one, "b": old}, row_tokens=8)
    assert (both["data/pad_frac"], both["data/source/b/tokens"]) == (8 / 64, 20)
    assert {"data/documents", "data/source/b/documents"}.isdisjoint(both)


def test_a_step_whose_norm_is_not_finite_is_no_clipped_one(tmp_path):
    guard = StepGuard(RunDirectory(tmp_path), Monitor())
    guard.norms = [0.5, None, 2.0, 1.0]
    assert guard.read(max_norm=1.0)["optim/clip_frac"] == 0.25
    assert "optim/clip_frac" not in guard.read(max_norm=1.0)  # no step since
    guard.norms = [2.0]
    assert "optim/clip_frac" not in guard.read(max_norm=math.inf)
