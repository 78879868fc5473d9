"""`python -m pipeline.monitor`: GPU power, temperature and memory, and the host's load, as CSV beside any program."""

import argparse
import csv
import datetime
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, TextIO

from pipeline.artifacts.errors import CannotWriteError
from pipeline.artifacts.failures import exit_with_status
from pipeline.monitor.gpu import GpuSampler
from pipeline.monitor.host import HostSampler

GPU_COLUMNS = ["index", "name", "util_pct", "mem_busy_pct", "mem_used_gib", "mem_total_gib", "temp_c", "power_w", "power_pct", "sm_clock_mhz"]  # fmt: skip
HOST_COLUMNS = ["host/cpu_pct", "mem/host_used_pct", "disk/read_mb_s", "disk/write_mb_s", "net/sent_mb_s", "net/received_mb_s"]  # fmt: skip
COLUMNS = ["time", "host", *(f"gpu/{name}" for name in GPU_COLUMNS), *HOST_COLUMNS]


def rows(host: HostSampler, gpus: GpuSampler) -> list[dict[str, Any]]:
    """One row for each GPU, or a single one without; the host's numbers stand in each. Times are UTC."""
    common: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "host": socket.gethostname(),
    }
    common |= {name: value for name, value in host.sample().items() if name in COLUMNS}
    return [common | {f"gpu/{name}": value for name, value in row.items()} for row in gpus.sample() or [{}]]


def write_samples(output: TextIO, *, every_s: float, samples: int | None) -> None:
    """Samples to CSV until that many are written, or until interrupted."""
    host, gpus = HostSampler(), GpuSampler()
    if gpus.why_none:
        print(gpus.why_none, file=sys.stderr)
    table = csv.DictWriter(output, COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    host.sample()  # rates begin here
    due = time.monotonic()
    while samples is None or samples > 0:
        due += every_s
        time.sleep(max(0.0, due - time.monotonic()))
        table.writerows(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows(host, gpus)
        )
        output.flush()
        samples = None if samples is None else samples - 1


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.monitor", description=__doc__)
    parser.add_argument("-o", "--output", help="file to write; default the terminal")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between samples (default 1)")
    parser.add_argument("--samples", type=int, help="stop after that many; default at Ctrl-C or SIGTERM")
    options = parser.parse_args(arguments)
    if options.every <= 0:
        parser.error(f"--every is {options.every:g}; write seconds above 0")
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.output is None:
            # The stream as it was opened: what prints a run's words goes on without a reader, and this must end without one.
            write_samples(sys.__stdout__ or sys.stdout, every_s=options.every, samples=options.samples)
        else:
            with open(options.output, "w", newline="") as file:
                write_samples(file, every_s=options.every, samples=options.samples)
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
