"""Start an entry through `accelerate launch` as this machine allows, pass signals on, and leave with the run's status.

    python pipeline/launch/launch.py ENTRY DEFAULT_RECIPE [RECIPE] [section.key=value ...]

`accelerate launch` hands on neither signals nor exit statuses: a signal for the launcher would kill it or the ranks
before they have saved. Here the launcher lives in its own session, signals go to the ranks alone, and the status
and message come from the file that the ranks find in $TANDEM_STATUS (line 1: status; the rest: message).

In the environment: NPROC, processes of this machine. MAX_RESTARTS, how often a run that crashed is started again.
NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT): several machines, each of which runs this with its own NODE_RANK.
They meet by torch elastic's static rendezvous; RDZV_TIMEOUT, seconds that they wait for each other before a start.
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
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from pipeline.hardware.accelerators import visible_gpus
from pipeline.process.commands import whole_number
from pipeline.process.errors import RecipeError
from pipeline.run_dir.checkpoints import by_step, step_of, take_lock
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import WRITER_WAIT_S, RunDirectory

PLACES = (ROOT / "pipeline" / "accelerate_configs", ROOT / "accelerate_configs")  # installed wheel, repository
CONFIGS = next(place for place in PLACES if place.is_dir())
FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
LOST = 70  # of the launcher: a rank was killed; $TANDEM_STATUS has the message
# What another start may fix: our bug or a flaky machine (1), a hang or a lost rank (70), a kill by something else than
# a wish to stop. A wrong recipe, bad data, no memory, a full disk or a diverged run would only end so again.
RESTARTABLE = (1, 70, *(128 + number for number in signal.Signals if number not in FORWARDED))


def choose(environ: Mapping[str, str], gpus: int) -> tuple[str, int]:
    """Return the config file's name and the number of processes. Raises RecipeError."""
    processes = whole_number(environ, "NPROC", gpus or 1, least=1)
    alone, together = "cpu", "cpu_2"
    if gpus:
        alone, together = "single_gpu", "ddp"
        if processes > gpus:
            raise RecipeError(
                f"NPROC is {processes}, but {gpus} GPUs are visible, and two processes cannot share one. Lower NPROC."
            )
    return (alone if processes == 1 else together), processes


def with_recipe(arguments: list[str], default_recipe: str) -> list[str]:
    """Return the arguments with the default recipe put in front when they name none."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        return arguments
    return [default_recipe, *arguments]


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The meeting point of one job's machines. node: number of this one; timeout_s: that it waits for the others."""

    nodes: int
    node: int
    address: str
    port: int
    timeout_s: int


def rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return the meeting point of the job's machines, None for a single one. Raises RecipeError."""
    nodes = whole_number(environ, "NNODES", 1, least=1)
    if nodes == 1:
        return None
    if "NODE_RANK" not in environ or "MASTER_ADDR" not in environ:
        raise RecipeError(
            f"NNODES is {nodes}, so every machine must know its place and where to meet. Set NODE_RANK (0 to "
            f"{nodes - 1}) and MASTER_ADDR (the first one's name)."
        )
    node = whole_number(environ, "NODE_RANK", 0, least=0)
    if node >= nodes:
        raise RecipeError(
            f"NODE_RANK is {node}, and NNODES is {nodes}: the machines are numbered 0 to {nodes - 1}. Write this "
            "one's number."
        )
    return Rendezvous(
        nodes=nodes,
        node=node,
        address=environ["MASTER_ADDR"],
        port=whole_number(environ, "MASTER_PORT", 29500, least=1),
        timeout_s=whole_number(environ, "RDZV_TIMEOUT", 600, least=1),
    )


def launch_command(
    config: str, processes: int, entry: str, arguments: list[str], *, meeting: Rendezvous | None
) -> list[str]:
    """Return the command of accelerate. processes: those of this machine."""
    nodes = []
    if meeting:
        processes *= meeting.nodes  # accelerate divides by the number of machines again
        nodes = ["--num_machines", str(meeting.nodes), "--machine_rank", str(meeting.node)]
        nodes += ["--main_process_ip", meeting.address, "--main_process_port", str(meeting.port)]
        nodes += ["--rdzv_conf", f"timeout={meeting.timeout_s}"]
    launcher = [sys.executable, str(Path(__file__).with_name("launcher.py"))]
    launcher += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), *nodes]
    launcher += ["--num_cpu_threads_per_process", "1"]  # stops a question; the entries share out the cores
    return [*launcher, entry, *arguments]


class Supervisor:
    """One `accelerate launch` and the ranks it started on this machine, which are its children. signals: what came so
    far."""

    def __init__(self, command: list[str], environ: Mapping[str, str], *, processes: int, signals: list[int]):
        self.processes, self.signals = processes, signals
        self.ranks: list[psutil.Process] = []
        # A session of its own keeps the terminal's Ctrl-C away from the launcher, which would kill the ranks.
        end = _end_with_parent if sys.platform == "linux" else None  # where there is none, Popen takes none
        self.launcher = psutil.Popen(command, env=dict(environ), start_new_session=True, preexec_fn=end)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
                signal.signal(number, self.forward)

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

    def wait(self) -> int:
        """Return the launcher's exit status, once it and all ranks are gone."""
        while True:
            # Ranks are looked for until all are here, and a signal then reaches each of them.
            poll_s = 0.1 if len(self.ranks) < self.processes else 1.0
            try:
                status = self.launcher.wait(timeout=poll_s)
                break
            except psutil.TimeoutExpired:
                self.find_ranks()
        psutil.wait_procs(self.ranks)
        return status


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


def stopped_status(number: int) -> int:
    """Return the status of a run that a signal stopped."""
    return 130 if number == signal.SIGINT else 75


def final_status(status_file: Path, launcher_status: int, signals: list[int]) -> tuple[int, str]:
    """Return the run's exit status and message: what the ranks wrote, else what the launcher and the signals say."""
    text = status_file.read_text() if status_file.exists() else ""
    if text:  # nothing on a full disk; the message is on the screen then
        number, _, message = text.partition("\n")
        return int(number), message.strip()
    if len(signals) > 1:
        name = signal.Signals(signals[-1]).name
        return 128 + signals[-1], (
            f"a second signal ({name}) ended the run at once. Run the same command again to continue from its newest "
            "checkpoint."
        )
    if signals:
        name = signal.Signals(signals[0]).name
        message = f"{name} came before training could answer it; nothing is lost. Run the same command again."
        return stopped_status(signals[0]), message
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
        take_lock(run.checkpoints, wait_s=WRITER_WAIT_S).release()
    begun = [row["step"] for row in read_rows(run.metrics) if row.get("event") == "attempt"]
    saved = [step_of(folder) or 0 for folder in by_step(run.checkpoints)]
    if not begun:
        return None
    return begun[-1], max(saved, default=0)


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


def run(command: list[str], environ: dict[str, str], *, processes: int, restarts: int) -> int:
    """Start the command, and again after a crash, `restarts` times at most; return the status of the last start."""
    signals: list[int] = []
    for left in range(restarts, -1, -1):
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            status_file = Path(folder) / "status"
            variables = {**environ, "TANDEM_STATUS": str(status_file)}
            launcher_status = Supervisor(command, variables, processes=processes, signals=signals).wait()
            status, message = final_status(status_file, launcher_status, signals)
            # The message of a single rank is the last line on the screen, unless the rank was killed and the launcher
            # wrote the message. After the message of several ranks the launcher has printed its own report.
            is_shown = processes == 1 and status_file.exists() and launcher_status != LOST
            if message and not is_shown:
                report(message)
            again = None if signals else worth_another_start(status, status_file, left=left)
        if signals and again is not None:  # it came while a killed run's last checkpoint was waited for
            return stopped_status(signals[0])
        if again is None:
            return status
        report(f"{again} ({restarts - left + 1} of MAX_RESTARTS={restarts})")
    raise AssertionError("unreachable")


def main(entry: str, default_recipe: str, arguments: list[str]) -> int:
    environ = dict(os.environ)
    gpus = len(visible_gpus(environ))
    try:
        config, processes = choose(environ, gpus)
        meeting, restarts = rendezvous(environ), whole_number(environ, "MAX_RESTARTS", 0, least=0)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return error.status
    if gpus > 1 and processes == 1:  # with more in sight Trainer would spread one process over all of them
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    arguments = with_recipe(arguments, default_recipe)
    count, device = "1 process", "a GPU"
    if processes > 1:
        count, device = f"{processes} processes", "GPUs"
    if not gpus:
        device = "the CPU"
    if meeting:
        config = "multi_node"
        count += " on each machine"
    what = f"{Path(entry).name} {' '.join(arguments)} (accelerate_configs/{config}.yaml)"
    with suppress(BrokenPipeError):  # a reader such as `head` has left; the run continues
        print(f"starting {count} on {device}: {what}", flush=True)
    command = launch_command(config, processes, entry, arguments, meeting=meeting)
    return run(command, environ, processes=processes, restarts=restarts)


def start(entry: str, default_recipe: str, arguments: list[str]) -> NoReturn:
    outcome = main(entry, default_recipe, arguments)
    with suppress(OSError):  # a terminal that was closed: at its own end Python would make 120 of the status
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(outcome)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2], sys.argv[3:])
