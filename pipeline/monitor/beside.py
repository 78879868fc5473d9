"""The training's side of sampling GPUs: start the sampler, read what it has added up, and hear its last words."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.monitor import sampler, totals
from pipeline.monitor.gpu import why_no_driver

LAST_WORDS_S = 10.0  # a driver that hangs must not hold the end of a run


class GpuMonitor:
    """GPUs of this host, sampled into a CSV from a process of its own until `stop` or the end of this one.

    why_none says why there is none; a process that ends early says so in the reading that notices it.
    """

    def __init__(self, output: Path, *, attempt: int, hz: float, gpus: Sequence[str] = ()):
        self.process: subprocess.Popen[str] | None = None
        self.why_none = why_no_driver()
        if self.why_none:
            return
        with tempfile.TemporaryFile() as shared:
            shared.truncate(totals.SIZE)
            self.totals = totals.TotalsReader(shared.fileno())
            command = [sys.executable, str(sampler.__file__), str(output), "--attempt", str(attempt), "--hz", str(hz)]
            self.process = subprocess.Popen(
                [*command, "--descriptor", str(shared.fileno()), "--gpus", *gpus],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else who reads the training's output would wait for it, too
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[shared.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is the run's; this ends with it
            )

    def read(self) -> dict[str, float]:
        """See TotalsReader.read."""
        if self.process is None:
            return {}
        if self.process.poll() is not None:
            self.stop()
            return {}
        return self.totals.read()

    def stop(self) -> None:
        """End the sampler and print what it says."""
        if self.process is None:
            return
        process, self.process = self.process, None
        try:
            words = process.communicate(timeout=LAST_WORDS_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            words = process.communicate()[1]
        if words.strip():
            print(words.strip(), flush=True)
