"""The newcomer's path, whole: both scripts from nothing prepared, and what the README says they reach. Slow: run by hand.

bash run_tests.sh -m slow tests/quickstart
"""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.run_dir.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


def run_script(name: str, folder: Path) -> tuple[float, RunDirectory]:
    """Seconds and the run directory of one script with its default recipe."""
    started = time.monotonic()
    environment = {**os.environ, "TANDEM_CACHE": str(folder / "cache")}
    command = ["bash", str(ROOT / name), f"run.directory={folder / 'runs'}"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    path = re.search(r"^run (\S+): starting", done.stdout, re.MULTILINE)[1]
    return time.monotonic() - started, RunDirectory(path)


@pytest.mark.slow
def test_the_quickstart_reaches_what_the_readme_says(tmp_path):
    pretraining_s, base = run_script("run_pretrain.sh", tmp_path)
    reached = base.read_manifest()["results"]
    print(f"pretraining {pretraining_s:.0f} s, val/bpb {reached['val/bpb/first']:.4f} -> {reached['val/bpb']:.4f}")
    sft_s, chat = run_script("run_sft.sh", tmp_path)
    tuned = chat.read_manifest()["results"]
    print(f"SFT {sft_s:.0f} s, chat/world {tuned['chat/world/first']:.4f} -> {tuned['chat/world']:.4f}")
    print({name: value for name, value in tuned.items() if name.startswith("chat/world/")})

    for run in (base, chat):
        assert "**Healthy**: " in (run.report / "report.md").read_text()
    assert pretraining_s <= 5 * 60
    assert sft_s <= 2 * 60
    assert tuned["chat/world/first"] <= 0.05
    assert tuned["chat/world"] >= 0.85
