"""The measured speed of matrix products on this processor, and what follows from it: the format and the threads it
trains with.

Its flags do not tell it: an EPYC with avx512_bf16 and no AMX trains in bfloat16 1.8 times as fast as in float32, other
processors emulate the type and lose by it (docs/log.md). The measurement takes a fraction of a second on one thread,
and is kept in the cache.
"""

import hashlib
import importlib.util
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.hardware.processor import cpu_flags, cpu_name, physical_cores, usable_cores
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json

WIDTH = 512  # of the square matrices: as wide as the blocks of a small model
REPEATS = 8  # of each dtype in turn; the best counts, which other programs on the machine disturb least
# Of both threads of a core over one: they share its units, and the other programs of the run find a thread free
GAIN = 1.1
FASTER = 1.5  # what bfloat16 must gain in the products, so that the step gains too: its other half stays as it is
_decided: list[bool] = []  # what all ranks train with; empty until it is decided


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of one thread in square products, and when they were measured (seconds since 1970)."""

    float32: float
    bfloat16: float
    time: float

    @property
    def bfloat16_is_faster(self) -> bool:
        return self.bfloat16 >= FASTER * self.float32


def product_rates() -> ProductRates | None:
    """Return the rates of this processor as kept in the cache, else measured now; None without torch."""
    rates = kept_rates()
    if rates is None and importlib.util.find_spec("torch") is not None:
        rates = measure()
        with suppress(OSError, CannotWriteError):
            write_sealed_json(_place(), asdict(rates))
    return rates


def kept_rates() -> ProductRates | None:
    """Return what was measured on such a processor with this torch, without torch; None when nothing was."""
    try:
        return ProductRates(**read_sealed_json(_place()))
    except (OSError, ValueError, TypeError, PackageNotFoundError, CannotWriteError):
        return None


def measure() -> ProductRates:
    """Multiply matrices of both dtypes in turn on one thread, and return the best rate of each."""
    import torch

    # Ones: the time of a product does not depend on its numbers, but for denormal ones.
    factors = {dtype: torch.ones(2, WIDTH, WIDTH, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    # On several threads a product waits for the slowest, and another program makes one slow.
    best = _seconds_of_products(factors, threads=1)
    flops = 2 * WIDTH**3
    return ProductRates(float32=flops / best[torch.float32], bfloat16=flops / best[torch.bfloat16], time=time.time())


def _seconds_of_products(factors: dict[Any, Any], *, threads: int) -> dict[Any, float]:
    """Return the best time of the product of each two matrices, multiplied in turn on so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = dict.fromkeys(factors, float("inf"))
    try:
        for repeat in range(1 + REPEATS):
            for dtype, (a, b) in factors.items():
                began = time.perf_counter()
                a @ b
                if repeat:  # the first one looks for its kernel
                    best[dtype] = min(best[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return best


def best_threads() -> int:
    """Return the threads to train with: one a core, or all that the cores have where products are faster so by GAIN.

    They are measured once on a machine with two threads a core, and kept.
    """
    physical, usable = physical_cores(), usable_cores()
    if physical == usable:
        return usable
    kept = f".{physical}-{usable}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, PackageNotFoundError, CannotWriteError):
        return usable if read_sealed_json(_place(kept))["gain"] >= GAIN else physical
    gain = seconds_of_product(physical) / seconds_of_product(usable)
    with suppress(OSError, CannotWriteError):
        write_sealed_json(_place(kept), {"gain": gain, "time": time.time()})
    return usable if gain >= GAIN else physical


def seconds_of_product(threads: int) -> float:
    """Return the best time of a matrix product on so many threads, in the dtype that is the faster one here."""
    import torch

    dtype = torch.bfloat16 if bfloat16_is_faster() else torch.float32
    a, b = torch.ones(2, 4 * WIDTH, WIDTH, dtype=dtype)
    return _seconds_of_products({dtype: (a, b.T)}, threads=threads)[dtype]


def set_threads(local_processes: int = 1, *, kept: int | None = None) -> int:
    """Share the cores out among the processes of this machine, and return the threads that torch now uses.

    Where two threads share a core, one of each core is used unless both were measured to be faster by best_threads.
    The number changes the last bits of fp32 sums, and launchers set it to 1 unasked: it is set here, and printed and
    saved by the caller. kept: of a run that continues, which stays where it is one of the two numbers of this machine,
    whatever is measured now.
    """
    import torch

    choices = {max(1, cores // local_processes) for cores in (physical_cores(), usable_cores())}
    if kept not in choices:
        kept = max(1, best_threads() // local_processes)
    torch.set_num_threads(kept)
    return kept


def bfloat16_is_faster() -> bool:
    """Return whether bfloat16 is the faster type to train in here: as decided for all ranks, else as measured.

    Without torch, and nothing kept, the processor's flags are the guess.
    """
    if _decided:
        return _decided[0]
    rates = product_rates()
    if rates is not None:
        return rates.bfloat16_is_faster
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


def decide_for_all_ranks(faster: bool) -> None:
    """Use this answer in this process from now on: ranks that measured for themselves could train in two types."""
    _decided[:] = [faster]


def _place(suffix: str = ".json") -> Path:
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16")))
    machine = "\n".join([cpu_name(), *flags, version("torch")])
    return cache_dir() / "processors" / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}{suffix}"
