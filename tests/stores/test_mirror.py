"""run.mirror: what a run saves follows it to a store and comes back whole, whatever the store does meanwhile."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file

from pipeline.contrib import mirror as mirroring
from pipeline.contrib.mirror import (
    CheckpointUploader,
    LostOwnership,
    Mirror,
    restore_base,
    restore_from_mirror,
)
from pipeline.hardware.processor import cpu_name
from pipeline.hardware.rates import bfloat16_is_faster
from pipeline.process import network
from pipeline.process.errors import RecipeError, ServiceError
from pipeline.process.storage import sum_of
from pipeline.recipe import read_recipe
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, whole_folder
from pipeline.run_dir.run_directory import RunDirectory
from tests.runner import ROOT, Runner
from tests.warm_commands import free_port

ADDRESS = "s3://runs/mine"


def saved(run: RunDirectory, step: int) -> None:
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    with whole_folder(run.checkpoint(step), step=step, run=run.name) as folder:
        (folder / "model.safetensors").write_bytes(os.urandom(100_000))
        (folder / "rng-0").write_text(str(step))
    run.recipe.write_text("run: {}\n")


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "small")
    saved(run, 5)
    return run


@pytest.fixture
def mirror(run, bucket):
    mirror = Mirror(run, ADDRESS)
    mirror.queue.mkdir()
    if mirror.store.exists(mirror.root):  # on the server, of the test before
        mirror.store.rm(mirror.root, recursive=True)
    return mirror


def restored(tmp_path, name="small"):
    """Return the run as it comes back to another disk, which is empty at first."""
    other = RunDirectory(tmp_path / "other" / name)
    restore(other)
    return other


def restore(run, resume="auto"):
    restore_from_mirror(ADDRESS, run, resume=resume, where="recipe.yaml: run.mirror")


def taking_over(run):
    """Return the mirror of a start that has just taken the run over."""
    mirror = Mirror(run, ADDRESS)
    mirror.take_over()
    return mirror


def test_the_newest_checkpoints_are_sent_seal_last_and_return_whole(tmp_path, run, mirror, monkeypatch):
    names, put = [], Mirror._put
    monkeypatch.setattr(Mirror, "_put", lambda self, file, name: names.append(name) or put(self, file, name))
    for step in (5, 10, 15):
        saved(run, step)
        assert mirror.is_behind()
        mirror.send()
        assert not mirror.is_behind()
        assert names[-1] == f"{mirror.root}/checkpoints/checkpoint-{step}/{SEAL}"
    assert mirror.steps() == [10, 15]
    other = restored(tmp_path)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-15"]
    assert problems(other.checkpoint(15)) == []
    for name in ("model.safetensors", "rng-0", SEAL):
        assert (other.checkpoint(15) / name).read_bytes() == (run.checkpoint(15) / name).read_bytes()
    assert other.recipe.read_text() == run.recipe.read_text()


def test_a_checkpoint_that_rotation_removes_while_it_is_sent_arrives_whole(tmp_path, run, mirror, monkeypatch):
    put = Mirror._put

    def slow(self, file, name):
        shutil.rmtree(run.checkpoint(5), ignore_errors=True)
        put(self, file, name)

    monkeypatch.setattr(Mirror, "_put", slow)
    mirror.send()
    assert problems(restored(tmp_path).checkpoint(5)) == []


def test_a_run_that_went_back_leaves_no_later_steps_in_the_mirror(run, mirror):
    for step in (10, 15):
        saved(run, step)
        mirror.send()
    for step in (10, 15):
        shutil.rmtree(run.checkpoint(step))
    saved(run, 7)
    mirror.send()
    assert mirror.steps() == [7]


def test_a_run_that_has_finished_comes_back_as_finished_with_its_model(tmp_path, run, mirror):
    with whole_folder(run.model, step=5, run=run.name) as folder:
        (folder / "model.safetensors").write_bytes(b"trained")
    run.update_manifest(name=run.name)
    mirror.send()
    assert "finished" not in restored(tmp_path).read_manifest()
    shutil.rmtree(tmp_path / "other")
    run.update_manifest(finished=1.0)
    mirror = taking_over(run)
    assert mirror.is_behind()
    mirror.send()
    other = restored(tmp_path)
    assert other.read_manifest()["finished"] == 1.0
    assert (other.model / "model.safetensors").read_bytes() == b"trained"
    assert problems(other.model) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda store, run, there: store.pipe_file(f"{there}/rng-0", b"11"), "rng-0 has other content than was"),
        (lambda store, run, there: store.pipe_file(f"{there}/{SEAL}", b'{"files'), f"{SEAL} has other content than"),
        (lambda store, run, there: store.rm_file(f"{there}/rng-0"), "rng-0 is missing"),
        (lambda store, run, there: sealed_outside(store, run, there), f"{SEAL} names a file outside the folder"),
    ],
    ids=["content", "torn seal", "missing", "outside"],
)
def test_a_damaged_mirror_checkpoint_is_named_and_the_earlier_one_returns(
    tmp_path, run, mirror, bucket, capsys, damage, said
):
    mirror.send()
    saved(run, 10)
    mirror.send()
    there = f"{mirror.root}/checkpoints/checkpoint-10"
    damage(bucket, run, there)
    other = restored(tmp_path)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-5"]
    assert f"checkpoint-10: is damaged ({said}" in capsys.readouterr().out
    assert not list((tmp_path / "other").rglob("outside"))


def sealed_outside(store, run, there):
    manifest = {"files": {"../../../outside": {"bytes": 1, "sha256": hashlib.sha256(b"1").hexdigest()}}}
    store.pipe_file(f"{there}/{SEAL}", json.dumps({**manifest, "sha256": sum_of(manifest)}).encode())
    store.pipe_file("runs/mine/outside", b"1")


def folders(mirror):
    return [path.name for path in mirror.queue.iterdir() if path.is_dir()]


def failing_at(monkeypatch, last, error=None):
    """Let the sending of a file fail whose name ends so."""
    put, error = Mirror._put, error or OSError("the store is away")

    def _put(self, file, name):
        if name.endswith(last):
            raise error
        put(self, file, name)

    monkeypatch.setattr(Mirror, "_put", _put)


def finish(run):
    with whole_folder(run.model, step=5, run=run.name) as folder:
        (folder / "config.json").write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(b"trained")
    run.update_manifest(name=run.name, finished=1.0)


@pytest.mark.parametrize("killed", ["before", "while the model is sent", "after"])
def test_a_finished_run_without_its_whole_model_returns_as_unfinished(tmp_path, run, mirror, monkeypatch, killed):
    mirror.send()
    saved(run, 10)
    finish(run)
    if killed != "after":
        with monkeypatch.context() as patch:
            failing_at(patch, "model/config.json" if killed == "before" else "model/model.safetensors")
            with pytest.raises(OSError, match="away"):
                mirror.send()
    else:  # and its files are damaged later
        mirror.send()
        mirror.store.pipe_file(f"{mirror.root}/model/config.json", b"[]")
    other = restored(tmp_path)
    assert by_step(other.checkpoints)
    assert "finished" not in other.read_manifest()
    assert not other.model.exists()


def test_a_checkpoint_appears_only_when_the_records_are_there(tmp_path, run, mirror, monkeypatch):
    run.update_manifest(name=run.name, attempts=3)
    run.metrics.write_text('{"step": 5, "loss": 1.0}\n')
    mirror.send()
    rename = os.rename

    def killed(source, target):
        if str(target).endswith("checkpoint-5"):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            restored(tmp_path)
    other = RunDirectory(tmp_path / "other" / "small")
    assert not by_step(other.checkpoints)
    assert other.read_manifest()["attempts"] == 3
    other.metrics.write_text('{"step": 7, "loss": 1.0}\n')
    restored(tmp_path)
    assert by_step(other.checkpoints)
    assert '"step": 7' in other.metrics.read_text()  # what was trained here goes further


def test_a_step_trained_anew_has_no_seal_until_it_is_whole(run, mirror, monkeypatch):
    mirror.send()
    shutil.rmtree(run.checkpoint(5))
    saved(run, 5)
    failing_at(monkeypatch, "rng-0")
    with pytest.raises(OSError, match="away"):
        mirror.send()
    assert mirror.steps() == []


def test_a_bucket_that_takes_nothing_is_named_before_the_training(tmp_path, run, mirror, monkeypatch):
    monkeypatch.setattr(
        type(mirror.store), "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("AWS Error ACCESS_DENIED"))
    )
    with pytest.raises(RecipeError, match=r"run\.mirror: s3://runs/mine/small cannot be written"):
        restored(tmp_path)


def test_a_bucket_that_is_not_there_is_named_before_the_training(run, s3):
    with pytest.raises(RecipeError, match=r"run\.mirror: s3://nowhere/small cannot be written"):
        Mirror(run, "s3://nowhere").refuse_what_cannot_be_written("run.mirror")


@pytest.mark.parametrize(
    "address", ["s3://", "s3:///folder", "hf://bucket/runs", "runs", "s3://bucket//runs", "gs://bucket/runs//"]
)
def test_a_mirror_is_the_address_of_a_bucket(tmp_path, text_files, chat_files, address):
    recipe = Runner(tmp_path, tmp_path / "cache", text_files, chat_files).recipe("addressed", "gpt2")
    with pytest.raises(RecipeError, match=r"run\.mirror.* must be the address of a store"):
        read_recipe([str(recipe), f"run.mirror={address}"], stage="pretrain")


def test_a_returning_machine_sends_and_drops_nothing_of_its_successors(tmp_path, run, mirror, monkeypatch):
    taking_over(run).send()
    other = restored(tmp_path)
    new = taking_over(other)
    for step in (10, 15):
        saved(other, step)
        new.send()
    saved(run, 7)
    files = mirror.store.find(mirror.root, detail=True)
    for action in (
        mirror.send,
        lambda: mirror._drop_others(7),
        lambda: mirror._send_folder(run.checkpoint(5), run.checkpoint(5)),
    ):
        with pytest.raises(LostOwnership, match=r"a start on .* took the run over at"):
            action()
    assert mirror.store.find(mirror.root, detail=True) == files
    saved(other, 20)
    new.send()
    assert new.steps() == [15, 20]


def test_a_machine_that_stood_still_while_it_sent_seals_nothing(tmp_path, run, mirror, monkeypatch):
    taking_over(run).send()
    saved(run, 10)
    put = Mirror._put

    def _put(self, file, name):
        put(self, file, name)
        if self.run.path == run.path and name.endswith("rng-0"):
            taking_over(restored(tmp_path))

    monkeypatch.setattr(Mirror, "_put", _put)
    with pytest.raises(LostOwnership):
        mirror.send()
    assert mirror.steps() == [5]


def test_an_old_disk_goes_on_from_what_another_machine_sent_meanwhile(tmp_path, run, mirror, capsys):
    taking_over(run).send()
    run.update_manifest(name=run.name, attempts=1)
    run.metrics.write_text('{"step": 5, "loss": 1.0}\n{"step": 6, "loss": 1.0}\n')
    other = restored(tmp_path)
    saved(other, 50)
    other.update_manifest(name=run.name, attempts=2)
    other.metrics.write_text('{"step": 5, "loss": 1.0}\n{"step": 50, "loss": 0.5}\n')
    taking_over(other).send()
    restore(run)
    assert "checkpoint-50 was restored" in capsys.readouterr().out
    assert [folder.name for folder in by_step(run.checkpoints)] == ["checkpoint-5", "checkpoint-50"]
    assert run.metrics.read_text() == other.metrics.read_text()
    assert run.read_manifest()["attempts"] == 2
    again = taking_over(run)
    again.send()
    assert again.steps() == [5, 50]
    assert not again.is_behind()


def test_another_run_of_the_same_name_does_not_overwrite_this_one(tmp_path, run, mirror):
    run.update_manifest(must_match={"train.learning_rate": 1.0})
    other = RunDirectory(tmp_path / "other" / "small")
    saved(other, 50)
    other.update_manifest(must_match={"train.learning_rate": 2.0})
    taking_over(other).send()
    with pytest.raises(
        RecipeError, match=r"small: holds another run of this name.*\n  train.learning_rate: 1.0 -> 2.0"
    ):
        restore(run)
    assert run.read_manifest()["must_match"] == {"train.learning_rate": 1.0}
    assert [folder.name for folder in by_step(run.checkpoints)] == ["checkpoint-5"]


def test_a_run_that_went_back_goes_on_from_there_despite_the_store(run, mirror):
    restore(run)
    taking_over(run).send()
    saved(run, 10)
    mirror.send()
    restore(run, resume=5)
    shutil.rmtree(run.checkpoint(10))  # as open_run sets it aside
    restore(run)  # stopped before its next checkpoint
    assert [folder.name for folder in by_step(run.checkpoints)] == ["checkpoint-5"]
    saved(run, 7)
    taking_over(run).send()
    assert mirror.steps() == [5, 7]
    shutil.rmtree(run.checkpoint(7))
    restore(run)
    assert [folder.name for folder in by_step(run.checkpoints)] == ["checkpoint-5", "checkpoint-7"]


def test_a_disk_from_a_snapshot_goes_on_from_what_was_sent_since(tmp_path, run, mirror):
    restore(run)
    taking_over(run).send()
    run.metrics.write_text('{"step": 5, "loss": 1.0}\n')
    shutil.copytree(run.path, tmp_path / "snapshot" / run.name)
    run.metrics.write_text('{"step": 5, "loss": 1.0}\n{"step": 10, "loss": 1.0}\n')
    for step in (10, 15):
        saved(run, step)
        mirror.send()
    other = RunDirectory(tmp_path / "snapshot" / run.name)
    restore(other)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-5", "checkpoint-15"]
    assert other.metrics.read_text() == run.metrics.read_text()


def test_a_failing_store_ends_a_start_whose_newest_checkpoint_is_damaged(run, mirror, monkeypatch):
    restore(run)
    taking_over(run).send()
    saved(run, 10)
    mirror.send()
    (run.checkpoint(10) / "model.safetensors").write_bytes(b"bad")
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_get", lambda *_: (_ for _ in ()).throw(OSError("SlowDown")))
        with pytest.raises(ServiceError, match="has no whole newest checkpoint here"):
            restore(run)
    restore(run)
    assert problems(run.checkpoint(10)) == []


def test_a_full_disk_is_no_store_that_does_not_answer(tmp_path, run, mirror, monkeypatch):
    mirror.send()
    monkeypatch.setattr(Mirror, "_get", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space left") as error:
        restored(tmp_path)
    assert error.value.errno == errno.ENOSPC


def test_damaged_records_in_the_store_are_not_taken_over_those_here(tmp_path, run, mirror):
    run.update_manifest(must_match={"a": 1})
    run.metrics.write_text('{"step": 5, "loss": 1.0}\n')
    shutil.copytree(run.path, tmp_path / "other" / run.name)
    saved(run, 10)
    mirror.send()
    mirror.store.pipe_file(f"{mirror.root}/{run.manifest.name}", b"{damaged")
    other = restored(tmp_path)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-5", "checkpoint-10"]
    assert other.read_manifest()["must_match"] == {"a": 1}


def test_a_start_that_does_not_take_over_leaves_the_owner_alone(tmp_path, run, mirror, monkeypatch):
    taking_over(run).send()
    other = RunDirectory(tmp_path / "other" / "small")
    saved(other, 3)
    with monkeypatch.context() as patch:
        patch.setattr(type(mirror.store), "cat_file", lambda *_, **__: (_ for _ in ()).throw(OSError("away")))
        restore(other)  # goes on from what is here, and has not seen what lies there
    with pytest.raises(LostOwnership):
        Mirror(other, ADDRESS).send()
    restore(other)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-3", "checkpoint-5"]


def test_an_owner_torn_in_the_store_is_taken_over(run, mirror):
    taking_over(run).send()
    mirror.store.pipe_file(f"{mirror.root}/.owner", b'{"tok')
    saved(run, 10)
    mirror.send()
    assert mirror.steps() == [5, 10]


def test_a_start_that_failed_to_take_over_still_owns_its_folder(run, mirror, monkeypatch):
    taking_over(run).send()
    with monkeypatch.context() as patch:
        patch.setattr(type(mirror.store), "pipe_file", lambda *_, **__: (_ for _ in ()).throw(OSError("away")))
        with pytest.raises(OSError, match="away"):
            Mirror(run, ADDRESS).take_over()
    saved(run, 10)
    again = Mirror(run, ADDRESS)
    again.send()
    assert again.steps() == [5, 10]


def test_the_newest_checkpoint_that_is_damaged_here_comes_from_the_store(run, mirror, capsys):
    saved(run, 10)
    taking_over(run).send()
    good = (run.checkpoint(10) / "rng-0").read_text()
    (run.checkpoint(10) / "rng-0").write_text("0")
    restore(run)
    assert "checkpoint-10 was restored" in capsys.readouterr().out
    assert problems(run.checkpoint(10)) == []
    assert (run.checkpoint(10) / "rng-0").read_text() == good
    assert not run.quarantine.exists()


def test_another_address_gets_what_the_last_one_has(run, mirror, bucket):
    mirror.send()
    elsewhere = Mirror(run, "s3://runs/elsewhere")
    assert elsewhere.is_behind()
    elsewhere.send()
    assert elsewhere.steps() == [5]
    bucket.rm("runs/elsewhere", recursive=True)


def test_the_thread_sends_what_is_saved_until_the_end(run, mirror, monkeypatch):
    monkeypatch.setattr(mirroring, "LOOK_EVERY_S", 0.05)
    uploader = CheckpointUploader(run, ADDRESS)
    finish(run)
    saved(run, 10)
    uploader.flush()
    assert 10 in mirror.steps()
    assert not uploader.mirror.is_behind()
    assert not uploader.thread.is_alive()


def test_an_exception_after_a_signals_end_waits_for_the_store_no_second_time(run, mirror, monkeypatch, capsys):
    sent = threading.Event()
    monkeypatch.setattr(Mirror, "send", lambda _: sent.wait(60))  # a store that takes long
    uploader = CheckpointUploader(run, ADDRESS)
    uploader.flush(0.1)
    uploader.flush(60)
    assert uploader.thread.is_alive()
    assert capsys.readouterr().out.count("does not have what was saved last") == 1
    sent.set()


def test_the_thread_of_a_run_taken_over_says_so_and_ends(tmp_path, run, mirror, monkeypatch, capsys):
    monkeypatch.setattr(mirroring, "LOOK_EVERY_S", 0.05)
    taking_over(run).send()
    taking_over(restored(tmp_path))
    saved(run, 10)
    CheckpointUploader(run, ADDRESS).flush()
    assert re.search("a start on .* took the run over at .*, so this one sends nothing more", capsys.readouterr().out)
    assert mirror.steps() == [5]


def test_a_checkpoint_damaged_in_the_store_is_replaced_by_the_local_one(tmp_path, run, mirror):
    mirror.send()
    mirror.store.pipe_file(f"{mirror.root}/checkpoints/checkpoint-5/model.safetensors", b"half")
    Mirror(run, ADDRESS).send()
    assert problems(restored(tmp_path).checkpoint(5)) == []


def test_a_checkpoint_gone_from_the_server_is_dropped_without_error(run, mirror, monkeypatch):
    for step in (5, 10):
        saved(run, step)
        mirror.send()
    saved(run, 15)
    with monkeypatch.context() as patch:
        for name in ("rm_file", "rm"):
            gone = lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("gone"))  # noqa: E731
            patch.setattr(type(mirror.store), name, gone)
        mirror.send()
    assert not mirror.is_behind()


def test_a_store_that_gives_back_other_bytes_is_named_before_the_training(run, mirror, monkeypatch):
    put = type(mirror.store).pipe_file
    signed = lambda self, path, value, **how: put(self, path, b"22;chunk-signature=0\r\n" + value, **how)  # noqa: E731
    monkeypatch.setattr(type(mirror.store), "pipe_file", signed)
    with pytest.raises(
        RecipeError, match=r"other bytes than it was sent.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    ):
        mirror.refuse_what_cannot_be_written("run.mirror")
    assert not mirror.store.exists(mirror.root) or mirror.store.find(mirror.root) == []


def test_the_check_before_the_training_leaves_nothing_in_the_store(mirror):
    mirror.refuse_what_cannot_be_written("run.mirror")
    assert not mirror.store.exists(mirror.root) or mirror.store.find(mirror.root) == []


class Failing(BaseHTTPRequestHandler):
    status, code = 500, ""

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = f"<Error><Code>{self.code}</Code><Message>why</Message></Error>".encode() if self.code else b""
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_POST = do_HEAD = do_PUT

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("status", "code", "refused"),
    [
        (403, "InvalidAccessKeyId", True),
        (403, "SignatureDoesNotMatch", True),
        (403, "InvalidClientTokenId", True),
        (403, "RequestTimeTooSkewed", True),  # this machine's clock does not right itself
        (403, "AccountProblem", True),
        (403, "", True),
        (401, "Unauthorized", True),
        (400, "ExpiredToken", True),
        (400, "AuthorizationHeaderMalformed", True),  # signed for another region
        (301, "PermanentRedirect", True),
        (404, "NoSuchBucket", True),
        (503, "SlowDown", False),
        (500, "InternalError", False),
        (400, "RequestTimeout", False),
        (307, "TemporaryRedirect", False),
    ],
)
def test_what_a_store_refuses_for_good_ends_the_start(tmp_path, monkeypatch, status, code, refused):
    answers = type("Answers", (Failing,), {"status": status, "code": code})
    failing = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    threading.Thread(target=failing.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{failing.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    network.file_system.cache_clear()
    try:
        mirror = Mirror(RunDirectory(tmp_path / "small"), ADDRESS)
        with pytest.raises(RecipeError, match="cannot be written") if refused else nullcontext():
            mirror.refuse_what_cannot_be_written("run.mirror")
    finally:
        failing.shutdown()
        network.file_system.cache_clear()


@pytest.mark.parametrize("trouble", ["500", "away"])
def test_a_store_in_trouble_loses_nothing_and_the_queue_is_drained_afterwards(
    tmp_path, run, s3, mirror, monkeypatch, trouble
):
    mirror.send()
    saved(run, 10)
    good = os.environ["AWS_ENDPOINT_URL"]
    failing = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=failing.serve_forever, daemon=True).start()
    bad = f"http://127.0.0.1:{failing.server_port if trouble == '500' else 9}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", bad)
    network.file_system.cache_clear()
    broken = Mirror(run, ADDRESS)
    with pytest.raises(OSError, match="runs"):
        broken.send()
    with pytest.raises(ServiceError, match=r"run\.mirror: s3://runs/mine/small does not answer"):
        restored(tmp_path)
    failing.shutdown()
    assert broken.is_behind()
    monkeypatch.setenv("AWS_ENDPOINT_URL", good)
    network.file_system.cache_clear()
    assert mirror.steps() == [5]
    mirror.send()
    assert mirror.steps() == [5, 10]
    assert not mirror.is_behind()


def second_stage(tmp_path, begun=None) -> RunDirectory:
    """A run of a second stage on another, empty disk, which began from `begun`."""
    chat = RunDirectory(tmp_path / "other" / "chat")
    if begun is not None:
        chat.update_manifest(must_match={"model.start_from": begun})
    return chat


@pytest.mark.parametrize(
    ("start", "begun"), [("small", None), ("other/small", None), ("latest:small", "other/small/model")]
)
def test_the_base_of_a_second_stage_comes_from_the_mirror_too(tmp_path, run, mirror, monkeypatch, start, begun):
    monkeypatch.chdir(tmp_path)
    chat = second_stage(tmp_path, begun)
    assert not restore_base(ADDRESS, chat, start=start, where="a.yaml")  # there is no model of it yet
    finish(run)
    mirror.send()
    assert restore_base(ADDRESS, chat, start=start, where="a.yaml")
    base = RunDirectory(tmp_path / "other" / "small")
    assert problems(base.model) == []
    assert "finished" in base.read_manifest()
    assert not restore_base(ADDRESS, chat, start=start, where="a.yaml")  # it is here now


@pytest.mark.parametrize("start", [None, "somebody/small", "elsewhere/models/small", "latest:small"])
def test_other_starts_are_not_looked_for_in_the_mirror(tmp_path, run, mirror, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    finish(run)
    mirror.send()
    assert not restore_base(ADDRESS, second_stage(tmp_path), start=start, where="a.yaml")


# A rank up to the checks before the training; its arguments: the folder behind the stores' interface, and those of a training.
RESOLVED = """
import json, os, sys
from accelerate import PartialState
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pipeline.hardware.device import decide_bf16
from pipeline.process import network
from pipeline.recipe import read_recipe
from pipeline import train as life
from pipeline.run_dir.failures import Signals

def print_resolved(recipe, processes):
    print(json.dumps([processes, recipe.model.start_from, recipe.data.batch_tokens, decide_bf16(recipe.train["bf16"])]), flush=True)
    PartialState().wait_for_everyone()
    os._exit(0)  # as an entry does: gloo's threads can abort the interpreter's own end

network.file_system = lambda scheme: DirFileSystem(path=sys.argv[1], fs=LocalFileSystem(auto_mkdir=True))
life.check_before_training = print_resolved
from pipeline.run_dir.earlier_runs import EarlierRuns
life.train(read_recipe(sys.argv[2:], stage="sft", earlier=EarlierRuns()), Signals())
"""


def test_two_ranks_on_an_empty_disk_take_their_settings_from_the_mirror(tmp_path, monkeypatch):
    store = DirFileSystem(path=str(tmp_path / "store"), fs=LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr(network, "file_system", lambda scheme: store)
    bases = [tmp_path / "runs" / name for name in ("first", "second")]
    for finished, base in enumerate(bases, 1):
        (base / "model").mkdir(parents=True)
        (base / "model" / "config.json").write_text("{}")
        RunDirectory(base).update_manifest(recipe_name="base", finished=float(finished))
    # By one process, from the first base.
    begun = {"model.start_from": str(bases[0] / "model"), "data.batch_tokens": 256}
    bfloat16 = not bfloat16_is_faster()  # not as a new run on this processor would
    run = RunDirectory(tmp_path / "there" / "small")
    shape = {"device": cpu_name(), "dtype": "bfloat16" if bfloat16 else "float32"}
    run.update_manifest(name=run.name, must_match=begun, shape=shape)
    saved(run, 5)
    mirror = Mirror(run, ADDRESS)
    mirror.queue.mkdir()
    mirror.send()
    command = [sys.executable, "-c", RESOLVED, str(tmp_path / "store"), *started_with(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    printed = [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in ranks]
    assert [json.loads(line) for line in printed] == [[2, *begun.values(), bfloat16]] * 2


def started_with(tmp_path):
    """The arguments of a second stage that leaves base, batch and dtype open."""
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        f"run: {{name: small, mirror: '{ADDRESS}', directory: {tmp_path / 'runs'}}}\n"
        "model: {start_from: latest:base}\n"
        "data: {sources: [{files: chats.jsonl, format: messages}], row_tokens: 64}\n"
        "train: {max_steps: 10, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, bf16: auto}\n"
    )
    return [str(recipe), f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"), [("gpt2", {}), ("modern", {"ranks": 2, "sharded": True})], ids=["gpt2", "modern-sharded"]
)
def test_the_same_command_on_an_empty_disk_resumes_bitwise_from_the_mirror(
    tmp_path, text_files, chat_files, s3, model, how
):
    runner = Runner(tmp_path, tmp_path / "cache", text_files, chat_files)
    recipe = runner.recipe("mirrored", model, run={"mirror": "s3://runs/whole"})
    uncut = runner.train(recipe, "run.name=uncut", "run.mirror=null", **how)
    there = Mirror(RunDirectory(runner.folder / "runs" / "cut"), "s3://runs/whole")
    if there.store.exists(there.root):  # of the case before
        there.store.rm(there.root, recursive=True)
    cut = runner.kill(recipe, name="cut", after_step=12, ready=lambda directory: 10 in there.steps(), **how)
    assert len([*cut.glob("checkpoints/checkpoint-10/model*.safetensors")]) == how.get("ranks", 1)
    shutil.rmtree(cut)
    gone_on = runner.train(recipe, "run.name=cut", **how)
    assert "checkpoint-10 was restored from s3://runs/whole/cut" in gone_on.output
    assert "going on from checkpoint-10 (attempt 2)" in gone_on.output
    one, other = (load_file(run.directory / "model" / "model.safetensors") for run in (uncut, gone_on))
    assert all(one[name].equal(other[name]) for name in one)
    assert uncut.values("train/loss") == gone_on.values("train/loss")
    shutil.rmtree(gone_on.directory)
    finished = runner.train(recipe, "run.name=cut")
    assert "the run has finished" in finished.output
    assert problems(finished.directory / "model") == []
