"""Exact resume of the quickstart itself: compiled, bf16 where it is fast, all threads. Slow: run by hand.

bash run_tests.sh -m slow tests/quickstart
"""

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pipeline.run_dir.rows import last_attempts, read_rows

ROOT = Path(__file__).parents[2]
SHORT = [
    "train.max_steps=60",
    "train.logging_steps=1",
    "train.save_steps=20",
    "train.eval_steps=1000",
    "evals.bpb.at_start=false",
    "samples.every_steps=0",
]


def start(folder: Path, name: str) -> subprocess.Popen:
    environment = {**os.environ, "TANDEM_CACHE": str(folder / "cache")}
    command = ["bash", str(ROOT / "run_pretrain.sh"), f"run.directory={folder / 'runs'}", f"run.name={name}", *SHORT]
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(command, env=environment, **how)


def losses(run: Path) -> dict[int, float]:
    rows = last_attempts(read_rows(run / "metrics.jsonl"))
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.mark.slow
def test_the_killed_quickstart_ends_bitwise_as_the_uncut_one(tmp_path):
    assert start(tmp_path, "uncut").wait() == 0
    process, cut = start(tmp_path, "cut"), tmp_path / "runs" / "cut"
    while process.poll() is None and max(losses(cut), default=0) < 30:
        time.sleep(0.01)
    for one in psutil.process_iter(["cmdline"]):  # the scripts, the launcher and the run, each in a group of its own
        words = one.info["cmdline"] or []
        if "run.name=cut" in words and f"run.directory={tmp_path / 'runs'}" in words:
            one.kill()
    process.wait()
    assert start(tmp_path, "cut").wait() == 0
    assert json.loads((cut / "run_manifest.json").read_text())["attempts"] == 2
    assert losses(cut) == losses(tmp_path / "runs" / "uncut")
    a, b = ((tmp_path / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "uncut"))
    assert a == b
