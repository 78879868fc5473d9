"""A disk that is full at each stage of a save, has no inodes left, or cannot be written.

As root on a small tmpfs for each trial; besides, and for everyone, by calls that fail from one of the save on.
"""

import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import evidence, injector
from faults.campaigns.base import (
    SETTING,
    calls_of_second_save,
    check_next_start,
    copy_of,
    cut_after_first_save,
    is_cold,
)
from faults.victim import SAVE_STEPS, WAIT_S, Lab

WHAT = "A disk that is full at each stage of a save, without inodes, or read-only"
SENTENCES = {74: r"no space is left|No space left|quota exceeded", 73: r"cannot be written|was not written"}
TMPFS_KB = 96 * 1024
# Left free for a save of about 10 MB in 20 files.
KILOBYTES = (0, 8, 40, 200, 1000, 4000, 4300, 8000, 9400)
INODES = (0, 1, 4, 8, 12, 16)


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    """The first `times` of all cells, in the seed's order."""
    numbers = [number for number, *_ in calls_of_second_save(lab)]
    cells = [f"{error}-{numbers[i * len(numbers) // 6]}" for error in ("ENOSPC", "EDQUOT", "EROFS") for i in range(6)]
    if os.geteuid() == 0:
        cells += [f"space-{n}" for n in KILOBYTES] + [f"inodes-{n}" for n in INODES] + ["readonly-0"]
    random.Random(seed).shuffle(cells)
    return cells[:times]


def trial(lab: Lab, key: str) -> dict:
    kind, number = key.split("-")
    folder = lab.trial(f"disk-{key}")
    base, cold = cut_after_first_save(lab), is_cold(trials, lab, key)
    if kind not in ("space", "inodes", "readonly"):
        run = copy_of(base, folder)
        rules = f"from={number}:{kind}"
        full = injector.faults(run / "checkpoints", rules=rules, counter=folder / "counter")
        return _verdict(lab, kind, run, *lab.finish(SETTING, run, environment=full, cold=cold), cold=cold)
    log = lab.trials / f"disk-{key}.log"
    with _tmpfs(folder):
        run = copy_of(base, folder)
        if kind == "readonly":
            _mount("-o", "remount,ro", str(folder))
            status, output = lab.finish(SETTING, run, log=log, cold=cold)
            _mount("-o", "remount,rw", str(folder))
            return _verdict(lab, kind, run, status, output, cold=cold)
        # Only once it trains: a start refuses a disk that is too small for what it plans to write.
        slow = injector.faults(slow_us=30_000, slow_under=run)
        process = lab.start(SETTING, run, log=log, environment=slow, cold=cold)
        while (process.poll() is None and len(evidence.attempts(run)) < 2) or evidence.logged_step(run) <= SAVE_STEPS:
            time.sleep(0.002)
        free = _fill(folder, kind, int(number))
        status = process.wait(WAIT_S)
        full_when_saved = 2 * SAVE_STEPS not in evidence.whole_steps(run)
        free()
        row = _verdict(lab, kind, run, status, process.output, cold=cold)
        return row | {"full_when_saved": full_when_saved}


def _verdict(lab: Lab, kind: str, run: Path, status: int | None, output: str, *, cold: bool) -> dict:
    wrong = []
    if status == 0:
        pass  # what was free was enough, or the save could do without the call
    elif status not in SENTENCES:
        wrong.append(f"status {status}: {output[-1500:]}")
    elif not re.search(SENTENCES[status], output) or "Traceback" in output:
        wrong.append(f"no clear sentence: {output[-1500:]}")
    whole = evidence.whole_steps(run)
    wrong += check_next_start(lab, run, cold=cold)
    return {"ok": not wrong, "wrong": wrong, "kind": kind, "status": status, "whole": whole, "cold": cold}


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextmanager
def _tmpfs(folder: Path) -> Iterator[None]:
    _mount("-t", "tmpfs", "-o", f"size={TMPFS_KB}k,nr_inodes=2000", "tandem-faults", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path, kind: str, left: int):
    """Leave so many kilobytes or inodes; gives the function that frees them again."""
    filler = folder / "filler"
    filler.mkdir()
    at = os.statvfs(folder)
    if kind == "space":
        size = max(0, at.f_bavail * at.f_frsize - left * 1024)
        with open(filler / "file", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    else:
        for number in range(max(0, at.f_favail - left)):
            (filler / str(number)).touch()

    def free() -> None:
        for path in filler.iterdir():
            path.unlink()
        filler.rmdir()

    return free


def figure(rows: list[dict]) -> str:
    statuses = {status: sum(row["status"] == status for row in rows) for status in sorted({r["status"] for r in rows})}
    said = ", ".join(f"{count} x {status}" for status, count in statuses.items())
    kinds = ", ".join(f"{sum(r['kind'] == kind for r in rows)} {kind}" for kind in sorted({r["kind"] for r in rows}))
    cold = sum(row["cold"] for row in rows)
    ended = sum(row["status"] == 0 for row in rows)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} ({kinds}; {cold} by the cold command) kept a whole checkpoint and went on by the same command once there "
        f"was room, to the uncut run's bits; {len(rows) - ended} ended and said in a sentence why, {ended} could do without (status: {said})"
    )
