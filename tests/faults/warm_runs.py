"""Runs of the real entry in real processes, without the seconds of importing: forked from one interpreter that imported.

As a program it reads a run a line as JSON (arguments, environment, ranks, output) and answers with the status of each rank.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_S = 30.0  # for the other ranks of one that failed, as torchrun gives them


@dataclass
class Ended:
    statuses: list[int]
    output: str


class WarmRuns:
    """Starts the interpreter, and runs in it as `accelerate launch` would start their ranks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.warm_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
        )

    def run(self, *arguments: str, stage: str = "pretrain", ranks: int = 1, **environment: str) -> Ended:
        output = self.folder / "output.txt"
        asked = {"arguments": [stage, *arguments], "environment": environment, "ranks": ranks, "output": str(output)}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        statuses = json.loads(self.server.stdout.readline())
        return Ended(statuses, output.read_text())

    def close(self) -> None:
        self.server.communicate(timeout=30)  # it ends with its input


def serve() -> None:
    # Everything that an entry imports, so that no child has to.
    import pipeline.callbacks.default
    import pipeline.preflight.closing
    import pipeline.preflight.preparing
    import pipeline.report.page
    import pipeline.report.picture
    import pipeline.report.single
    import pipeline.training.build  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        # Of one rank it means that it shares the machine: two threads that wait for each other on a busy one are slow.
        world = {"LOCAL_WORLD_SIZE": "2"}
        if asked["ranks"] > 1:
            world |= {"WORLD_SIZE": str(asked["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [rank_process(rank, asked, world) for rank in range(asked["ranks"])]
        print(json.dumps(statuses(ranks)), flush=True)


def rank_process(rank: int, asked: dict, world: dict[str, str]) -> int:
    """The process id of a fork that is one rank of the run."""
    if child := os.fork():
        return child
    os.setpgid(0, 0)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if rank == 0 else 0))
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(asked["environment"])
    os.environ.update(world)
    if asked["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    stage, *arguments = asked["arguments"]
    sys.argv = [f"{stage}.py", *arguments]

    from pipeline import pretrain, sft
    from pipeline.artifacts.failures import exit_with_status

    exit_with_status({"pretrain": pretrain, "sft": sft}[stage].main)
    os._exit(99)  # never: an entry leaves the process itself


def statuses(ranks: list[int]) -> list[int]:
    """Of every rank, -9 for one that was killed; as a launcher does, what is left after a failure is ended soon."""
    ended: dict[int, int] = {}
    last_chance = float("inf")
    while len(ended) < len(ranks):
        for rank in set(ranks) - set(ended):
            pid, status = os.waitpid(rank, os.WNOHANG)
            if pid:
                ended[rank] = os.waitstatus_to_exitcode(status)
                last_chance = time.monotonic() + GRACE_S if ended[rank] else last_chance
            elif time.monotonic() > last_chance:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.005)
    return [ended[rank] for rank in ranks]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    serve()
