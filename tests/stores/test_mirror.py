"""run.mirror: what a run saves follows it to a store and comes back whole, whatever the store does meanwhile."""

import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from pipeline.process import stores
from pipeline.process.errors import ServiceError
from pipeline.run.mirror import Mirror, restore_from_mirror
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, whole_folder
from pipeline.run_dir.run_directory import RunDirectory
from tests.runner import Runner

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
    for step in mirror.steps():
        mirror.store.rm(f"{mirror.root}/checkpoints/checkpoint-{step}", recursive=True)
    return mirror


def restored(tmp_path, name="small"):
    """The run as it comes back to another, empty disk."""
    recipe = SimpleNamespace(
        run=SimpleNamespace(mirror=ADDRESS, resume="auto"), where=lambda key: f"recipe.yaml: {key}"
    )
    other = RunDirectory(tmp_path / "other" / name)
    restore_from_mirror(recipe, other)
    return other


def test_the_newest_checkpoints_are_sent_seal_last_and_come_back_with_every_byte(tmp_path, run, mirror, monkeypatch):
    names, put = [], Mirror._put
    monkeypatch.setattr(Mirror, "_put", lambda self, file, name: names.append(name) or put(self, file, name))
    for step in (5, 10, 15):
        saved(run, step)
        assert mirror.is_behind()
        mirror.send()
        assert not mirror.is_behind()
        assert names[-1] == f"checkpoints/checkpoint-{step}/{SEAL}"
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


def test_a_run_that_went_back_leaves_nothing_of_its_later_steps_in_the_mirror(run, mirror):
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
    assert mirror.is_behind()
    mirror.send()
    other = restored(tmp_path)
    assert other.read_manifest()["finished"] == 1.0
    assert (other.model / "model.safetensors").read_bytes() == b"trained"
    assert problems(other.model) == []


def test_a_damaged_checkpoint_of_the_mirror_is_named_and_the_one_before_it_comes_back(
    tmp_path, run, mirror, bucket, capsys
):
    mirror.send()
    saved(run, 10)
    mirror.send()
    bucket.put_object(Bucket="runs", Key="mine/small/checkpoints/checkpoint-10/rng-0", Body=b"11")
    other = restored(tmp_path)
    assert [folder.name for folder in by_step(other.checkpoints)] == ["checkpoint-5"]
    assert "checkpoint-10: is damaged (rng-0 has other content than was written)" in capsys.readouterr().out


class Failing(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_HEAD = do_PUT

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("trouble", ["500", "away"])
def test_a_store_in_trouble_loses_nothing_and_the_queue_is_drained_afterwards(
    tmp_path, run, mirror, monkeypatch, trouble
):
    mirror.send()
    saved(run, 10)
    good = os.environ["AWS_ENDPOINT_URL"]
    failing = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=failing.serve_forever, daemon=True).start()
    bad = f"http://127.0.0.1:{failing.server_port if trouble == '500' else 9}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", bad)
    stores.file_system.cache_clear()
    broken = Mirror(run, ADDRESS)
    with pytest.raises(OSError, match="runs"):
        broken.send()
    with pytest.raises(ServiceError, match=r"run\.mirror: s3://runs/mine/small does not answer"):
        restored(tmp_path)
    failing.shutdown()
    assert broken.is_behind()
    monkeypatch.setenv("AWS_ENDPOINT_URL", good)
    stores.file_system.cache_clear()
    assert mirror.steps() == [5]
    mirror.send()
    assert mirror.steps() == [5, 10]
    assert not mirror.is_behind()


@pytest.mark.slow
def test_the_same_command_on_an_empty_disk_goes_on_from_the_mirror_bitwise(tmp_path, text_files, chat_files, bucket):
    runner = Runner(tmp_path, tmp_path / "cache", text_files, chat_files)
    recipe = runner.recipe("mirrored", "gpt2", run={"mirror": "s3://runs/whole"})
    uncut = runner.train(recipe, "run.name=uncut", "run.mirror=null")
    there = Mirror(RunDirectory(runner.folder / "runs" / "cut"), "s3://runs/whole")
    cut = runner.kill(recipe, name="cut", after_step=12, ready=lambda directory: 10 in there.steps())
    shutil.rmtree(cut)
    gone_on = runner.train(recipe, "run.name=cut")
    assert "checkpoint-10 was restored from s3://runs/whole/cut" in gone_on.output
    assert "going on from checkpoint-10 (attempt 2)" in gone_on.output
    one, other = (load_file(run.directory / "model" / "model.safetensors") for run in (uncut, gone_on))
    assert all(one[name].equal(other[name]) for name in one)
    assert uncut.values("train/loss") == gone_on.values("train/loss")
    shutil.rmtree(gone_on.directory)
    finished = runner.train(recipe, "run.name=cut")
    assert "the run has finished" in finished.output
    assert problems(finished.directory / "model") == []
