"""Start an entry through `accelerate launch` as this machine allows, pass signals on, and leave with the run's status.

    python accelerate_configs/launch.py ENTRY DEFAULT_RECIPE [RECIPE] [section.key=value ...]

`accelerate launch` hands on neither signals nor exit statuses: a signal for the launcher would kill it or the ranks
before they have saved. Here the launcher lives in a session of its own, signals go to the ranks alone, and the status
and message come from the file that the ranks find in $TANDEM_STATUS (line 1: status; the rest: message).
"""

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

CONFIGS = Path(__file__).parent
sys.path[0] = str(CONFIGS.parent)

from pipeline.hardware.visible import visible_gpus  # noqa: E402 - found only from the root

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# glibc gives large blocks back to the system after every use and faults the pages in again, while a training step takes
# and frees the same blocks forever: 15 to 27 % of the CPU time of a small model's step.
CPU_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def choose(nproc: str | None, gpus: int) -> tuple[str, int]:
    """The config file's name and the number of processes. Raises ValueError with a sentence for the user."""
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
    """The arguments with the default recipe put in front when they name none."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        return arguments
    return [default_recipe, *arguments]


def launch_command(config: str, processes: int, entry: str, arguments: list[str]) -> list[str]:
    launcher = [sys.executable, str(CONFIGS / "launcher.py")]
    launcher += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes)]
    launcher += ["--num_cpu_threads_per_process", "1"]  # only to be asked nothing: the entries share out the cores
    return [*launcher, entry, *arguments]


class Supervisor:
    """One `accelerate launch` and the ranks it started, which are its children."""

    def __init__(self, command: list[str], environ: Mapping[str, str]):
        self.signals: list[int] = []
        self.ranks: list[psutil.Process] = []
        # A session of its own keeps the terminal's Ctrl-C away from the launcher, which would kill the ranks.
        self.launcher = psutil.Popen(command, env=dict(environ), start_new_session=True, preexec_fn=_end_with_parent)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
                signal.signal(number, self.forward)

    def find_ranks(self) -> None:
        with suppress(psutil.NoSuchProcess):  # the launcher has ended; ranks found before are waited for all the same
            self.ranks += [child for child in self.launcher.children() if child not in self.ranks]

    def forward(self, number: int, _frame: object) -> None:
        self.signals.append(number)
        self.find_ranks()
        for process in self.ranks or [self.launcher]:  # without a rank there is nothing to save either
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, processes: int) -> int:
        """The launcher's exit status, once it and all ranks are gone."""
        while len(self.ranks) < processes:
            try:
                return self.launcher.wait(timeout=0.1)
            except psutil.TimeoutExpired:
                self.find_ranks()
        status = self.launcher.wait()
        psutil.wait_procs(self.ranks)
        return status


def _end_with_parent() -> None:
    """SIGTERM for the launcher when this script is killed: its ranks then save and end, instead of training on unseen."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def final_status(status_file: Path, launcher_status: int, signals: list[int]) -> tuple[int, str]:
    """The run's exit status and message: the ranks' own word, else what the launcher and the signals tell."""
    if status_file.exists():
        status, _, message = status_file.read_text().partition("\n")
        return int(status), message.strip()
    if signals:
        name = signal.Signals(signals[-1]).name
        return 128 + signals[-1], f"{name} came before training could answer it; this call saved nothing. Run it again."
    if launcher_status < 0:
        name = signal.Signals(-launcher_status).name
        return 128 - launcher_status, f"the launcher was ended by {name}. Run the same command again to continue."
    return launcher_status, ""


def main(entry: str, default_recipe: str, arguments: list[str]) -> int:
    environ = dict(os.environ)
    gpus = len(visible_gpus(environ))
    try:
        config, processes = choose(environ.get("NPROC"), gpus)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 64
    if gpus > 1 and processes == 1:  # with more in sight Trainer would spread one process over all of them
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not gpus:
        environ = {**CPU_ALLOCATOR, **environ}
    arguments = with_recipe(arguments, default_recipe)
    count = "1 process" if processes == 1 else f"{processes} processes"
    print(f"accelerate_configs/{config}.yaml, {count}: {Path(entry).name} {' '.join(arguments)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        status_file = Path(folder) / "status"
        environ["TANDEM_STATUS"] = str(status_file)
        supervisor = Supervisor(launch_command(config, processes, entry, arguments), environ)
        launcher_status = supervisor.wait(processes)
        status, message = final_status(status_file, launcher_status, supervisor.signals)
        # One rank's message still stands on the screen; of several the launcher's own report has pushed it away.
        if message and (processes > 1 or not status_file.exists()):
            print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
