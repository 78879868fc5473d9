"""The scripts of docs/cluster.md, taken from the page and run until the run has finished: against a stand-in for Slurm, and
against a local server that gives a provider's notice."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline.run_dir.checkpoints import by_step, problems
from pipeline.run_dir.run_directory import RunDirectory
from tests.runner import PACED, Runner, wait_for_step

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
RUN = {"callbacks": ["paced:Paced"]}
TRAIN = {"max_steps": 20, "save_steps": 1000, "eval_steps": 1000, "per_device_train_batch_size": 4}
# Starts the command once for every node and hands SIGTERM on; its status is the highest of the tasks', as srun's is.
SRUN = """#!{python}
import os, signal, subprocess, sys
nodes = range(int(os.environ["SLURM_NNODES"]))
tasks = [subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_NODEID": str(node)}}) for node in nodes]
signal.signal(signal.SIGTERM, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >>"$STAND_IN/requeued" ;;
esac
"""


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    (tmp_path / "paced.py").write_text(PACED)
    return Runner(tmp_path, cache, text_files, chat_files)


def script(heading: str, **changed: str) -> str:
    """The page's script under a heading, with other values for its variables."""
    text = re.search(r"```bash\n(.*?)```", PAGE[PAGE.index(f"## {heading}") :], re.DOTALL)[1]
    for name, value in changed.items():
        text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert count == 1, f"{name} is not set once"
    return text


def environment(**more: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    own = {
        "VIRTUAL_ENV": sys.prefix,
        "NPROC": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "STEP_S": "0.1",
    }
    return environ | own | more


def on_one_core() -> None:
    """Threads that wait for each other on a busy machine make a step of milliseconds one of seconds."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def equal_models(first: Path, second: Path) -> bool:
    one, other = (load_file(path / "model" / "model.safetensors") for path in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Slurm:
    """Plays the scheduler: runs the batch script, signals its shell as --signal=B:TERM@120 asks, notes what is requeued."""

    def __init__(self, folder: Path, *, nodes: int):
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environ = environment(
            PATH=f"{programs}:{os.environ['PATH']}",
            STAND_IN=str(folder),
            SLURM_JOB_ID="7",
            SLURM_NNODES=str(nodes),
            SLURM_JOB_NODELIST=f"node[1-{nodes}]",
            MASTER_PORT=str(free_port()),
        )

    def run(self, recipe: Path, *, until: int | None) -> tuple[int, str]:
        """The job's status and output; until: the step at which its time is nearly up."""
        job = subprocess.Popen(
            ["bash", "-c", script("Slurm", recipe=str(recipe))],
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=on_one_core,
        )
        if until is not None:
            wait_for_step(self.folder / "runs" / recipe.stem, until, job)
            job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=120)
        return job.returncode, output

    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, cache, text_files, chat_files) -> Path:
    """The run that the cut ones of one process end like."""
    folder = tmp_path_factory.mktemp("uncut")
    recipe = Runner(folder, cache, text_files, chat_files).recipe("uncut", "gpt2", train=TRAIN)
    command = ["bash", "run_pretrain.sh", str(recipe)]
    subprocess.run(command, cwd=ROOT, env=environment(), preexec_fn=on_one_core, check=True, capture_output=True)
    return folder / "runs" / "uncut"


@pytest.mark.parametrize(("nodes", "cuts"), [(1, [5]), pytest.param(2, [5, 12], marks=pytest.mark.slow)])
def test_the_slurm_script_is_requeued_until_the_run_has_finished(runner, request, nodes, cuts):
    recipe, slurm = runner.recipe("slurm", "gpt2", run=RUN, train=TRAIN), Slurm(runner.folder, nodes=nodes)
    directory = runner.folder / "runs" / "slurm"
    batch = script("Slurm")
    assert re.findall(r"^#SBATCH --signal=(\S+)$", batch, re.MULTILINE) == ["B:TERM@120"]
    assert "#SBATCH --requeue\n" in batch
    for attempt, until in enumerate(cuts, start=1):
        status, output = slurm.run(recipe, until=until)
        assert status == 75, output[-4000:]
        assert slurm.requeued() == ["7"] * attempt
        newest = by_step(directory / "checkpoints")[-1]
        assert problems(newest) == []
        assert len(list(newest.glob("rng-*"))) == nodes
        assert f"{newest.name} is whole" in output
    status, output = slurm.run(recipe, until=None)
    assert status == 0, output[-4000:]
    assert bool(
        re.search(
            r"^starting 1 process on each machine on .*\(accelerate_configs/multi_node.yaml\)$", output, re.MULTILINE
        )
    ) == (nodes > 1)
    assert slurm.requeued() == ["7"] * len(cuts)
    if nodes == 1:
        whole = request.getfixturevalue("uncut")
    else:
        other = shutil.copy(recipe, runner.folder / "uncut.yaml")
        other.write_text(other.read_text().replace("name: slurm", "name: uncut"))
        assert slurm.run(other, until=None)[0] == 0
        whole = runner.folder / "runs" / "uncut"
    assert equal_models(directory, whole)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Provider(BaseHTTPRequestHandler):
    """A machine's own address: no notice is status 404, and nothing is told without a token."""

    taken = threading.Event()
    asked: list[str]

    def do_PUT(self):
        self.answer(200, b"a-token")

    def do_GET(self):
        assert self.path == "/latest/meta-data/spot/instance-action"
        allowed = self.headers["X-aws-ec2-metadata-token"] == "a-token"
        self.answer(200 if allowed and self.taken.is_set() else 404 if allowed else 401, b"{}")

    def answer(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def provider():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Provider.taken.clear()
    yield f"http://127.0.0.1:{server.server_port}/latest"
    server.shutdown()


def test_the_spot_loop_stops_at_the_notice_and_restarts_until_finished(runner, provider, uncut):
    recipe = runner.recipe("spot", "gpt2", run=RUN, train=TRAIN)
    directory = runner.folder / "runs" / "spot"
    loop = script("Spot", recipe=str(recipe), metadata=provider).replace("sleep 5", "sleep 0.2")
    process = subprocess.Popen(
        ["bash", "-c", loop],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=on_one_core,
    )
    wait_for_step(directory, 5, process)
    Provider.taken.set()
    ends = time.monotonic() + 60
    while not by_step(directory / "checkpoints"):
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)
    Provider.taken.clear()  # another machine
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-4000:]
    stops = re.findall(r"SIGTERM at step (\d+); checkpoint-\1 is whole", output)
    assert len(stops) == 1
    assert f"going on from checkpoint-{stops[0]}" in output
    assert equal_models(directory, uncut)


def of_two_hosts(heading: str) -> str:
    """The command that a file of the page gives to every host."""
    text = re.search(r"```yaml\n(.*?)```", PAGE[PAGE.index(f"## {heading}") :], re.DOTALL)[1]
    if heading == "SkyPilot":
        return yaml.safe_load(text)["run"]
    _, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    assert {"name": "NNODES", "value": str(job["spec"]["completions"])} in container["env"]
    return container["args"][0].replace("tandem-0.tandem", "127.0.0.1")  # the name that the service gives to index 0


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["Kubernetes", "SkyPilot"])
def test_the_command_for_every_host_makes_one_run_of_two(runner, heading):
    recipe = runner.recipe("pods", "gpt2", train=TRAIN)
    port, hosts = str(free_port()), []
    for index in range(2):
        given = {"JOB_COMPLETION_INDEX": str(index), "NNODES": "2", "SKYPILOT_NUM_NODES": "2"}
        given |= {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "RECIPE": str(recipe)}
        hosts.append(
            subprocess.Popen(
                ["bash", "-c", of_two_hosts(heading)],
                cwd=ROOT,
                env=environment(MASTER_PORT=port, **given),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(outputs)[-4000:]
    manifest = RunDirectory(runner.folder / "runs" / "pods").read_manifest()
    assert (manifest["status"], manifest["world_size"]) == ("finished", 2)
