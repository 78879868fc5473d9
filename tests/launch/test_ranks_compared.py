"""Ranks that would train different runs are refused before step 1: real gloo ranks, each with its own command line and packages."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.run import start_process
from tests.runner import Runner
from tests.warm_commands import free_port

ROOT = Path(__file__).parents[2]
# The cases one after the other in one process group: each is what a rank is started with, and the version that it has of torch.
RANK = """
import importlib.metadata, json, os, sys
from accelerate import PartialState
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.run import start_process as start

rank, recipe = int(os.environ["RANK"]), sys.argv[1]
installed = importlib.metadata.version
for case in json.loads(sys.argv[2]):
    arguments, torch_version = case[rank]
    importlib.metadata.version = lambda name: torch_version if torch_version and name == "torch" else installed(name)
    try:
        start.start_process(read_recipe([recipe, *arguments], stage="pretrain"))
        print("trains", flush=True)
    except RecipeError as error:
        assert error.status == 64 and error.of_all_ranks
        print(json.dumps(str(error)), flush=True)
PartialState().wait_for_everyone()
os._exit(0)  # as an entry does: gloo's threads can abort the interpreter's own end
"""


def run_ranks(folder: Path, recipe: Path, cases: list) -> list[list[str]]:
    """Return each rank's outcome of every case."""
    (folder / "rank.py").write_text(RANK)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    ranks = [
        subprocess.Popen(
            [sys.executable, folder / "rank.py", recipe, json.dumps(cases)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            printed.append([line if line == "trains" else json.loads(line) for line in output.splitlines()])
    finally:
        for rank in ranks:
            rank.kill()
    return printed


@pytest.fixture
def recipe(tmp_path, cache, text_files, chat_files) -> Path:
    return Runner(tmp_path, cache, text_files, chat_files).recipe("compared", "gpt2")


def test_ranks_that_differ_are_refused_with_the_differences_by_host(tmp_path, recipe):
    rate, saves, versions = (
        [
            [["optimizer.groups.matrices.learning_rate=0.01"], None],
            [["optimizer.groups.matrices.learning_rate=0.2"], None],
        ],
        [[[], None], [["train.save_steps=7"], None]],
        [[[], None], [[], "2.0.1"]],
    )
    outcomes = run_ranks(tmp_path, recipe, [rate, saves, versions, [[[], None], [[], None]]])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][3] == "trains"
    host = os.uname().nodename
    for text, line in zip(
        outcomes[0],
        [
            f"optimizer.groups.matrices.learning_rate: 0.01 on {host} (rank 0); 0.2 on {host} (rank 1)",
            f"train.save_steps: 5 on {host} (rank 0); 7 on {host} (rank 1)",
            f"torch: '{version('torch')}' on {host} (rank 0); '2.0.1' on {host} (rank 1)",
        ],
        strict=False,
    ):
        first, *lines, last = text.split("\n")
        assert first.startswith("command line: the processes of this run differ")
        assert lines == [f"  {line}"]
        assert last.startswith("Start the same command on every host")


def test_an_editors_lock_among_the_code_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(start_process, "__file__", str(tmp_path / "run" / "start_process.py"))
    without = start_process._software()
    (tmp_path / ".#module.py").symlink_to("user@host.1234")  # Emacs' link to nowhere
    assert start_process._software() == without
