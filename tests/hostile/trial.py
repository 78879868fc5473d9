"""One hostile thing through the commands that may meet it: what was executed, written outside, said, and how each command ended."""

import hashlib
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hub.hub_stand_in import StandIn
from tests.warm_commands import Ended, WarmCommands

STATUSES = {0, 64, 65, 66, 69, 70, 71, 73, 74, 75, 76, 130}  # those of process/errors.py; 1 is a mistake of ours
LIMIT_S = 60.0  # of CPU time; four times as long until it has ended
LIMIT_MIB = 3072  # the interpreter with torch, transformers and all of the package has 600
ALLOWED = ("out", "cache", "runs/x", "hf", "home", "tmp")  # what the commands name, and this user's own caches
BAD_TRACES = ("Traceback (most recent call last)", "Fatal Python error", "panicked at", "Segmentation fault")
PANIC_SENTENCE = (
    "error: the tokenizers library gave up on a text"  # after the library's own lines, which it prints itself
)
STEERING = re.compile("\x1b(?!\\[[0-9;]{0,8}m|\\[[AK])|[\x07\x9b]")  # colours and progress bars are our own
SCRIPT = "hostile-script"  # stands in what would be a script on the page of a report
ACTIVE = re.compile(
    rf"<(script|img|iframe|svg)[^>]*{SCRIPT}|<script[^>]*>\s*{SCRIPT}|href=[\"']javascript:[^>]*{SCRIPT}",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """lay: puts the thing into a case and gives what stands for {} in the commands. limit_s: where a command may take longer."""

    lay: Callable[[Case], Any]
    commands: tuple[str, ...]
    allowed: tuple[str, ...] = ALLOWED
    limit_s: float = LIMIT_S


def run(thing: Thing, *, folder: Path, whole: Path, warm: WarmCommands, hub: StandIn) -> dict:
    """Return a row: ok, wrong (a line for each finding) and a row of each command."""
    case = Case(folder, whole)
    for name in ("home", "tmp", "out", "cache", "elsewhere"):
        (folder / name).mkdir(exist_ok=True)
    given = thing.lay(case)
    hub.repos, hub.answers = dict(case.repositories), dict(case.answers)
    tried = [_one(thing, command, given, case, warm, hub) for command in thing.commands]
    wrong = [f"{row['command']}: {finding}" for row in tried for finding in row.pop("wrong")]
    return {"ok": not wrong, "wrong": wrong, "commands": tried}


def _one(thing: Thing, command: str, given: Any, case: Case, warm: WarmCommands, hub: StandIn) -> dict:
    folder, log = case.folder, case.folder.with_name(case.folder.name + ".seen")
    log.unlink(missing_ok=True)
    allowed = [str(folder / name) for name in thing.allowed]
    words = command.format(given).split()
    before, logs = _content(folder, allowed), _logs(folder)
    ended = warm.run(
        *words,
        folder=folder,
        limit_s=thing.limit_s,
        limit_mib=LIMIT_MIB,
        watch={"log": str(log), "folder": str(folder), "allowed": [*allowed, str(folder / "MARK")]},
        MARK=str(folder / "MARK"),
        INSTALLED=str(folder / "lib"),
        HOME=str(folder / "home"),
        TMPDIR=str(folder / "tmp"),
        TANDEM_CACHE=str(folder / "cache"),
        HF_HOME=str(folder / "hf"),
        **({"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"} if case.repositories else {}),
    )
    seen = [line.split("\t", 1) for line in log.read_text().splitlines()] if log.exists() else []
    executed = sorted({what for kind, what in seen if kind == "executed"})
    outside = {what for kind, what in seen if kind in ("outside", "reached")}
    if (folder / "MARK").exists():
        executed.append(f"the payload: {(folder / 'MARK').read_text()[:100]!r}")
        (folder / "MARK").unlink()
    executed += [f"a script on the page {page}" for page in _active_pages(folder)]
    after = _content(folder, allowed)
    outside |= {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    output = ended.output + _logs(folder).removeprefix(logs)
    traces = [
        trace for trace in BAD_TRACES if trace in output and (trace != "panicked at" or PANIC_SENTENCE not in output)
    ]
    wrong = [f"executed {what}" for what in executed] + [f"changed or reached {what}" for what in sorted(outside)]
    wrong += [f"printed {trace!r}: {_tail(ended)}" for trace in traces]
    if ended.over:
        wrong.append(
            f"took too much {ended.over} ({ended.cpu_s} s of CPU time in {ended.seconds} s, {ended.peak_mib} MiB): {_tail(ended)}"
        )
    elif ended.status not in STATUSES and not traces:
        wrong.append(f"ended with {ended.status}: {_tail(ended)}")
    elif ended.status and not ended.output.strip():
        wrong.append(f"ended with {ended.status} and no word")
    elif ended.peak_mib > LIMIT_MIB:
        wrong.append(f"took {ended.peak_mib} MiB")
    if STEERING.search(ended.output):
        wrong.append("printed control characters of the thing")
    return {
        "command": command,
        "status": ended.status,
        "executed": len(executed),
        "outside": len(outside),
        "traces": len(traces),
        "seconds": ended.cpu_s,
        "peak_mib": ended.peak_mib,
        "last": ended.output.strip()[-300:],
        "wrong": wrong,
    }


def _content(folder: Path, allowed: list[str]) -> dict[str, tuple]:
    """Return name -> kind, size, time and sum of all that lies in the folder where no command may change anything."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if any(str(path) == place or str(path).startswith(f"{place}/") for place in allowed) or path.name == "MARK":
            continue
        facts = path.lstat()
        small = stat.S_ISREG(facts.st_mode) and facts.st_size < 1 << 20
        content = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
        if not stat.S_ISDIR(facts.st_mode):
            found[str(path.relative_to(folder))] = (facts.st_mode, facts.st_size, facts.st_mtime_ns, content)
        elif not any(place.startswith(f"{path}/") for place in allowed):
            found[str(path.relative_to(folder))] = (facts.st_mode,)
    return found


def _logs(folder: Path) -> str:
    """Return what processes of the commands wrote to logs of their own."""
    found = [path for place in ("out", "cache") for path in sorted((folder / place).rglob("*.txt"))]
    return "".join(path.read_text(errors="replace") for path in found if "log" in path.name)


def _active_pages(folder: Path) -> list[str]:
    pages = [page for page in folder.rglob("report.html") if page.is_file()]
    return [page.name for page in pages if ACTIVE.search(page.read_text(errors="replace"))]


def _tail(ended: Ended) -> str:
    return ended.output.strip()[-1500:]


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + ".seen").unlink(missing_ok=True)
