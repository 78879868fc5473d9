"""Our commands in real processes without the seconds of importing: forked from one interpreter that imported.

As a program it reads a command a line as JSON (module, arguments, folder, environment, output) and answers with its status.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
ENTRIES = ("pretrain", "sft", "data.__main__", "preflight.__main__", "tokenizer.__main__", "evals.__main__", "chat.__main__", "hub.__main__", "report.__main__")  # fmt: skip
MODULES = {entry.removesuffix(".__main__"): f"pipeline.{entry}" for entry in ENTRIES}


class WarmCommands:
    """Starts the interpreter, and commands in it."""

    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.warm_commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def run(self, command: list[str], folder: Path, **environment: str) -> tuple[int, str]:
        """Status and output of one command, which finds `y` on its stdin as often as it asks. -9: it did not end."""
        output = folder / ".output.txt"
        asked = {"command": command, "folder": str(folder), "environment": environment, "output": str(output)}
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        status = json.loads(self.server.stdout.readline())
        return status, output.read_text(errors="replace")

    def close(self) -> None:
        self.server.communicate(timeout=30)


def serve() -> None:
    import pipeline.callbacks.default
    import pipeline.preflight.closing
    import pipeline.preflight.preparing
    import pipeline.training.build  # noqa: F401

    for module in MODULES.values():
        importlib.import_module(module)
    for line in sys.stdin:
        child = start(json.loads(line))
        ends = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
            time.sleep(0.01)
        if not ended[0]:
            os.killpg(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(ended[1])), flush=True)


def start(asked: dict) -> int:
    if child := os.fork():
        return child
    os.setpgid(0, 0)
    answers, writing = os.pipe()
    os.write(writing, b"y\n" * 50)
    os.close(writing)
    os.dup2(answers, 0)
    sys.stdin = open(0)  # noqa: SIM115
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(asked["environment"])
    sys.path[:0] = asked["environment"].get("INSTALLED", "").split()  # stands for site-packages
    os.chdir(asked["folder"])
    name, *sys.argv[1:] = asked["command"]
    from huggingface_hub import constants

    from pipeline.artifacts.failures import exit_with_status

    if endpoint := asked["environment"].get("HF_ENDPOINT"):
        constants.ENDPOINT = endpoint
        constants.HF_HUB_OFFLINE = False
        constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    exit_with_status(importlib.import_module(MODULES[name]).main)
    os._exit(99)


if __name__ == "__main__":
    serve()
