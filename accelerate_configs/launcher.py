"""`accelerate launch` as launch.py starts it: says in $TANDEM_STATUS which rank was killed by which signal.

Only the launcher sees how the ranks end. A rank that was killed has said nothing, and those that are left know at most
that it is gone.
"""

import os
import signal
import sys
from pathlib import Path
from subprocess import CalledProcessError

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LOST = 70
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # before a rank could answer them
# What ranks say that are left behind: our bug (1, an error in a collective), a lost rank, SIGTERM (the launcher's, to them).
LEFT_BEHIND = (1, LOST, 75)


def report(rank: int, number: int) -> None:
    """The killed rank's word in the place of what the others said."""
    file = Path(os.environ["TANDEM_STATUS"])
    told = file.read_text().split() if file.exists() else []  # nothing of a rank that found its disk full
    if told and int(told[0]) not in LEFT_BEHIND:
        return
    reasons = " (on Linux often the kernel, when memory ran out)" if number == signal.SIGKILL else ""
    file.write_text(
        f"{LOST}\nrank {rank} was lost: killed by {signal.Signals(number).name}{reasons}, which ended the run. The last whole checkpoint is good. "
        "Run the same command again to go on from it.\n"
    )


def main() -> int:
    try:
        launch.main()
    except CalledProcessError as error:  # of one process
        statuses = {0: error.returncode}
    except ChildFailedError as error:
        # All of them: one that was left behind may end so soon that torch takes its failure for the first.
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    else:
        return 0
    killed = {rank: -status for rank, status in statuses.items() if status < 0 and -status not in ASKED}
    if killed and "TANDEM_STATUS" in os.environ:
        report(*min(killed.items()))
    return 1  # told by the rank itself, or above: no traceback of the launcher


if __name__ == "__main__":
    sys.exit(main())
