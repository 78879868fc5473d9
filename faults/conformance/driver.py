"""Start a subject, kill it where a cut says, start it again, and collect what it wrote."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults.conformance.cuts import SAVE_EVERY, Cut, Start
from faults.conformance.subject import HOLD
from faults.conformance.verdict import Attempt, Verdict, compare

ROOT = Path(__file__).resolve().parents[2]
ROWS = 64
EPOCHS = 2
BATCH = 4
LIMIT_S = 600  # of one start of a subject; an import of torch on a busy machine takes a minute


@dataclass
class Subject:
    """A trainer that can be driven: an adapter (a file of Python), or any command that takes the same arguments."""

    name: str
    adapter: Path | None = None
    command: list[str] = field(default_factory=list)
    python: str = sys.executable
    limit_s: float = LIMIT_S
    cold: bool = False  # no forks: each start is a program of its own
    what: str = ""  # the docstring without the settings below
    packages: list[str] = field(default_factory=list)  # name==version
    offers: set[str] = field(default_factory=set)  # of "workers", "ranks"
    docs: list[str] = field(default_factory=list)  # the pages that the adapter follows
    notes: str = ""  # what is known of its deviations


class Trainings:
    """The trainings of one subject, below one folder; the uncut ones are made once and kept."""

    def __init__(self, subject: Subject, folder: Path):
        self.subject = subject
        self.folder = folder
        self.uncut: dict[tuple, tuple[Attempt, Verdict]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.starter = Starter(subject, folder / "starter.log")

    def close(self) -> None:
        self.starter.close()

    def reference(self, cut: Cut) -> tuple[Attempt, Verdict]:
        """Return the uncut training, and the verdict on a second one: whether it is the same without any cut."""
        key = (cut.workers, cut.ranks, cut.save_every)
        if key not in self.uncut:
            start = Start(workers=cut.workers, ranks=cut.ranks)
            name = "uncut-" + "-".join(map(str, key))
            [first] = self.starts(f"{name}-1", (start,), save_every=cut.save_every)
            [second] = self.starts(f"{name}-2", (start,), save_every=cut.save_every)
            self.uncut[key] = (first, compare([second], first, rows=ROWS))
        return self.uncut[key]

    def verdict(self, cut: Cut) -> Verdict:
        if missing := cut.needs - self.subject.offers:
            return Verdict("not offered", message=f"the subject does not offer {', '.join(sorted(missing))}")
        reference, again = self.reference(cut)
        if reference.message:
            return Verdict("error", message=f"the uncut training: {reference.message}")
        if not reference.steps():
            return Verdict("error", message="the uncut training wrote no step to its journal")
        attempts = self.starts(cut.name, cut.starts, save_every=cut.save_every)
        other_ranks = any(start.ranks != cut.ranks for start in cut.starts)
        same_order = again.first_other_order is None
        verdict = compare(
            attempts, reference, rows=ROWS, order=same_order, bits=again.word == "exact" and not other_ranks
        )
        verdict.uncut_differs = again.word if again.word != "exact" else ""
        return verdict

    def starts(self, name: str, starts: tuple[Start, ...], *, save_every: int = SAVE_EVERY) -> list[Attempt]:
        """Return what each start wrote, one after another in one folder; those behind one that failed are not made."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        attempts = []
        for start in starts:
            attempts.append(self.start(folder, start, save_every=save_every, number=len(attempts) + 1))
            if attempts[-1].message:
                break
        return attempts

    def start(self, folder: Path, start: Start, *, save_every: int, number: int) -> Attempt:
        (folder / HOLD).unlink(missing_ok=True)
        if start.kill_at is not None:
            hold = {"step": start.kill_at}
            if start.in_save is not None:
                hold["save"] = start.in_save
            (folder / HOLD).write_text(json.dumps(hold))
        command = [*self._command(), "--folder", str(folder), "--rows", str(ROWS), "--epochs", str(EPOCHS)]
        command += ["--batch", str(BATCH), "--save-every", str(save_every), "--workers", str(start.workers)]
        journals = [folder / f"steps.{rank}.jsonl" for rank in range(start.ranks)]
        seen = [path.stat().st_size if path.exists() else 0 for path in journals]
        log = folder.parent / f"{folder.name}.{number}.log"
        log.unlink(missing_ok=True)
        self.starter.order(command, folder=folder, log=log, ranks=start.ranks)
        killed, late = self._until_the_cut_or_the_end(start, journals, seen)
        records = [_records(path, offset) for path, offset in zip(journals, seen, strict=True)]
        attempt = Attempt(records=records, killed=killed)
        if self.starter.died_in_a_file():
            attempt.cut_file = _cut_file(folder, records[0])
        if late:
            attempt.message = f"no end after {self.subject.limit_s} s"
        elif not killed and any(self.starter.statuses):
            text = log.read_text(errors="replace")
            attempt.message = _message(text, folder)
            attempt.refused = "Traceback (most recent call last)" not in text
        return attempt

    def _command(self) -> list[str]:
        if self.subject.adapter is None:
            return self.subject.command
        if self.subject.cold:
            return [self.subject.python, str(self.subject.adapter)]
        return [str(self.subject.adapter)]

    def _until_the_cut_or_the_end(self, start: Start, journals: list[Path], seen: list[int]) -> tuple[bool, bool]:
        """Return whether the processes were killed, and whether that was for their taking too long."""
        ends = time.monotonic() + self.subject.limit_s
        killed = False
        late = False
        while self.starter.running():
            late = late or time.monotonic() > ends
            if start.kill_at is not None and not killed:
                reached = []
                for path, offset in zip(journals, seen, strict=True):
                    reached.append(_last_step(path, offset) >= start.kill_at)
                killed = all(reached) or self.starter.died_in_a_file()
            if killed or late or any(self.starter.statuses):  # what one rank left behind would wait for it
                self.starter.kill()
        return killed or self.starter.died_in_a_file(), late


class Starter:
    """The process that starts those of a subject (starter.py), and the state of the ones that run now."""

    def __init__(self, subject: Subject, log: Path):
        command = [subject.python, str(Path(__file__).with_name("starter.py"))]
        if subject.adapter is not None and not subject.cold:
            command.append(str(subject.adapter))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HOME": str(log.parent / "huggingface"),
        }
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, bufsize=0
            )
        self.group = 0
        self.statuses: list[int | None] = []
        self.text = b""
        self._report()  # ready: the adapter has been imported

    def order(self, command: list[str], *, folder: Path, log: Path, ranks: int) -> None:
        """Start the command, once per rank, in one process group."""
        shared = {}
        if ranks > 1:
            shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            shared["MASTER_PORT"] = str(_free_port())
        environments = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            environments.append(shared | own)
        order = {"command": command, "environments": environments, "folder": str(folder), "log": str(log)}
        self.statuses = [None] * ranks
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.group = self._report()["group"]

    def running(self) -> bool:
        """Return whether a rank still runs, after a moment in which its end may have been reported."""
        while None in self.statuses:
            if b"\n" not in self.text and not select.select([self.process.stdout], [], [], 0.01)[0]:
                break
            report = self._report()
            self.statuses[report["rank"]] = report["status"]
        return None in self.statuses

    def died_in_a_file(self) -> bool:
        return -signal.SIGXFSZ in self.statuses

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it ended in between
            os.killpg(self.group, signal.SIGKILL)

    def close(self) -> None:
        if self.group:
            self.kill()
        self.process.kill()
        self.process.wait()

    def _report(self) -> dict:
        while b"\n" not in self.text:
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise NotStarted(_message(self.log.read_text(errors="replace"), self.log.parent))
            self.text += read
        line, _, self.text = self.text.partition(b"\n")
        return json.loads(line)


class NotStarted(RuntimeError):
    """The adapter could not be imported."""


def _records(path: Path, offset: int) -> list[dict]:
    """Return the lines of a journal behind an offset; one that a kill has torn is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes()[offset:].splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _last_step(path: Path, offset: int) -> int:
    steps = [record["step"] for record in _records(path, offset) if "step" in record]
    return steps[-1] if steps else 0


def _cut_file(folder: Path, records: list[dict]) -> str:
    """Return the name of the file in which the kernel ended the subject: the one as large as the limit."""
    limits = [record["limit"] for record in records if "limit" in record]
    cut = [path for path in folder.rglob("*") if limits and path.is_file() and path.stat().st_size == limits[-1]]
    return cut[0].relative_to(folder).as_posix() if cut else ""


def _message(text: str, folder: Path) -> str:
    """Return the last line that says something, without the folder and what differs from start to start."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    message = (errors or lines or ["no message"])[-1]
    message = message.replace(str(folder), "FOLDER")
    return re.sub(r"0x[0-9a-f]+|\b\d{5,}\b", "N", message)[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
