"""`python -m pipeline.monitor`: GPU power, temperature and memory, and the host's load, as CSV next to any program."""

import argparse
import signal
import socket
import sys
import time
from types import FrameType
from typing import TextIO

from pipeline.monitor.gpus import GpuSampler
from pipeline.monitor.host import HostNow, HostSampler
from pipeline.monitor.pace import HIGHEST_HZ, Pace
from pipeline.monitor.samples_file import HOST_COLUMNS, SampleTable
from pipeline.process.commands import program
from pipeline.process.errors import CannotWriteError
from pipeline.run_dir.failures import exit_with_status


def write_samples(output: TextIO, *, hz: float, samples: int | None) -> None:
    """Write samples as CSV until that many are written, or until interrupted; the rate that was reached to stderr at
    the end."""
    gpus, pace = GpuSampler(), Pace(hz)
    if gpus.why_none:
        print(gpus.why_none, file=sys.stderr)
    host = HostNow() if gpus.gpus else HostSampler()  # without GPUs there is nothing else to tell
    host.sample()  # rates begin here
    table = SampleTable(output, host=socket.gethostname(), attempt=None)
    pace.skip()
    try:
        while samples is None or pace.samples < samples:
            time.sleep(pace.wait_s())
            table.write(pace.mark(), gpus.sample(), {k: v for k, v in host.sample().items() if k in HOST_COLUMNS})
    finally:
        table.close()
        print(f"{gpus}: {pace.summary()}", file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=program("monitor"), description=__doc__)
    parser.add_argument("-o", "--output", help="file to write; default the terminal")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between samples (default 1)")
    rate.add_argument(
        "--hz", type=float, help=f"samples a second instead, up to {HIGHEST_HZ:g}; the host's numbers once a second"
    )
    parser.add_argument("--samples", type=int, help="stop after that many; default at Ctrl-C or SIGTERM")
    options = parser.parse_args(arguments)
    if options.every <= 0:
        parser.error(f"--every is {options.every:g}; write seconds above 0")
    hz = 1 / options.every if options.hz is None else options.hz
    if not 0 < hz <= HIGHEST_HZ:
        parser.error(f"{hz:g} samples a second; it must be above 0 and at most {HIGHEST_HZ:g}")
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.output is None:
            # The stream as it was opened: the stream of a run works on without a reader, and this must end
            # without one.
            write_samples(sys.__stdout__ or sys.stdout, hz=hz, samples=options.samples)
        else:
            with open(options.output, "w", newline="") as file:
                write_samples(file, hz=hz, samples=options.samples)
    except KeyboardInterrupt:
        return 0  # the way to end it; every sample is written
    except BrokenPipeError:
        return 0  # the reader, such as `head`, has left
    except OSError as error:
        raise CannotWriteError(
            f"{options.output or 'the terminal'}: cannot be written ({error.strerror}). Give another --output."
        ) from None
    return 0


if __name__ == "__main__":
    exit_with_status(main)
