"""The processes that write the parts of a sharded model's checkpoint, one for each rank: whole or nothing, whichever of them is killed."""

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from pipeline.model.build import build_model
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import read_json, temporary_folder, write_json
from pipeline.run_dir import checkpoints
from pipeline.run_dir.checkpoints import problems, read_seal, reports, seal
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import ModelFiles
from pipeline.training.checkpoint_parts import PartSaver, divided, part_file
from tests.conftest import ROOT

POPEN = subprocess.Popen
RANKS = 3
PARTS = [{"weight": torch.full((1_000_000,), float(rank))} for rank in range(RANKS)]


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.checkpoints.mkdir(parents=True)
    return directory


def file(rank):
    return part_file("model.safetensors", rank, RANKS)


def begun(run, *, ranks=range(RANKS), step=5):
    """Return a saver for each rank that has begun to write its part, as save_part begins it on each of them."""
    savers = [PartSaver(run, keep=2, every=None, best=False) for _ in ranks]

    def small(folder):
        (folder / "config.json").write_text("{}")
        reports(folder).mkdir()

    folder, _ = savers[0]._open(step, small)
    for rank, saver in zip(ranks, savers, strict=True):
        saver._begin(step, folder, {file(rank): (PARTS[rank], {"format": "pt"})}, rank=rank, ranks=RANKS)
    return savers


def names(run):
    return sorted(name for name in os.listdir(run.checkpoints) if name != checkpoints.LOCK)


def assert_whole(run, step=5):
    assert problems(run.checkpoint(step)) == []
    assert sorted(os.listdir(run.checkpoint(step))) == ["MANIFEST.json", "config.json", *map(file, range(RANKS))]
    for rank, part in enumerate(PARTS):
        assert torch.equal(load_file(run.checkpoint(step) / file(rank))["weight"], part["weight"])


def test_the_parts_of_all_ranks_become_one_sealed_folder_from_rank_0(run):
    savers = begun(run)
    assert [saver.wait() is None for saver in reversed(savers)] == [True, True, False]
    assert_whole(run)
    assert names(run) == ["checkpoint-5"]
    assert savers[0].last_good[0] == 5


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_killed_process_of_any_rank_restarts_with_what_was_copied(run, rank):
    savers = begun(run)
    os.kill(savers[rank].process.pid, signal.SIGKILL)
    for saver in reversed(savers):
        saver.wait()
    assert_whole(run)
    assert names(run) == ["checkpoint-5"]


def test_a_process_that_is_killed_when_all_was_reported_writes_nothing_again(run):
    """Rank 0's process may be sealing what it has written, or have published it."""
    savers = begun(run, ranks=(0, 1))
    savers[1].wait()
    folder = next(run.checkpoints.glob(".tmp-checkpoint-5-????????"))
    before = (folder / file(1)).stat()
    assert checkpoints.start(savers[1].job).wait() == 0
    after = (folder / file(1)).stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    savers[0]._give_up()
    assert names(run) == []
    assert checkpoints.start(savers[1].job).wait() == 0
    assert names(run) == []


@pytest.mark.parametrize("moment", range(6))
def test_all_processes_killed_at_any_moment_leave_the_whole_checkpoint_or_none(run, moment):
    begun_before = begun(run, step=3)
    for saver in begun_before:
        saver.wait()
    savers = begun(run)
    time.sleep(moment * 0.04)
    for saver in savers:
        os.kill(saver.process.pid, signal.SIGKILL)
    for saver in savers:
        saver.process.wait()
    RunDirectory(run.path).hold()
    assert names(run) in (["checkpoint-3"], ["checkpoint-3", "checkpoint-5"])
    assert_whole(run, 3)
    if run.checkpoint(5).exists():
        assert_whole(run, 5)


def test_the_manifest_says_of_another_hosts_part_what_that_host_wrote(run, monkeypatch):
    """A network file system shows for a while an older listing and an older size."""
    folder = temporary_folder(run.checkpoint(5))
    reports(folder).mkdir()
    (folder / file(1)).write_bytes(b"the begin")
    part = {"bytes": 20, "sha256": hashlib.sha256(b"the beginning of all").hexdigest()}
    write_json(reports(folder) / "1.json", {"written": {file(1): part}})
    listdir, stale = os.listdir, [[], []]
    monkeypatch.setattr(os, "listdir", lambda path: stale.pop() if path == folder and stale else listdir(path))
    paths = {"temporary": str(folder), "target": str(run.checkpoint(5))}
    none = {"images": {}, "scores": {}, "keep": None, "every": None}
    checkpoints.write(checkpoints.Job(**paths, **none, facts={"step": 5}, ranks=2))
    assert not stale
    assert read_seal(run.checkpoint(5))["files"] == {file(1): part}
    with pytest.raises(FileNotFoundError, match=f"was written and is not in its folder.*{file(2)}"):
        seal(run.checkpoint(5), written={file(2): part})


def test_a_rank_whose_disk_refuses_leaves_the_folder_to_rank_0(run, monkeypatch):
    """Which still writes, and reads there why the checkpoint cannot be whole."""
    savers = begun(run, ranks=(0, 1))
    os.kill(savers[0].process.pid, signal.SIGSTOP)
    folder = next(run.checkpoints.glob(".tmp-checkpoint-5-????????"))
    monkeypatch.setattr(subprocess, "Popen", limited)
    last = PartSaver(run, keep=2, every=None, best=False)
    last._begin(5, folder, {file(2): (PARTS[2], None)}, rank=2, ranks=RANKS)
    with pytest.raises(CannotWriteError, match=f"{file(2)}: File too large"):
        last.wait()
    os.kill(savers[0].process.pid, signal.SIGCONT)
    with pytest.raises(CannotWriteError, match=f"{file(2)}: File too large, so checkpoint-5 was not written"):
        savers[0].wait()
    savers[1].wait()
    assert names(run) == []


@contextmanager
def part_of_rank_1(run, folder):
    descriptor = os.memfd_create("part")
    os.ftruncate(descriptor, 100)
    paths = {"temporary": str(folder), "target": str(run.checkpoint(5))}
    rest = {"images": {file(1): (descriptor, 100)}, "scores": {}, "keep": None, "every": None, "facts": {"step": 5}}
    yield checkpoints.Job(**paths, **rest, rank=1, ranks=2)
    os.close(descriptor)


@pytest.mark.parametrize("moment", ["before the part is safe", "before the report"])
def test_a_part_that_comes_too_late_leaves_nothing_and_no_second_error(run, monkeypatch, moment):
    """Its disk was full, or it was killed and the next start has cleared the folder away while this rank's process still wrote."""
    folder = temporary_folder(run.checkpoint(5))
    reports(folder).mkdir()
    fsync = checkpoints.fsync_file

    def late(path):
        if moment == "before the report":
            fsync(path)
        checkpoints.discard(folder)
        if moment != "before the report":
            fsync(path)

    monkeypatch.setattr(checkpoints, "fsync_file", late)
    with part_of_rank_1(run, folder) as job:
        checkpoints.write_part(job)
    assert names(run) == []


@pytest.mark.parametrize("call", ["failed", "renamed and failed"])
def test_a_report_that_the_disk_refuses_is_written_again_with_its_error(run, monkeypatch, call):
    """Rank 0's process would wait ten minutes for it."""
    folder = temporary_folder(run.checkpoint(5))
    reports(folder).mkdir()
    write, failed = checkpoints._write_report, []

    def refused(report, facts):
        if call == "renamed and failed" or failed:
            write(report, facts)
        if not failed:
            failed.append(facts)
            raise OSError(errno.EIO, "Input/output error", str(report))

    monkeypatch.setattr(checkpoints, "_write_report", refused)
    with part_of_rank_1(run, folder) as job:
        if call == "renamed and failed":
            checkpoints.write_part(job)
        else:
            with pytest.raises(OSError, match="Input/output error"):
                checkpoints.write_part(job)
    found = read_json(reports(folder) / "1.json")
    assert ("written" in found) == (call == "renamed and failed")
    assert (folder / file(1)).exists()  # rank 0's process may be sealing it, or discards it with the folder
    assert found.get("errno") in (None, errno.EIO)


def limited(*args, **settings):
    return POPEN(*args, **settings, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)))


def test_a_disk_that_refuses_one_rank_ends_all_with_its_error(run, monkeypatch):
    savers = begun(run, ranks=(0, 1))
    folder = next(run.checkpoints.glob(".tmp-checkpoint-5-????????"))
    monkeypatch.setattr(checkpoints.subprocess, "Popen", limited)
    last = PartSaver(run, keep=2, every=None, best=False)
    last._begin(5, folder, {file(2): (PARTS[2], None)}, rank=2, ranks=RANKS)
    for saver in (last, savers[0]):
        with pytest.raises(CannotWriteError, match=rf"{file(2)}: File too large, so checkpoint-5 was not written"):
            saver.wait()
    savers[1].wait()
    assert names(run) == []


IMPATIENT = """
import sys
sys.path.insert(0, sys.argv[1])
from pipeline.run_dir import checkpoints
checkpoints.PATIENCE_S = checkpoints.PATIENCE_WITHOUT_TRAINING_S = 1.0
sys.exit(checkpoints.main())
"""


def impatient(_, **settings):
    return POPEN([sys.executable, "-c", IMPATIENT, str(ROOT)], **settings)


def test_a_part_that_never_comes_is_given_up_and_named(run, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", impatient)
    savers = begun(run, ranks=(0, 2))
    savers[1].wait()
    says = "checkpoints/checkpoint-5: the part of rank 1 was not written in 1 s, so checkpoint-5 was not .* Look at that host"
    with pytest.raises(CannotWriteError, match=says):
        savers[0].wait()
    assert names(run) == []


@pytest.mark.parametrize("ranks", [RANKS, RANKS - 1], ids=["all parts", "a part is lost"])
def test_writers_outlive_all_ranks_and_a_lost_part_delays_no_start(run, ranks):
    code = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from pipeline.run_dir.run_directory import RunDirectory
from tests.run_dir.test_checkpoint_parts import begun, impatient
if {ranks} < {RANKS}:
    subprocess.Popen = impatient
begun(RunDirectory({str(run.path)!r}), ranks=range({ranks}))
os.killpg(0, signal.SIGKILL)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert trainer.wait() == -signal.SIGKILL
    started = time.monotonic()
    RunDirectory(run.path).hold()
    assert time.monotonic() - started < 60
    if ranks == RANKS:
        assert_whole(run)
    assert names(run) == (["checkpoint-5"] if ranks == RANKS else [])


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
GPT = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 65}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("tandem", {**GPT, "tie_word_embeddings": True}),
        ("tandem", {**GPT, "position_embedding": "rope", "tie_word_embeddings": False, "vocab_multiple": 64}),
        ("llama", SMALL),
        ("mixtral", {**SMALL, "num_local_experts": 2}),
    ],
    ids=["gpt2", "modern", "llama", "mixtral"],
)
def test_the_parts_of_a_model_are_together_what_transformers_saves(kind, fields):
    """Also of one that it saves under other names, or cuts into experts."""
    model = build_model(kind, fields, seed=0)
    whole = ModelFiles(None).weights(model)
    found: dict = {}
    for names in divided(model.state_dict(), RANKS):
        state = model.state_dict()
        part = ModelFiles(None).weights(model, {name: state[name] for name in names})
        assert not found.keys() & part.keys()
        found |= part
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
