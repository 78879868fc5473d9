"""Hub and W&B misbehave: training does not notice, nothing is lost, and what is left is listed and finished later."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from faults.services import (
    FAULTS,
    HF_TOKEN,
    NO_SUCH_HOST,
    TEN_STEPS,
    WANDB_API_KEY,
    differences,
    environment,
    lasting,
    push,
)
from pipeline.process.storage import read_json, write_json, write_text
from pipeline.run_dir.checkpoints import by_step, problems, whole_folder
from pipeline.run_dir.hub_queue import HubQueue, Publishing
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.hub.hub_stand_in import Fault, hub_stand_in
from tests.runner import ROOT, WarmRunner

pytestmark = pytest.mark.full

REPO = "somebody/quick"
# The publisher as a run starts it, with shorter waits. Its parent plays the trainer.
TRAINER = """
import os, subprocess, sys, time
code = '''
import os, pipeline.process.network as c, pipeline.hub.publisher as p, pipeline.hub.client as r
r.FIRST_WAIT_S, r.ATTEMPTS, p.FIRST_PAUSE_S, p.LOOK_EVERY_S, c.SILENCE_S = 0.05, 2, 0.1, 0.1, 0.5
from pipeline.run_dir.run_directory import RunDirectory
os.makedirs(%r + "/hub_queue", exist_ok=True)
log = open(%r + "/hub_queue/publisher.log", "ab")
os.dup2(log.fileno(), 1)
p.publish_checkpoints(RunDirectory(%r), trainer=%d)
''' % (sys.argv[1], sys.argv[1], sys.argv[1], os.getpid())
subprocess.Popen([sys.executable, "-c", code], start_new_session=True).wait()
"""


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "quick")
    write_text(directory.recipe, json.dumps({"hub": {"id": REPO, "private": True, "strategy": "checkpoint", "wait_at_end_s": 5}}))  # fmt: skip
    directory.update_manifest(name="quick", stage="pretrain", status="running")
    return directory


def save_checkpoint(run, step):
    """What a save leaves, as the publisher sees it: a model and the state of the training."""
    with whole_folder(run.checkpoint(step), step=step, run=run.name) as folder:
        write_json(folder / "config.json", {"model_type": "gpt2"})
        (folder / "model.safetensors").write_bytes(b"weights of step %d" % step * 10_000)
        for name in ("optimizer.safetensors", "scheduler.json", "trainer_state.json", "rng-0.safetensors", "position.json"):  # fmt: skip
            (folder / name).write_bytes(b"state")


@contextmanager
def training(run, hub_url, tmp_path):
    """A process that plays the trainer while the block runs, with a publisher beside it; then it is killed."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run.path)],
        env={**os.environ, **environment(hub_url, tmp_path / "hf"), "PYTHONPATH": str(ROOT)},
    )
    try:
        yield trainer
        assert trainer.poll() is None, "the publisher ended"
    finally:
        trainer.kill()
        trainer.wait()


def wait_for(condition, *, seconds=60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


def published_steps(run):
    return [row["step"] for row in read_rows(HubQueue(run).published)]


def failures(run):
    log = HubQueue(run).log
    return log.read_text() if log.exists() else ""


def test_the_publisher_survives_every_service_fault_and_publishes_each_checkpoint_once(run, tmp_path):
    names = [name for name in FAULTS if name != "no such host"]  # the name of a running process's Hub does not change
    with hub_stand_in() as hub:
        with training(run, hub.url, tmp_path):
            for step, name in enumerate(names, 1):
                seen = len(failures(run))
                with lasting(hub, name):
                    if name == "slow":
                        hub.fault = Fault(delay_s=1.0)
                    elif name == "upload cut":
                        hub.fault = replace(FAULTS[name], times=2)  # the client itself sends it again
                    save_checkpoint(run, step)
                    if name == "upload cut":
                        wait_for(lambda: hub.fault is None)
                    else:
                        wait_for(lambda seen=seen: "was not published" in failures(run)[seen:])
                        assert name != "HTML with status 200" or "a web page came" in failures(run)[seen:]
                wait_for(lambda step=step: step in published_steps(run))
        assert published_steps(run) == list(range(1, len(names) + 1))
        commits = [files for _, files in hub.repos[REPO].commits[1:]]
        weights = [b"weights of step %d" % step * 10_000 for step in range(1, len(names) + 1)]
        assert [files["model.safetensors"] for files in commits] == weights
        assert not [name for name in commits[-1] if name.startswith(("optimizer", "rng", "scheduler", "position", "trainer"))]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be kept on one core here")
def test_a_publisher_sharing_its_core_with_busy_processes_still_makes_progress(run, tmp_path):
    """Its quarter of a second of work took 75 s at the lowest priority. Counted in the others' time: whoever else is busy takes of both."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]

    def published():
        assert sum(psutil.Process(process.pid).cpu_times().user for process in busy) < 25.0
        return published_steps(run) == [5]

    try:
        with hub_stand_in() as hub, training(run, hub.url, tmp_path) as trainer:
            os.sched_setaffinity(trainer.pid, {core})
            save_checkpoint(run, 5)
            wait_for(published, seconds=300)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_queued_checkpoint_outlives_rotation_and_gives_way_to_a_newer_one(run):
    queue = HubQueue(run)
    save_checkpoint(run, 5)
    item = queue.checkpoint()
    assert item == queue.checkpoint()
    shutil.rmtree(run.checkpoint(5))
    assert problems(item.folder) == []
    save_checkpoint(run, 10)
    item = queue.checkpoint()
    assert (item.name, [folder.name for folder in by_step(queue.path)]) == ("checkpoint-10", ["checkpoint-10"])
    queue.done(item, repo_id=REPO)
    assert by_step(queue.path) == []
    assert queue.is_published(item, REPO)
    assert not queue.is_published(item, "somebody/else")


def test_checkpoint_files_that_only_training_reads_stay_out_of_the_queue(run):
    from pipeline.run_dir.hub_queue import is_training_state
    from pipeline.training import checkpoint

    names = [checkpoint.OPTIMIZER, checkpoint.SCHEDULER, checkpoint.POSITION, checkpoint.rng_file(3), "trainer_state.json"]  # fmt: skip
    assert [name for name in names if not is_training_state(name)] == []


def test_two_publishers_are_kept_apart(run, tmp_path):
    save_checkpoint(run, 5)
    queue = HubQueue(run)
    with hub_stand_in() as hub:
        with queue.hold() as held:
            assert held
            done = push(run.path, hub.url, tmp_path / "hf")
        assert done.returncode == 73, done.stderr
        assert hub.calls == []


def test_a_hub_that_falls_silent_after_making_the_repository_is_retried(run, tmp_path):
    save_checkpoint(run, 5)
    with hub_stand_in() as hub:
        hub.fault = Fault(to="GET /api/models", delay_s=100.0)
        with training(run, hub.url, tmp_path):
            wait_for(lambda: f"reading {REPO}: the Hub did not answer well" in failures(run))
            hub.fault = None
            wait_for(lambda: published_steps(run) == [5])


def test_an_answer_that_repeats_the_token_leaves_none_in_the_queue(run, tmp_path):
    save_checkpoint(run, 5)
    queue = HubQueue(run)
    with hub_stand_in() as hub:
        hub.fault = Fault(status=403, echo=True)
        with training(run, hub.url, tmp_path):
            wait_for(lambda: "refused: Bearer [secret]" in failures(run))
    assert not [p for p in queue.path.rglob("*") if p.is_file() and HF_TOKEN.encode() in p.read_bytes()]


def test_a_checkpoint_that_cannot_be_queued_does_not_stop_later_publishing(run, tmp_path):
    save_checkpoint(run, 5)
    (run.checkpoint(5) / "MANIFEST.json").write_text('{"step": 5, ')
    with hub_stand_in() as hub, training(run, hub.url, tmp_path) as trainer:
        time.sleep(2.0)
        assert trainer.poll() is None
        save_checkpoint(run, 10)
        wait_for(lambda: published_steps(run) == [10])


def test_a_start_from_an_earlier_checkpoint_drops_what_waits_from_beyond_it(run):
    queue = HubQueue(run)
    hub = SimpleNamespace(id=REPO, strategy="end")
    save_checkpoint(run, 20)
    item = queue.checkpoint()
    Publishing(hub, run, start_step=20)
    assert item.folder.exists()
    Publishing(hub, run, start_step=10)
    assert not item.folder.exists()


def test_a_damaged_checkpoint_is_not_published(run, tmp_path):
    save_checkpoint(run, 5)
    queue = HubQueue(run)
    (queue.checkpoint().folder / "model.safetensors").unlink()
    with hub_stand_in() as hub, training(run, hub.url, tmp_path):
        wait_for(lambda: "was not published" in failures(run))
        assert published_steps(run) == []


def test_a_hub_that_asks_for_an_hour_is_left_alone_that_long(run, tmp_path):
    save_checkpoint(run, 5)
    with hub_stand_in() as hub:
        hub.fault = Fault(status=503, retry_after=3600)
        with training(run, hub.url, tmp_path):
            wait_for(lambda: "was not published" in failures(run))
            asked = len(hub.calls)
            save_checkpoint(run, 10)
            time.sleep(1.5)
            assert len(hub.calls) == asked


def test_a_run_without_its_hub_ends_well_and_a_push_publishes_it(tmp_path, cache, text_files, warm):
    runner = WarmRunner(tmp_path, cache, text_files, [], warm)
    recipe = runner.recipe(
        "quick", "gpt2", train=TEN_STEPS, hub={"id": REPO, "strategy": "checkpoint", "wait_at_end_s": 2.0}
    )
    train = runner.train(recipe, "run.resume=never", **environment(NO_SUCH_HOST, tmp_path / "hf"))
    assert "unpublished: model of step 10" in train.output
    # The run names its Python as seen from its own folder.
    assert re.search(rf"Finish with: \S+ -m pipeline\.hub push {re.escape(str(train.directory))}", train.output)
    assert "finished" in read_json(train.directory / "run_manifest.json")
    with hub_stand_in() as hub:
        done = push(train.directory, hub.url, tmp_path / "hf")
        assert done.returncode == 0, done.stderr
        assert differences(train.directory, hub, REPO) == []
        assert len(hub.repos[REPO].commits) == 2
    assert by_step(train.directory / "hub_queue") == []


# One process for each kind of server, forked where transformers is imported already; most of the time is waiting.
WANDB = """
import glob, json, os, sys, time
import psutil
import pipeline.callbacks.trackers as w
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.process.secrets import redact_output
from types import SimpleNamespace

def wait_until_it_has_begun(folder):
    deadline = time.monotonic() + 120
    while not glob.glob(f"{folder}/wandb/offline-run-*/files/requirements.txt"):
        assert time.monotonic() < deadline, "W&B has not begun"
        time.sleep(0.05)
    time.sleep(0.5)

def follow(kind, url, folder):
    os.environ |= {"WANDB_BASE_URL": url, "WANDB_MODE": "offline" if kind in ("killed", "talkative") else "online"}
    redact_output()
    w.INIT_S, w.FINISH_S = 2, 40.0
    tracker = w.WandbRun(RunDirectory(folder), project="p", config={}, note=None, tags=[], attempt=1, tokens_at=lambda step: 512 * step)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=10)
    tracker.on_train_begin(None, state, None)
    for state.global_step in range(1, 11):
        tracker.on_log(None, state, None, logs={"train/loss": 1.0})
        if kind == "killed" and state.global_step == 5:
            wait_until_it_has_begun(folder)
            for process in psutil.Process().children(recursive=True):
                process.kill()
            time.sleep(0.5)
    if kind == "talkative":
        wait_until_it_has_begun(folder)
        print("the console says", os.environ["WANDB_API_KEY"], flush=True)
    tracker.on_train_end(None, state, None)
    print("status 0", flush=True)

for kind, url in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.makedirs(kind)
        output = os.open(f"{kind}/output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        follow(kind, url, kind)
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory):
    """For each kind of server a folder with the tracker's files and its output."""
    folder = tmp_path_factory.mktemp("wandb")
    nobody = "http://127.0.0.1:9"
    with hub_stand_in() as silent, hub_stand_in() as broken, hub_stand_in() as page:
        silent.fault, broken.fault, page.fault = Fault(delay_s=100.0), Fault(status=500), Fault(html=True)
        urls = {
            "refused": nobody,
            "silent": silent.url,
            "500": broken.url,
            "html": page.url,
            "killed": nobody,
            "talkative": nobody,
        }
        variables = environment(nobody, folder / "hf", PYTHONPATH=str(ROOT))
        command = [sys.executable, "-c", WANDB, json.dumps(urls)]
        # A session of its own: the trackers are forked, and would outlive the parent that a timeout kills.
        trackers = subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, start_new_session=True)
        try:
            assert trackers.wait(timeout=200) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(trackers.pid, signal.SIGKILL)
            trackers.wait()
    return folder


@pytest.mark.parametrize("kind", ["refused", "silent", "500", "html"])
def test_a_bad_wandb_server_is_reported_once_and_the_run_stays_offline(wandb_folder, kind):
    output = (wandb_folder / kind / "output").read_text()
    assert output.endswith("status 0\n"), output
    assert output.count("W&B could not start") == 1
    assert "W&B stopped" not in output
    (kept,) = (wandb_folder / kind / "wandb").glob("offline-run-*")
    assert (kept / f"run-{kept.name.rsplit('-', 1)[1]}.wandb").stat().st_size > 1000


def test_a_wandb_service_that_dies_is_reported_once_and_training_goes_on(wandb_folder):
    output = (wandb_folder / "killed" / "output").read_text()
    assert output.endswith("status 0\n"), output
    assert output.count("W&B stopped taking numbers") == 1, output
    assert "W&B could not start" not in output


def test_what_wandb_keeps_of_the_console_holds_no_secret(wandb_folder):
    (kept,) = (wandb_folder / "talkative" / "wandb").glob("offline-run-*")
    assert "the console says [secret]" in (kept / "files" / "output.log").read_text()
    assert not [p for p in kept.rglob("*") if p.is_file() and WANDB_API_KEY.encode() in p.read_bytes()]
