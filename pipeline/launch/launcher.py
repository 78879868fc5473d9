"""`accelerate launch` as launch.py starts it: says in $TANDEM_STATUS which rank was killed by which signal.

Only the launcher sees how the ranks end. A rank that was killed has printed nothing, and those that are left know at
most that it is gone. One process alone is started here, with the variables that accelerate would set: importing
accelerate and torch for that takes more than a second of every start.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # launch.py says what happened; an import would print a traceback

import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import yaml  # noqa: E402

# What the shipped configs of one process say apart from `use_cpu`. One that says anything else is left to accelerate.
ALONE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_machines": 1,
    "num_processes": 1,
    "machine_rank": 0,
    "mixed_precision": "no",
}
LOST = 70
ASKED = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)  # before a rank could answer them
# What ranks say that are left behind: our bug (1, an error in a collective), a lost rank, SIGTERM (the launcher's, to
# them).
LEFT_BEHIND = (1, LOST, 75)


def write_status(message: str) -> int:
    """Write the message for the script that waits, and return the status of a lost rank."""
    if "TANDEM_STATUS" in os.environ:
        Path(os.environ["TANDEM_STATUS"]).write_text(f"{LOST}\n{message}\n")
    return LOST


def report(rank: int, number: int) -> None:
    """Write which rank was killed in place of what the others wrote."""
    file = Path(os.environ["TANDEM_STATUS"])
    words = file.read_text().split() if file.exists() else []  # nothing of a rank that found its disk full
    if words and int(words[0]) not in LEFT_BEHIND:
        return
    killer = signal.Signals(number).name
    if killer == "SIGKILL":
        killer += " (on Linux often the kernel, when memory ran out)"
    write_status(
        f"rank {rank} was lost: killed by {killer}, which ended the run. The "
        "last whole checkpoint is good. Run the same command again to continue from it."
    )


def alone(config: dict[str, object], threads: str) -> dict[str, str] | None:
    """Return the variables that `accelerate launch` gives to one process; None for a config that only accelerate
    understands."""
    use_cpu = config.get("use_cpu")
    if not isinstance(use_cpu, bool) or config != {**ALONE, "use_cpu": use_cpu}:
        return None
    on_cpu = {}
    if use_cpu:
        on_cpu = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return {
        "ACCELERATE_USE_CPU": str(use_cpu),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": threads,
        **on_cpu,
    }


def start(arguments: list[str]) -> dict[int, int]:
    """Return exit statuses by rank, -n after signal n: of one process, of those that failed of several, or none."""
    match arguments:
        case ["--config_file", file, "--num_processes", "1", "--num_cpu_threads_per_process", threads, *entry]:
            if variables := alone(yaml.safe_load(Path(file).read_text()), threads):
                return {0: subprocess.Popen([sys.executable, *entry], env={**os.environ, **variables}).wait()}

    from accelerate.commands import launch
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch.main()
    except DistError as error:
        reason = str(error).splitlines()[0]
        sys.exit(write_status(f"the machines of the job did not meet ({reason}). Look at the output of the others."))
    except subprocess.CalledProcessError as error:  # of one process
        return {0: error.returncode}
    except ChildFailedError as error:
        # All of them: one that was left behind may end so soon that torch takes its failure for the first.
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def main() -> int:
    statuses = start(sys.argv[1:])
    killed = {rank: -status for rank, status in statuses.items() if status < 0 and -status not in ASKED}
    if killed and "TANDEM_STATUS" in os.environ:
        report(*min(killed.items()))
        return LOST
    return int(any(statuses.values()))  # the rank has printed why: no traceback of the launcher


if __name__ == "__main__":
    sys.exit(main())
