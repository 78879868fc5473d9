"""The stand-in for NVIDIA's library, compiled where there is a compiler, and what its GPU 0 draws."""

import csv
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in_nvml.c")
OMEGA = math.pi


def compiled(folder: Path) -> Path | None:
    """The library for LD_PRELOAD: pynvml finds it by its SONAME. None without a compiler."""
    if shutil.which("cc") is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-lm"], check=True)
    return library


def joules(start: float, end: float) -> float:
    """What GPU 0 draws between two times: the integral of 300 W + 100 W sin(2 pi t / 2 s)."""
    return 300 * (end - start) - 100 / OMEGA * (math.cos(OMEGA * (end % 2)) - math.cos(OMEGA * (start % 2)))


def read_samples(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows that are whole, by column, what was not measured left out."""
    with open(path, newline="") as file:
        for row in csv.DictReader(line for line in file if line.endswith("\n")):
            yield {name: cell for name, cell in row.items() if cell}
