"""The console line keeps the shape that people's parsers read."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from pipeline.callbacks.console import Console, step_line

ROW = {
    "train/loss_ema": 2.3369164,
    "optim/lrm": 0.05,
    "perf/step_s": 0.9974,
    "perf/tok_per_s": 1051311.9,
    "perf/bf16_mfu_pct": 63.45,
    "data/epoch": 1,
    "data/pq": 122,
    "data/rg": 80,
    "perf/total_s": 92.46 * 60,
    "perf/eta_s": 0.9974,
}


def test_the_line_has_exactly_the_agreed_shape():
    assert step_line(ROW, step=5567, max_steps=5568) == (
        "step 05567/05568 (99.98%) | loss: 2.336916 | lrm: 0.05 | dt: 997.40ms | tok/sec: 1,051,311 | bf16_mfu: 63.45 | "
        "epoch: 1 pq: 122 rg: 80 | total time: 92.46m | eta: 0.0m"
    )


LINES = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from pipeline.callbacks.console import Console
state = SimpleNamespace(is_world_process_zero=True, global_step=5568, max_steps=5568)
row = {ROW} | {{"train/loss": 2.0, "val/bpb": 0.166705, "val/loss": 0.558313, "val/bpb_documents": 0.168687}}
Console(Path(sys.argv[1])).on_log(None, state, None, logs=row)
"""
SHOWN = {
    80: [
        "step 05567/05568 (99.98%) | loss: 2.336916 | tok/sec: 1,051,311 | eta: 0.0m",
        "step 05568 | val/bpb: 0.166705 | val/loss: 0.558313",
    ],
    100: [
        "step 05567/05568 (99.98%) | loss: 2.336916 | tok/sec: 1,051,311 | bf16_mfu: 63.45 | eta: 0.0m",
        "step 05568 | val/bpb: 0.166705 | val/loss: 0.558313 | val/bpb_documents: 0.168687",
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_line_fits_its_terminal_and_console_log_has_all_of_it(tmp_path, columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", LINES, str(tmp_path / "console.log")]
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    whole = (tmp_path / "console.log").read_text().splitlines()
    assert whole[0] == step_line(ROW, step=5567, max_steps=5568)
    assert shown == SHOWN.get(columns, whole)


def test_the_short_names_of_the_line_are_explained_before_the_first_one(tmp_path, capsys):
    state = SimpleNamespace(is_world_process_zero=True)
    Console(tmp_path / "console.log").on_train_begin(None, state, None)
    explained = capsys.readouterr().out
    names = set(re.findall(r"(\w+): ", step_line(ROW, step=0, max_steps=10))) - {"sec", "epoch", "time"}
    assert {name for name in names if not re.search(rf"\b{name}\b", explained)} == set()
    assert not (tmp_path / "console.log").exists()  # which programs read


def test_an_unknown_peak_reads_not_available_instead_of_a_number():
    row = {name: value for name, value in ROW.items() if name != "perf/bf16_mfu_pct"}
    assert "| bf16_mfu: n/a |" in step_line(row, step=0, max_steps=10)


def test_the_time_left_reads_not_available_until_it_is_known():
    row = {name: value for name, value in ROW.items() if name != "perf/eta_s"}
    assert step_line(row, step=0, max_steps=10).endswith(" | total time: 92.46m | eta: n/a")


def test_an_evaluation_line_shows_whole_scores_without_sources_and_single_tasks(tmp_path, capsys):
    row = {
        "val/bpb": 1.5,
        "val/bpb/web": 1.4,
        "core/v1": 0.25,
        "core_partial/v2": 0.5,
        "core/copa": 0.75,
        "core/eval_s": 2.0,
    }
    row |= {"chat/mmlu": 0.5, "chat/mmlu/law": 0.25, "chat/core_part": 0.125, "perf/eval_s": 3.0, "val/own": 4.0}
    state = SimpleNamespace(is_world_process_zero=True, global_step=7, max_steps=10)
    Console(tmp_path / "console.log").on_log(None, state, None, logs=row)
    assert (
        capsys.readouterr().out
        == (tmp_path / "console.log").read_text()
        == (
            "step 00007 | val/bpb: 1.500000 | core/v1: 0.250000 | core_partial/v2: 0.500000 | core/eval_s: 2.000000 | "
            "chat/mmlu: 0.500000 | chat/core_part: 0.125000 | val/own: 4.000000\n"
        )
    )
