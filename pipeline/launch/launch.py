"""Start an entry through `accelerate launch` as this machine allows, pass signals on, and leave with the run's status.

    python pipeline/launch/launch.py ENTRY DEFAULT_RECIPE [RECIPE] [section.key=value ...]

`accelerate launch` hands on neither signals nor exit statuses: a signal for the launcher would kill it or the ranks
before they have saved. Here the launcher lives in a session of its own, signals go to the ranks alone, and the status
and message come from the file that the ranks find in $TANDEM_STATUS (line 1: status; the rest: message).

In the environment: NPROC, processes of this machine. MAX_RESTARTS, how often a run that crashed is started again.
NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT): several machines, each of which runs this with its own NODE_RANK.
RDZV_TIMEOUT, seconds that they wait for each other before a start (launch/launch.py).
"""

# ruff: noqa: E402 - the package is found only from the root, and hears Ctrl-C from its first import on

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if not __package__:  # started as a file
    sys.path[0] = str(ROOT)

import pipeline  # noqa: F401

# isort: split

import ctypes
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import psutil

from pipeline.hardware.accelerators import visible_gpus
from pipeline.process.commands import whole_number
from pipeline.process.errors import HangError, Interrupted, Preempted, RecipeError, TandemError
from pipeline.process.storage import read_json, write_json
from pipeline.run_dir.checkpoints import by_step, step_of, take_lock
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import WRITER_WAIT_S, RunDirectory

# The hosts of one job: they meet before every start of it, say how theirs ended, and notice one that is lost.
#
# launch.py of node 0 keeps a store (torch's TCPStore) at MASTER_ADDR:MASTER_PORT for as long as it lives. Every host
# writes what it does there once a second, as one JSON object under its number, and reads all others'. torch's elastic
# rendezvous would start any failed run again, and names neither the host that is missing nor the one that is lost.

BEAT_S = 1.0
LOST_S = 30.0  # without a beat
WAS_LOST = " was lost: "  # behind a host's name, before how it is known
LINE_S = 10.0
GRACE_S = 5.0  # that ranks have to end by themselves once another host has failed
ASKED = (0, Preempted.status, Interrupted.status)  # all ranks end so together
UNCLEAR = (1, HangError.status)  # also what ranks say whose connection to a failed one broke
ABORTED = "ended, since another host had failed"  # of ranks that had to be killed: tells nothing of the reason


@dataclass(frozen=True)
class End:
    """Status and message with which a host's start, or the job's, ended.

    killed: a rank or the whole host was lost, or the host left before its ranks had started, which is why the others
    failed.
    """

    status: int
    message: str = ""
    killed: bool = False

    def is_failure(self) -> bool:
        """Return whether the other hosts' ranks wait in vain."""
        return self.killed or self.status not in ASKED


class Hosts:
    """One host's view of all. What each publishes by key, in the order in which a round (a start of the job) sets it:

    nodes: this host's NNODES.
    round: the number of the round that this host waits for or makes.
    port, met: of node 0 alone, once all wait for this round: where the ranks meet, and the lives (processes) that are
    part of it. end: how the round ended on this host; None while its ranks run. A host that leaves before they start
    sets it, too. again: of node 0 alone, together with the next round: why there is one; "" when there is none, and
    every host leaves.
    """

    def __init__(
        self, *, nodes: int, node: int, address: str, port: int, limit_s: float, report: Callable[[str], None]
    ):
        self.nodes, self.node, self.address, self.port = nodes, node, address, port
        self.limit_s, self.report = limit_s, report
        life = secrets.token_hex(4)
        self.own: dict[str, Any] = {"host": socket.gethostname(), "life": life, "nodes": nodes, "round": 0}
        self.seen: dict[int, dict[str, Any]] = {}
        self.changed: dict[int, float] = {}  # when another host's beat was last a new one
        self.lives: dict[int, str] = {}  # of the hosts that met
        self.store: Any = None
        self.broken = False
        self.answered = self.looked = self.awake = time.monotonic()
        self.wake = threading.Event()

    def name(self, node: int) -> str:
        host = (self.own if node == self.node else self.seen.get(node, {})).get("host")
        return f"host {host} (node {node})" if host else f"node {node}"

    def meet(self, signals: list[int]) -> int | None:
        """Return the port on node 0 at which the ranks of this start meet, once all hosts have come; None after a
        signal.

        Raises HangError when one has not come within limit_s, RecipeError when one was started with another NNODES.
        """
        began = time.monotonic()
        line, reason = began + LINE_S, ""
        while not signals:
            if self._is_cut():
                self.store, self.seen = None, {}
                reason = self._connect()
            here = {
                n: seen for n, seen in self._hosts() if seen.get("round") == self.own["round"] and not self.lost(n)
            }
            if self.node == 0:  # which alone decides; the others follow, and find one that left after that failed
                here = {n: seen for n, seen in here.items() if not seen.get("end")}
            if others := [n for n, seen in self._hosts() if seen.get("nodes", self.nodes) != self.nodes]:
                raise RecipeError(
                    f"NNODES is {self.nodes} on {self.name(self.node)} and {self.seen[others[0]]['nodes']} on "
                    f"{self.name(others[0])}, so they would wait for each other in vain. Start all with the same "
                    "number."
                )
            waited = time.monotonic() - began
            if self.store is not None and (port := self._port(here)):
                self.lives = {n: seen["life"] for n, seen in here.items()}
                return port
            missing = [self.name(n) for n in range(self.nodes) if n not in here] or [self.name(0)]
            what = reason or f"{', '.join(missing)}: {len(here)} of {self.nodes} hosts are here"
            if waited > self.limit_s:
                raise HangError(
                    f"{self.name(self.node)}: waited {waited:.0f} s in vain for {what}. Look at the output of the "
                    "hosts that are missing, and whether they reach MASTER_ADDR and MASTER_PORT; RDZV_TIMEOUT sets "
                    "another limit, in seconds."
                )
            if time.monotonic() > line and len(here) < self.nodes:
                line = time.monotonic() + LINE_S
                self.report(f"waiting for {what} (for at most {self.limit_s - waited:.0f} s more)")
            time.sleep(0.1)
        return None

    def _connect(self) -> str:
        """Return why the store cannot be reached yet, or nothing."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it prints every attempt that nobody answers
        from torch.distributed import TCPStore

        first = self.node == 0
        address, timeout = "127.0.0.1" if first else self.address, timedelta(seconds=LOST_S)
        try:
            if not first:  # fails at once, where the store would wait
                socket.create_connection((address, self.port), timeout=2).close()
            store = TCPStore(address, self.port, None, first, timeout, wait_for_workers=False)
            if first:
                for node in range(self.nodes):
                    store.set(str(node), "{}")
                store.set("nodes", str(self.nodes))  # last: by then every key is there
            elif (nodes := int(store.get("nodes"))) != self.nodes:
                store.set(str(self.node), json.dumps(self.own | {"beat": 0}))  # for node 0, which refuses it too
                self.seen = {0: {"nodes": nodes}}
                return ""
        except (OSError, RuntimeError):
            return (
                f"port {self.port}, which another process here holds" if first else f"node 0 at {address}:{self.port}"
            )
        self.store, self.broken, self.answered = store, False, time.monotonic()
        threading.Thread(target=self._beat, args=[store], name="hosts", daemon=True).start()
        return ""

    def _beat(self, store: Any) -> None:
        number, keys = 0, [str(node) for node in range(self.nodes)]
        while store is self.store:
            number += 1
            try:
                store.set(str(self.node), json.dumps(self.own | {"beat": number}))
                seen = {node: json.loads(text) for node, text in enumerate(store.multi_get(keys))}
            except RuntimeError:  # the process of node 0 is gone
                self.broken = store is self.store
                return
            now = time.monotonic()
            # By Ctrl-Z or with its machine: the others were not heard meanwhile.
            paused = now - self.answered > 5 * BEAT_S
            for node, state in seen.items():
                if paused or state.get("beat") != self.seen.get(node, {}).get("beat"):
                    self.changed[node] = now
            self.seen, self.answered = seen, now
            self.wake.wait(BEAT_S)
            self.wake.clear()

    def _hosts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from (self.seen | {self.node: self.own}).items()

    def _port(self, here: dict[int, dict[str, Any]]) -> int | None:
        """Return the port that node 0 has chosen for this round, another one each time: the last one's may be held
        still."""
        if self.node == 0 and len(here) == self.nodes:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._publish(port=probe.getsockname()[1], met=[seen["life"] for seen in here.values()])
            return self.own["port"]
        if self.node == 0 or not (first := self.seen.get(0)):
            return None
        if self.own["life"] in (first.get("met") or []):
            return first["port"] if first["round"] == self.own["round"] and len(here) == self.nodes else None
        # A host that was started anew waits for the start after the one that it has missed.
        if (joined := first["round"] + bool(first.get("port"))) != self.own["round"]:
            self._publish(round=joined)
        return None

    def _publish(self, **changes: Any) -> None:
        self.own = {**self.own, **changes}
        self.wake.set()

    def _is_cut(self) -> bool:
        """Return whether node 0 does not answer."""
        if (now := time.monotonic()) - self.looked > 5 * BEAT_S:  # this process was stopped meanwhile, as a whole
            self.awake = now
        self.looked = now
        return self.store is None or self.broken or now - max(self.answered, self.awake) > LOST_S

    def lost(self, node: int) -> str:
        """Return why a host of this round is lost, nothing of one that lives or has ended."""
        if node == self.node:
            return ""
        seen = self.seen.get(node, {})
        if self.lives and seen.get("life") != self.lives.get(node):
            return f"{self.name(node)}{WAS_LOST}it was started anew"
        if seen.get("end"):
            return ""
        if node == 0 and self._is_cut():
            return f"{self.name(0)}{WAS_LOST}it does not answer"
        if time.monotonic() - self.changed.get(node, time.monotonic()) > LOST_S:
            return f"{self.name(node)}{WAS_LOST}no sign of life for {LOST_S:.0f} s"
        return ""

    def failed(self) -> bool:
        """Return whether another host is lost or has failed, so that this one's ranks wait in vain."""
        return any(self.lost(n) or self._end(n).is_failure() for n in range(self.nodes) if n != self.node)

    def _end(self, node: int) -> End:
        state = self.own if node == self.node else self.seen.get(node, {})
        return End(**state["end"]) if state.get("end") else End(0)

    def agree(self, own: End) -> End:
        """Publish how this host's start ended and return how the job's did: by the host that failed, not by those that
        lost it."""
        self._publish(end=asdict(own))
        if own.status in ASKED:
            return own
        ends, lost = time.monotonic() + LOST_S + 2 * GRACE_S, ""
        while own.status in UNCLEAR and not own.killed and time.monotonic() < ends:
            others = [n for n in range(self.nodes) if n != self.node]
            lost = next(filter(None, map(self.lost, others)), "")
            if lost or all(self.seen.get(n, {}).get("end") for n in others):
                break
            time.sleep(0.1)
        found = [(n, self._end(n)) for n in range(self.nodes) if self._end(n).is_failure()]
        clear = [pair for pair in found if pair[1].status not in UNCLEAR] or [pair for pair in found if pair[1].killed]
        if lost and not clear:
            return End(
                HangError.status,
                f"{lost}, which ended the run. The last whole checkpoint is good. Run the same command again to go "
                "on from it.",
                killed=True,
            )
        node, end = (clear or sorted(found, key=lambda pair: (pair[1].message == ABORTED, pair[1].status)))[0]
        if node == self.node or (not clear and own.status == end.status and own.message != ABORTED):
            return own
        return End(end.status, f"{self.name(node)}: {end.message}", killed=end.killed or end.status not in UNCLEAR)

    def start_again(self, decide: Callable[[], str | None], signals: list[int]) -> str | None:
        """Return why there is another start, None for none. Node 0 decides for all; a host that has lost it decides
        for itself."""
        if self.node == 0:
            reason = decide()
            gone = [
                self.name(n) for n in self.lives if n and self.seen[n].get("end") and not self._end(n).is_failure()
            ]
            if reason and gone:
                self.report(
                    f"{', '.join(gone)}: has ended, so nothing is started again. Run the same command again on all."
                )
                reason = None
        else:
            ends = time.monotonic() + self.limit_s  # it may wait for a checkpoint that is still being written
            while not (self._has_decided() or self._is_cut() or signals) and time.monotonic() < ends:
                time.sleep(0.1)
            reason = self.seen[0]["again"] if self._has_decided() else decide()
        following: dict[str, Any] = {}
        if reason:
            self.lives = {}
            following = {"round": self.own["round"] + 1, "end": None, "port": None, "met": None}
        # At once: the others read `again` as soon as the round has changed.
        self._publish(again=reason or "", **following)
        return reason or None

    def _has_decided(self) -> bool:
        first = self.seen.get(0, {})
        return first.get("round", 0) > self.own["round"] or first.get("again") == ""

    def leave(self, signals: list[int]) -> None:
        """Wait, on node 0, until every host that met has ended too and has read how the others did; GRACE_S at most
        after a signal."""
        began = time.monotonic()
        waiting = [n for n in self.lives if n != self.node]  # none before they have met
        while self.node == 0 and time.monotonic() - began < (GRACE_S if signals else self.limit_s):
            waiting = [n for n in waiting if not self.seen.get(n, {}).get("end") and not self.lost(n)]
            if not waiting:
                break
            time.sleep(0.1)
        self.wake.set()
        time.sleep(2 * BEAT_S)  # what this host has published last is read


PLACES = (ROOT / "pipeline" / "accelerate_configs", ROOT / "accelerate_configs")  # installed wheel, repository
CONFIGS = next(place for place in PLACES if place.is_dir())
FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
PORT = "--main_process_port"
LOST = 70  # of the launcher: a rank was killed, and what it says about that stands in $TANDEM_STATUS
# What another start may fix: our bug or a flaky machine (1), a hang or a lost rank (70), a kill by something else than
# a wish to stop. A wrong recipe, bad data, no memory, a full disk or a diverged run would only end so again.
RESTARTABLE = (1, 70, *(128 + number for number in signal.Signals if number not in FORWARDED))


def choose(nproc: str | None, gpus: int) -> tuple[str, int]:
    """Return the config file's name and the number of processes. Raises ValueError with a sentence for the user."""
    if nproc is not None and not (nproc.isdecimal() and int(nproc) >= 1):
        raise ValueError(
            f"NPROC is {nproc!r}; it must be a number of processes, 1 or more. Unset it or write a number."
        )
    if not gpus:
        processes = int(nproc or 1)
        return ("cpu" if processes == 1 else "cpu_2"), processes
    processes = int(nproc or gpus)
    if processes > gpus:
        raise ValueError(
            f"NPROC is {processes}, but {gpus} GPUs are visible, and two processes cannot share one. Lower NPROC."
        )
    return ("single_gpu" if processes == 1 else "ddp"), processes


def with_recipe(arguments: list[str], default_recipe: str) -> list[str]:
    """Return the arguments with the default recipe put in front when they name none."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        return arguments
    return [default_recipe, *arguments]


def hosts_of(environ: Mapping[str, str]) -> Hosts | None:
    """Return the hosts of the job, None of a single one. Raises ValueError or RecipeError with a sentence for the
    user."""
    nodes = whole_number(environ, "NNODES", 1, least=1)
    if nodes == 1:
        return None
    if "NODE_RANK" not in environ or "MASTER_ADDR" not in environ:
        raise ValueError(
            f"NNODES is {nodes}, so every machine must know its place and where to meet. Set NODE_RANK (0 to "
            f"{nodes - 1}) and MASTER_ADDR (the first one's name)."
        )
    node = whole_number(environ, "NODE_RANK", 0, least=0)
    if node >= nodes:
        raise ValueError(
            f"NODE_RANK is {node}, and NNODES is {nodes}: the machines are numbered 0 to {nodes - 1}. Write this "
            "one's number."
        )
    return Hosts(
        nodes=nodes,
        node=node,
        address=environ["MASTER_ADDR"],
        port=whole_number(environ, "MASTER_PORT", 29500, least=1),
        limit_s=whole_number(environ, "RDZV_TIMEOUT", 600, least=1),
        report=report,
    )


def launch_command(config: str, processes: int, entry: str, arguments: list[str], *, hosts: Hosts | None) -> list[str]:
    """Return the command of accelerate. processes: those of all machines."""
    nodes = []
    if hosts:
        nodes = ["--num_machines", str(hosts.nodes), "--machine_rank", str(hosts.node)]
        nodes += ["--main_process_ip", hosts.address, PORT, "0"]
    launcher = [sys.executable, str(Path(__file__).with_name("launcher.py"))]
    launcher += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), *nodes]
    launcher += ["--num_cpu_threads_per_process", "1"]  # only to be asked nothing: the entries share out the cores
    return [*launcher, entry, *arguments]


def on_signals(handler: Callable[[int, object], object]) -> None:
    """Give the forwarded signals to the handler, but for those that are ignored: nohup has SIGHUP ignored."""
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


class Supervisor:
    """One `accelerate launch` and the ranks it started on this machine, which are its children. signals: what came so
    far."""

    def __init__(self, command: list[str], environ: Mapping[str, str], *, processes: int, signals: list[int]):
        self.processes, self.signals = processes, signals
        self.ranks: list[psutil.Process] = []
        # A session of its own keeps the terminal's Ctrl-C away from the launcher, which would kill the ranks.
        end = _end_with_parent if sys.platform == "linux" else None  # where there is none, Popen takes none
        self.launcher = psutil.Popen(command, env=dict(environ), start_new_session=True, preexec_fn=end)
        on_signals(self.forward)

    def find_ranks(self) -> None:
        self.ranks = [rank for rank in self.ranks if rank.is_running()]  # the launcher also asks short-lived tools
        with suppress(psutil.NoSuchProcess):  # the launcher has ended; ranks found before are waited for all the same
            self.ranks += [child for child in self.launcher.children() if child not in self.ranks]

    def forward(self, number: int, _frame: object) -> None:
        self.signals.append(number)
        self.find_ranks()
        # While ranks are missing nothing has been trained, and one that is being started would not hear of it.
        starting = [self.launcher] if len(self.ranks) < self.processes else []
        for process in self.ranks + starting:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, *, in_vain: Callable[[], bool] = lambda: False) -> int | None:
        """Return the launcher's exit status, once it and all ranks are gone; None when they had to be killed.

        in_vain: whether they wait for a host that has failed. They have GRACE_S to find that out by themselves.
        """
        ends, killed = None, False
        while True:
            try:
                status = self.launcher.wait(timeout=0.1 if len(self.ranks) < self.processes else 1.0)
                break
            except psutil.TimeoutExpired:
                self.find_ranks()
            if in_vain():
                ends = ends or time.monotonic() + GRACE_S
                killed = time.monotonic() > ends
            for process in [self.launcher, *self.ranks] if killed else []:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        psutil.wait_procs(self.ranks)
        return None if killed else status


# Loaded before a fork: a thread may hold the loader's lock.
LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Let the launcher have SIGTERM when this script is killed: its ranks then save and end, instead of training on
    unseen."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


def report(message: str) -> None:
    """Print to stderr, unless the terminal was closed: the status still counts."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def final_status(status_file: Path, launcher_status: int, signals: list[int]) -> tuple[int, str]:
    """Return the run's exit status and message: what the ranks wrote, else what the launcher and the signals say."""
    if status_file.exists() and (
        text := status_file.read_text()
    ):  # empty on a full disk; the message is on the screen then
        number, _, message = text.partition("\n")
        return int(number), message.strip()
    if signals:
        name = signal.Signals(signals[-1]).name
        if len(signals) > 1:
            return (
                128 + signals[-1],
                (
                    f"a second signal ({name}) ended the run at once. Run the same command again to go on from its "
                    "newest checkpoint."
                ),
            )
        status = 130 if signals[0] == signal.SIGINT else 75
        return status, f"{name} came before training could answer it; nothing is lost. Run the same command again."
    if launcher_status < 0:
        name = signal.Signals(-launcher_status).name
        return 128 - launcher_status, f"the launcher was ended by {name}. Run the same command again to continue."
    return launcher_status, ""


def progress(status_file: Path) -> tuple[int, int] | None:
    """Return (step at which the run began this time, step of its newest checkpoint), None when it never came to
    begin."""
    named = Path(f"{status_file}.run")
    if not named.exists():
        return None
    run = RunDirectory(named.read_text())
    with suppress(OSError):  # a killed run's last checkpoint may still be on its way to the disk
        take_lock(run.checkpoints, wait_s=WRITER_WAIT_S).close()
    begun = [row["step"] for row in read_rows(run.metrics) if row.get("event") == "attempt"]
    saved = [step_of(folder) or 0 for folder in by_step(run.checkpoints)]
    return (begun[-1], max(saved, default=0)) if begun else None


def worth_another_start(status: int, status_file: Path, *, left: int) -> str | None:
    """Return a sentence when a run that ended with this status is to be started again: only after progress, else it
    would crash at the same place forever."""
    if not left or status not in RESTARTABLE:
        return None
    steps = progress(status_file)
    if steps is None or steps[1] <= steps[0]:
        report(f"status {status}: not started again, because it came to no new checkpoint since its last start.")
        return None
    return f"status {status}, but the run came from step {steps[0]} to checkpoint-{steps[1]}: starting it again"


def run(
    command: list[str],
    environ: dict[str, str],
    *,
    processes: int,
    restarts: int,
    signals: list[int],
    hosts: Hosts | None = None,
) -> int:
    """Return the status of the last start. signals: takes those that come."""
    for left in range(restarts, -1, -1):
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            status_file = Path(folder) / "status"
            if hosts:
                on_signals(lambda number, frame: signals.append(number))
                try:
                    command[command.index(PORT) + 1] = str(hosts.meet(signals))
                except (HangError, RecipeError) as error:
                    report(f"error: {error}")
                    return error.status
                if signals:
                    break
            supervisor = Supervisor(
                command, {**environ, "TANDEM_STATUS": str(status_file)}, processes=processes, signals=signals
            )
            launcher_status = supervisor.wait(in_vain=hosts.failed if hosts else lambda: False)
            if launcher_status is None:
                status, message = LOST, ABORTED
            else:
                status, message = final_status(status_file, launcher_status, signals)
            # One rank's message still stands on the screen, unless it was killed and the launcher speaks for it; of
            # several ranks the launcher's own report has pushed it away.
            shown = not (processes > 1 or not status_file.exists() or launcher_status == LOST)
            if hosts:
                end = hosts.agree(End(status, message, killed=launcher_status == LOST))
                shown = shown and end.message == message
                if status in UNCLEAR and end.killed and end.status not in ASKED:
                    record_failure(status_file, end, first=hosts.node == 0)
                status, message = end.status, end.message
            if message and not shown:
                report(message)

            def decide(status: int = status, file: Path = status_file, left: int = left) -> str | None:
                return None if signals else worth_another_start(status, file, left=left)

            again = decide() if not hosts or status in ASKED else hosts.start_again(decide, signals)
            if signals and again is not None:  # while it waited for a killed run's last checkpoint
                break
            if again is None:
                return status
            report(f"{again} ({restarts - left + 1} of MAX_RESTARTS={restarts})")
    status = 130 if signals and signals[0] == signal.SIGINT else 75
    if hosts:  # whose ranks would wait for these
        message = "a signal came before its ranks had started; nothing is lost. Run the same command again."
        hosts.agree(End(status, message, killed=True))
    return status


def record_failure(status_file: Path, end: End, *, first: bool) -> None:
    """Write what ended the job over what a rank of this host says that lost its connection, unless it stands there
    already. Of hosts that lost each other and share the folder, the first one's word stands."""
    named = Path(f"{status_file}.run")
    with suppress(OSError, TandemError):
        failure = RunDirectory(named.read_text()).failure
        # A rank that lost its connection to a lost host says 70, too.
        written = read_json(failure) if failure.exists() else {}
        if end.status not in UNCLEAR and written.get("status") == end.status:
            return
        if not first and WAS_LOST in str(written.get("message")):
            return
        kind = next((c for c in TandemError.__subclasses__() if c.status == end.status), TandemError)
        facts = {"status": end.status, "class": kind.__name__, "message": end.message, "facts": None}
        write_json(failure, facts | {"time": time.time(), "rank": 0, "traceback": None})


def main(entry: str, default_recipe: str, arguments: list[str]) -> int:
    environ = dict(os.environ)
    gpus = len(visible_gpus(environ))
    try:
        config, processes = choose(environ.get("NPROC"), gpus)
        hosts, restarts = hosts_of(environ), whole_number(environ, "MAX_RESTARTS", 0, least=0)
    except (ValueError, RecipeError) as error:
        print(error, file=sys.stderr)
        return 64
    if gpus > 1 and processes == 1:  # with more in sight Trainer would spread one process over all of them
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    arguments = with_recipe(arguments, default_recipe)
    if hosts:
        config = "multi_node"
    count = ("1 process" if processes == 1 else f"{processes} processes") + (" on each machine" if hosts else "")
    device = "the CPU" if not gpus else "a GPU" if processes == 1 else "GPUs"
    what = f"{Path(entry).name} {' '.join(arguments)} (accelerate_configs/{config}.yaml)"
    with suppress(BrokenPipeError):  # a reader such as `head` has left; the run goes on
        print(f"starting {count} on {device}: {what}", flush=True)
    everywhere = processes * (hosts.nodes if hosts else 1)
    command = launch_command(config, everywhere, entry, arguments, hosts=hosts)
    signals: list[int] = []
    status = run(command, environ, processes=processes, restarts=restarts, signals=signals, hosts=hosts)
    if hosts:
        hosts.leave(signals)
    return status


def start(entry: str, default_recipe: str, arguments: list[str]) -> NoReturn:
    outcome = main(entry, default_recipe, arguments)
    with suppress(OSError):  # a terminal that was closed: at its own end Python would make 120 of the status
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(outcome)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2], sys.argv[3:])
