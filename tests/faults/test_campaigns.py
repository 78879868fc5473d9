"""A few trials of each campaign, by the command that makes the figures of docs/reliability.md; the many are made by hand."""

import json
import os
import subprocess
import sys

import pytest

from faults import injector
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(injector.compiler() is None, reason="no C compiler: file faults cannot be injected"),
]

# `python -m faults` for every line of its input, without the seconds of importing, and with the Markdown alone of a run's report.
CAMPAIGNS = """
import gc, json, os, sys
from faults.__main__ import main
from faults.processes import import_everything
from pipeline.run import finish
from pipeline.run_dir import failures
from tests.warm_commands import write_markdown

import_everything()
failures.write_report = finish.write_report = write_markdown
gc.freeze()
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        output, *words = json.loads(line)
        out = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        status = main(words)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, uncut runs and the runs to copy: made once for all campaigns."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def campaigns(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(injector.build(folder))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CAMPAIGNS]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process


@pytest.fixture
def campaign(folder, campaigns):
    """Runs trials of a campaign; gives their rows. A trial that failed fails the command."""

    def run(name: str, *arguments: str) -> list[dict]:
        output = folder / f"{name}.txt"
        campaigns.stdin.write(json.dumps([str(output), name, *arguments, "--folder", str(folder)]) + "\n")
        campaigns.stdin.flush()
        assert campaigns.stdout.readline() == "0\n", output.read_text()
        return rows_of(folder, name)

    return run


def rows_of(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "results" / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_killed_with_all_its_processes_resumes_to_the_same_bits(campaign, folder):
    rows = campaign("kill", "--only", "19")  # inside the second save: two ranks, and the process that writes
    assert [hit["whom"] for row in rows for hit in row["kills"]] == ["everything"]
    assert rows[0]["lost"]
    # The command itself; trials that were made are not made again.
    command = [sys.executable, "-m", "faults", "kill", "--only", "19", "--folder", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert rows_of(folder, "kill") == rows


@pytest.mark.slow  # when a kill falls into a save depends on the machine
def test_a_sharded_run_killed_inside_a_save_resumes_to_the_same_bits(campaign):
    """With all its processes, and the ranks with one of the two that write."""
    rows = campaign("sharded", "--only", "1", "34")
    assert {hit["whom"] for row in rows for hit in row["kills"]} >= {"everything", "ranks and a writer"}
    assert any(hit["writing"] for row in rows for hit in row["kills"] if hit["whom"] == "ranks and a writer")


def test_a_failed_file_call_in_a_save_leaves_a_checkpoint_to_resume(campaign):
    rows = campaign("calls", "--times", "3")
    assert all(row["whole"] for row in rows)
    assert len({row["fault"] for row in rows}) > 1


def test_a_full_disk_is_reported_and_the_run_goes_on_with_room(campaign):
    rows = campaign("disk", "--times", "2")
    assert {row["status"] for row in rows} <= {73, 74}


def test_every_damage_to_a_file_of_a_checkpoint_is_found_and_named(campaign):
    files = ("model.safetensors", "optimizer.safetensors", "position.json", "MANIFEST.json", "modeling_tandem.py")
    files += (
        "model-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    damages = ("missing", "truncated", "empty", "bit", "swapped")
    # One real start is enough: these would be made by the cold command too.
    cold = {
        "model.safetensors-empty",
        "optimizer.safetensors-bit",
        "modeling_tandem.py-bit",
        "modeling_tandem.py-empty",
        "model-00001-of-00002.safetensors-swapped",
        "optimizer-00002-of-00002.safetensors-empty",
    }
    cells = [cell for file in files for damage in damages if (cell := f"{file}-{damage}") not in cold]
    rows = campaign("corruption", "--only", *cells, "new.bin-extra")
    unchanged = [row["trial"] for row in rows if not row["cells"]]
    assert unchanged == [f"{same}-swapped" for same in ("modeling_tandem.py", "model.safetensors.index.json")]
    assert len(rows) == len(cells) + 1
    assert [row["trial"] for row in rows if row["real"]] == ["optimizer.safetensors-truncated"]


def test_a_run_that_lost_all_checkpoints_does_not_silently_begin_again(campaign):
    rows = campaign(
        "lost", "--only", "14", "1", "24"
    )  # strays, damage, folders gone; of the run that was damaged above
    assert [row["lost"] for row in rows] == [False, True, True]


def test_setting_the_clock_back_while_the_run_goes_on_changes_nothing(campaign):
    (row,) = campaign("clock", "--only", "a day back in the run-0")
    assert row["moved_s"] > 80_000
