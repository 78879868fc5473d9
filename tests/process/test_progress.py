"""Bars on a terminal, lines elsewhere, and nothing of either between the lines of the console."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from pipeline.process import progress
from pipeline.process.progress import Bar, count_text, seconds_text, waiting

STEP = "step 00019/00020 (95.00%) | loss: 1.000000 | eta: 0.0m"
PROGRAM = f"""
import time
from pipeline.process.progress import progress, waiting, write
with waiting("compiling"):
    time.sleep(1.2)
for number in progress(range(3), name="evaluation", unit="rows"):
    time.sleep(0.3)
    write({STEP!r})
print("the end")
"""


def on_a_terminal(program: str) -> tuple[str, str]:
    """Return (stdout, what a terminal at stderr was given)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return done.communicate()[0], shown.decode()


def test_on_a_terminal_bars_show_rates_and_keep_console_lines_whole():
    stdout, shown = on_a_terminal(PROGRAM)
    assert stdout == f"{STEP}\n" * 3 + "the end\n"
    assert re.search(r"\rcompiling: 1 s", shown)
    assert re.search(r"evaluation: +67%.*2/3 \[00:0\d<00:0\d, .*rows/s\]", shown)
    last_line = shown.replace("\x1b[K", "").split("\r")[-1]
    assert last_line.strip() == ""  # nothing is left on the screen


def test_without_a_terminal_nothing_is_drawn_and_short_work_prints_no_line():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == f"{STEP}\n" * 3 + "the end\n"
    assert done.stderr == ""


def test_without_a_terminal_an_occasional_line_says_how_much_is_done(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.001)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with Bar("fetching", total=100, unit="files", shown=True) as bar:
        for _ in range(4):
            time.sleep(0.01)
            bar.update(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("fetching: 5%, 5 of 100 [")
    assert len([line for line in lines if line.strip()]) == 4


def test_other_ranks_show_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setenv("RANK", "1")
    with waiting("compiling"), Bar("fetching", total=3) as bar:
        bar.update()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99.4, "99 s"), (99.6, "1.7 min"), (7200, "2.0 h")])
def test_times_are_said_as_people_say_them(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (0.5, "0.5"), (1500, "1.5k"), (2.5e6, "2.5M"), (999_960, "1.0M")]
)
def test_counts_are_said_in_the_unit_that_shows_them(count, text):
    assert count_text(count) == text
