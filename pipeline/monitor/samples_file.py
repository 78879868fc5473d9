"""Samples as CSV: one row for each GPU and sample, the host's numbers next to them; appended over attempts."""

import csv
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import Any, TextIO

from pipeline.process.storage import note_once

GPU_COLUMNS = [
    "index", "name", "util_pct", "mem_busy_pct", "mem_used_gib", "mem_total_gib", "temp_c", "power_w", "power_pct",
    "sm_clock_mhz", "mem_clock_mhz", "throttle", "energy_j",
]  # fmt: skip
HOST_COLUMNS = [
    "host/cpu_pct", "mem/host_used_pct", "disk/read_mb_s", "disk/write_mb_s", "net/sent_mb_s", "net/received_mb_s",
]  # fmt: skip
COLUMNS = ["time", "attempt", "host", *(f"gpu/{name}" for name in GPU_COLUMNS), *HOST_COLUMNS]
FLUSH_S = 1.0
QUOTED = re.compile(rb'"[^"]*"')
LONGEST_ROW = 1 << 16  # bytes, far above what a row can have
# Of GPU_COLUMNS, what is a number that changes.
NUMBERS = [
    "util_pct", "mem_busy_pct", "mem_used_gib", "temp_c", "power_w", "power_pct", "sm_clock_mhz", "mem_clock_mhz",
    "energy_j",
]  # fmt: skip


class SampleTable:
    """Writes samples; what was written is in the file at most FLUSH_S later. attempt: None outside of a run."""

    def __init__(self, output: TextIO, *, host: str, attempt: int | None, header: bool = True):
        self.output, self.host, self.attempt = output, host, attempt
        self.rows = csv.writer(output, lineterminator="\n")
        self.flushed = 0.0
        if header:
            self.rows.writerow(COLUMNS)

    @classmethod
    def appended(cls, path: Path, *, host: str, attempt: int) -> "SampleTable":
        """Return the table, behind what earlier attempts wrote; a last line torn by a crash is cut off."""
        # Open as long as it is sampled.
        file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        whole = _whole_bytes(path)
        file.truncate(whole)
        return cls(file, host=host, attempt=attempt, header=whole == 0)

    def write(self, time_s: float, gpus: list[dict[str, Any]], host: dict[str, float]) -> None:
        """Write one sample of all GPUs; without a GPU one row of the host's numbers."""
        common = {"time": f"{time_s:.4f}", "attempt": self.attempt, "host": self.host} | host
        for gpu in gpus or [{}]:
            row = common | {f"gpu/{name}": value for name, value in gpu.items()}
            self.rows.writerow([_text(row.get(name)) for name in COLUMNS])
        if (now := time.monotonic()) - self.flushed >= FLUSH_S:
            self.output.flush()
            self.flushed = now

    def close(self) -> None:
        self.output.flush()


def _whole_bytes(path: Path) -> int:
    """Return bytes of the file up to the end of its last whole line."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - LONGEST_ROW, 0))
        tail = file.read()
    return size - len(tail) + tail.rfind(b"\n") + 1


def _text(value: Any) -> Any:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


@dataclass(kw_only=True)
class GpuSeries:
    """All samples of one GPU in one attempt. numbers: by name, as long as times (seconds since 1970), NaN where it did
    not tell; reasons: how many samples had which throttle reasons."""

    attempt: int
    index: int
    name: str
    times: Sequence[float]
    numbers: dict[str, Sequence[float]]
    reasons: Counter[str] = field(default_factory=Counter)

    def values(self, name: str) -> list[float]:
        return [value for value in self.numbers[name] if not isnan(value)]


def _whole_lines(lines: bytes) -> bytes:
    """Return the lines that have as many cells as the first one, and no quote that is left open."""
    commas = lines.partition(b"\n")[0].count(b",")
    whole = [line for line in lines.split(b"\n") if QUOTED.sub(b"", line).count(b",") == commas]
    return b"\n".join(line for line in whole if line.count(b'"') % 2 == 0 and b"\0" not in line) + b"\n"


def read_gpus(path: str | Path) -> list[GpuSeries]:
    """Return the GPUs of a file of samples, attempt by attempt; a line that is no whole sample is left out."""
    import pandas as pd  # a monitor only writes, and a run reads only what an earlier attempt has written

    if not Path(path).exists():
        return []
    # Behind the last line end is what a crash has torn: a number in it may lack digits.
    lines, _, _ = Path(path).read_bytes().rpartition(b"\n")
    columns = {f"gpu/{name}": name for name in NUMBERS}
    numeric = ["time", "attempt", "gpu/index", *columns]
    try:
        samples = pd.read_csv(
            BytesIO(_whole_lines(lines)),
            usecols=[*numeric, "gpu/name", "gpu/throttle"],
            dtype=str,
            keep_default_na=False,
            index_col=False,
            on_bad_lines="skip",
            encoding_errors="replace",
        )
    except ValueError:
        if lines:
            note_once(f"{path}: has not the columns of GPU samples; it is left out")
        return []
    samples["attempt"] = samples["attempt"].replace("", "1")  # outside of a run there is none
    values = samples[numeric].apply(pd.to_numeric, errors="coerce")
    is_text = (values.isna() & ~samples[numeric].isin(["", "nan"])).any(axis=1)
    is_whole = values[["time", "gpu/index"]].notna().all(axis=1) & (values["gpu/index"] % 1 == 0) & ~is_text
    whole = samples.assign(**values)[is_whole]
    return [
        GpuSeries(
            attempt=int(attempt),
            index=int(index),
            name=rows["gpu/name"].iloc[0],
            times=rows["time"].to_numpy(),
            numbers={name: rows[column].to_numpy() for column, name in columns.items()},
            reasons=Counter(filter(None, rows["gpu/throttle"])),
        )
        for (attempt, index), rows in whole.groupby(["attempt", "gpu/index"], sort=False)
    ]
