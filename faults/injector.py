"""Faults in file calls and in the clock, by a preloaded library: nothing in the package knows of it."""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("file_calls.c", "clock.c")]
VARIABLES = ("FAULTS_UNDER", "FAULTS_COUNTER", "FAULTS", "FAULTS_SLOW", "FAULTS_LOG", "FAULTS_CLOCK")


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, sources: Sequence[Path] = SOURCES) -> Path:
    """The library, compiled once for these sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    library = folder / f"faults-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [
            str(compiler()),
            "-shared",
            "-fPIC",
            "-O2",
            "-Wall",
            "-Wextra",
            "-o",
            str(made),
            *map(str, sources),
        ]
        subprocess.run([*command, "-ldl"], check=True)
        made.rename(library)
    return library


def is_preloaded() -> bool:
    return hasattr(ctypes.CDLL(None), "faults_reload")


def reload() -> None:
    """Let the library of this very process read the environment again, after a fork that changed it."""
    for (
        name
    ) in VARIABLES:  # os.environ writes through to the C library; what is not there any more has to leave it too
        if name not in os.environ:
            os.unsetenv(name)
    ctypes.CDLL(None).faults_reload()
    ctypes.CDLL(None).clock_reload()


def faults(
    under: Path | None = None,
    *,
    rules: str = "",
    counter: Path | None = None,
    log: Path | None = None,
    slow_us: int = 0,
    slow_under: Path | None = None,
) -> dict[str, str]:
    """The environment that asks for these faults; see file_calls.c."""
    asked = {}
    if under is not None and counter is not None:
        asked = {"FAULTS_UNDER": str(under), "FAULTS_COUNTER": str(counter), "FAULTS": rules}
        counter.unlink(missing_ok=True)
    if log is not None:
        asked["FAULTS_LOG"] = str(log)
    if slow_us:
        asked["FAULTS_SLOW"] = f"{slow_us}:{slow_under}"
    return asked


def calls_so_far(counter: Path) -> int:
    return struct.unpack("I", counter.read_bytes()[:4])[0] if counter.exists() else 0


def logged_calls(log: Path) -> list[tuple[int, str, str]]:
    """(number, kind, path) of every call, in order."""
    calls = []
    for line in log.read_text().splitlines():
        number, kind, path = line.split(" ", 2)
        calls.append((int(number), kind, path))
    return sorted(calls)
