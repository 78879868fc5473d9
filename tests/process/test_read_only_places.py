"""A finished run and a prepared cache on a disk, or of another user, where this one may only read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.report.test_report import write_run

MOUNTED = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
RECORD = """
import argparse, sys
from pipeline.evals.__main__ import EvalsCommand
from pipeline.evals.subject import Subject
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.run_directory import RunDirectory


def main(argv):
    command = EvalsCommand.__new__(EvalsCommand)
    command.subject, command.arguments = Subject(path="model", run=RunDirectory(argv[0])), argparse.Namespace(output=None)
    command.record({"subject": "model/", "step": 40, "results": []})


exit_with_status(main)
"""


def run_python(*arguments: str | Path, read_only: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    writable = os.access("/", os.W_OK)  # root may write whatever the modes say
    if read_only and writable:
        command = ["unshare", "-m", "bash", "-c", MOUNTED, "_", str(read_only), *command]
    elif read_only:
        folders = [read_only, *(path for path in read_only.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    finally:
        if read_only and not writable:
            for folder in folders:
                folder.chmod(0o755)


@pytest.fixture(autouse=True)
def can_be_read_only(tmp_path: Path) -> None:
    """Skip where neither modes nor mounts keep this user from writing."""
    folder = tmp_path / "place"
    folder.mkdir()
    made = "import sys; open(sys.argv[1], 'w')"
    if shutil.which("unshare") is None or run_python("-c", made, folder / "file", read_only=folder).returncode != 1:
        pytest.skip("this user may write everywhere")


@pytest.fixture
def recipe(tmp_path: Path, text_files: list[Path]) -> Path:
    recipe = {
        "run": {"stage": "pretrain", "directory": str(tmp_path / "runs"), "name": "a"},
        "tokenizer": {"vocab_size": 300, "train_chars": 20_000},
        "data": {
            "sources": [{"files": str(text_files[0])}],
            "validation": [{"files": str(text_files[2])}],
            "row_tokens": 64,
            "batch_tokens": 512,
            "shard_rows": 128,
            "cache_dir": str(tmp_path / "cache"),
        },
        "model": {"n_layer": 1, "n_embd": 32, "n_head": 2},
        "optimizer": {"type": "adamw"},
        "train": {"max_steps": 2, "per_device_train_batch_size": 8},
        "evals": {"bpb": {"tokens": 4096, "document_bytes": 0, "at_start": False}},
        "samples": {"every_steps": 0},
        "monitor": {"trackers": []},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_read_only_cache_with_everything_prepared_is_used(recipe, tmp_path):
    assert run_python("-m", "pipeline.data", recipe).returncode == 0

    trained = run_python("pipeline/pretrain.py", recipe, read_only=tmp_path / "cache")
    assert trained.returncode == 0, trained.stdout + trained.stderr

    more = run_python("pipeline/pretrain.py", recipe, "data.row_tokens=32", "run.name=b", read_only=tmp_path / "cache")
    assert more.returncode == 73
    assert "cannot be written by this user, and some rows of this recipe are not there yet" in more.stderr


def test_the_report_of_a_read_only_run_is_written_elsewhere(tmp_path):
    run = write_run(tmp_path / "run")
    refused = run_python("-m", "pipeline.report", run, read_only=run)
    assert refused.returncode == 73
    assert "Name a folder that can with --output." in refused.stderr

    elsewhere = tmp_path / "elsewhere"
    assert run_python("-m", "pipeline.report", run, "--output", elsewhere, read_only=run).returncode == 0
    assert {path.name for path in elsewhere.iterdir()} == {"report.md", "report.html", "curves.png"}


def test_evaluations_of_a_read_only_run_end_well_and_say_so(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "report").mkdir(exist_ok=True)
    done = run_python("-c", RECORD, run, read_only=run)
    assert done.returncode == 0, done.stderr
    assert "not recorded:" in done.stdout
    assert "--output FILE keeps the figures elsewhere." in done.stdout
