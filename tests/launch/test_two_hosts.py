"""One job on two hosts: network namespaces of this machine with names, links and mounts of their own, so only for root on Linux."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.run_dir.checkpoints import by_step
from pipeline.run_dir.rows import read_rows
from tests.faults.test_cluster_page import environment
from tests.runner import Runner, wait_for_step

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        # root alone is not enough: containers take CAP_NET_ADMIN from it
        not shutil.which("ip")
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "-n", "-m", "-u", "true"]).returncode != 0,
        reason="network namespaces need Linux and root with CAP_NET_ADMIN",
    ),
]
LONG = {"max_steps": 100_000, "save_steps": 10, "eval_steps": 100_000, "per_device_train_batch_size": 4}


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Host:
    def __init__(self, number: int, folder: Path):
        self.number, self.name, self.log = number, f"host{number}", folder / f"host{number}.log"
        self.mounts = "true"
        self.namespace = f"tandem-{os.getpid()}-{number}"
        ip("netns", "add", self.namespace)

    def join(self, link: str) -> None:
        ip("link", "set", link, "netns", self.namespace, "name", "eth")
        for command in (["addr", "add", f"10.79.0.{self.number + 1}/24", "dev", "eth"], ["link", "set", "eth", "up"]):
            ip("-n", self.namespace, *command)
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def start(self, recipe: Path, *overrides: str, processes: int = 1, **variables: str) -> None:
        own = {
            "NPROC": str(processes),
            "NNODES": "2",
            "NODE_RANK": str(self.number),
            "MASTER_ADDR": "10.79.0.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth",
        }
        hosts = self.log.with_suffix(".hosts")
        hosts.write_text("127.0.0.1 localhost\n10.79.0.1 host0\n10.79.0.2 host1\n")
        inside = (
            f'hostname {self.name}; mount --bind {hosts} /etc/hosts; {self.mounts}; exec bash run_pretrain.sh "$@"'
        )
        command = ["ip", "netns", "exec", self.namespace, "unshare", "-m", "-u", "bash", "-c", inside, "-"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, str(recipe), *overrides],
                cwd=ROOT,
                env=environment(**own | variables),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        for pid in ip("netns", "pids", self.namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self) -> None:
        ip("-n", self.namespace, "link", "set", "eth", "down")

    def end(self) -> tuple[int, str]:
        """Its status and its last lines."""
        status = self.process.wait(timeout=200)
        return status, self.log.read_text()[-3000:]


@pytest.fixture
def hosts(tmp_path):
    pair = [Host(number, tmp_path) for number in range(2)]
    ip("link", "add", "tandem0", "type", "veth", "peer", "name", "tandem1")
    for host in pair:
        host.join(f"tandem{host.number}")
    yield pair
    for host in pair:
        host.kill()
        ip("netns", "del", host.namespace)


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    return Runner(tmp_path, cache, text_files, chat_files)


def test_another_learning_rate_on_one_host_is_refused_on_both(runner, hosts):
    recipe = runner.recipe("differ", "gpt2")
    hosts[0].start(recipe)
    hosts[1].start(recipe, "optimizer.groups.matrices.learning_rate=0.2")
    for host in hosts:
        status, output = host.end()
        assert status == 64, output
        assert "optimizer.groups.matrices.learning_rate: 0.003 on host0 (rank 0); 0.2 on host1 (rank 1)" in output


def test_the_other_host_ends_when_one_is_killed(runner, hosts):
    recipe = runner.recipe("lost", "gpt2", train=LONG)
    for host in hosts:
        host.start(recipe)
    run = runner.folder / "runs" / "lost"
    wait_for_step(run, 12, hosts[0].process)
    hosts[1].kill()
    status, output = hosts[0].end()
    assert status in (1, 70), output
    assert by_step(run / "checkpoints")


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in read_rows(run / "metrics.jsonl") if "train/loss" in row]


def test_hosts_of_one_and_of_two_processes_train_together(runner, hosts):
    train = {"max_steps": 6, "per_device_train_batch_size": 4}
    recipe, alone = (runner.recipe(name, "gpt2", train=train) for name in ("unequal", "alone"))
    hosts[1].start(recipe, processes=2)
    hosts[0].start(recipe)
    for host in hosts:
        status, output = host.end()
        assert status == 0, output
    hosts[0].start(alone, NNODES="1")
    status, output = hosts[0].end()
    assert status == 0, output
    runs = runner.folder / "runs"
    assert len(losses(runs / "unequal")) == 6
    assert losses(runs / "unequal") == pytest.approx(losses(runs / "alone"), rel=1e-5)


# Each host's flock is its own, and the second one's clock is an hour ahead.
OTHER_HOST = """
import fcntl, time
now = time.time
fcntl.flock = lambda *_: None
time.time = lambda: now() + 3600
"""


def test_a_job_works_where_each_host_has_its_own_locks_and_clock(runner, hosts, tmp_path):
    recipe = runner.recipe("shared", "gpt2", train=LONG)
    (tmp_path / "sitecustomize.py").write_text(OTHER_HOST)
    (tmp_path / "boot_id").write_text("another kernel")
    hosts[0].start(recipe)
    hosts[1].mounts = f"mount --bind {tmp_path / 'boot_id'} /proc/sys/kernel/random/boot_id"
    hosts[1].start(recipe, PYTHONPATH=str(tmp_path))
    run = runner.folder / "runs" / "shared"
    wait_for_step(run, 1, hosts[0].process)
    job = [host.process for host in hosts]
    for process in job:
        process.terminate()
    assert [process.wait(timeout=60) for process in job] == [75, 75]
