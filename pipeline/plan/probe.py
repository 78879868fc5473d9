"""Steps measured on this machine for a plan or a sweep: seconds a step, and the most memory that a process took.

Child processes make real steps of the recipe's model, at its micro-batch and with its optimizer, on rows of random
tokens (run/probing.py): what a row says does not change its time.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from pipeline.hardware.processor import available_bytes
from pipeline.process import commands

START_S = 180.0  # for imports, the model, and the first step with its compilation
CPU_SHARE = 0.5  # of a CPU's free memory that a probe may take by arithmetic: more would push others out


@dataclass(frozen=True)
class Probe:
    """The measured steps: seconds of their median and of the first one, which compiles.

    peak_bytes: of one process, resident memory where it trains on the CPU, else allocated on the device.
    """

    step_s: float
    steps: int
    first_step_s: float
    peak_bytes: int


class NotMeasured(Exception):
    """Raised when a probe cannot measure the run; its text is the reason, half a sentence."""


def measure(argv: list[str], *, processes: int, seconds: float, on_cpu: bool, needed_bytes: int | None) -> Probe:
    """Probe the run of this command line for about so many seconds of steps. Raises NotMeasured.

    needed_bytes: of one process, by arithmetic.
    """
    free = CPU_SHARE * available_bytes() / processes
    if on_cpu and needed_bytes is not None and needed_bytes > free:
        raise NotMeasured(
            f"a process takes about {needed_bytes / 2**30:.1f} GiB, and its part of half the free memory is "
            f"{free / 2**30:.1f} GiB"
        )
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    child = subprocess.Popen(
        [sys.executable, *launcher, "-m", "pipeline.run.probing", str(seconds), *argv],
        env=commands.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # Compilation is in START_S; a slow machine may need thrice the time for its few steps.
    limit = START_S + 3 * seconds
    try:
        out, stderr = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"three steps took more than {limit:.0f} s (--probe SECONDS gives them more)") from None
    finally:
        with suppress(ProcessLookupError):  # and all that it has started
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        child.wait()
    results = [line for line in out.splitlines() if line.startswith('{"step_s"')]
    if not results:
        lines = (stderr.strip() or out.strip() or f"status {child.returncode}").splitlines()
        raise NotMeasured(f"its process ended with: {lines[-1]}")
    return Probe(**json.loads(results[-1]))
