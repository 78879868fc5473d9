"""Measured speed of matrix products on this processor by dtype, kept in the cache: flags do not tell it.

An EPYC with avx512_bf16 and no AMX trains in bfloat16 1.8 times as fast as in float32, other processors emulate the type
and lose by it (docs/log.md). The measurement takes a fraction of a second on one thread.
"""

import hashlib
import importlib.util
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.hardware import cpu
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json

WIDTH = 512  # of the square matrices: as wide as the blocks of a small model
REPEATS = 8  # of each dtype in turn; the best counts, which other programs on the machine disturb least
FASTER = 1.5  # what bfloat16 must gain in the products, so that the step gains too: its other half stays as it is


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of one thread in square products, and when they were measured (seconds since 1970)."""

    float32: float
    bfloat16: float
    time: float

    @property
    def bfloat16_is_faster(self) -> bool:
        return self.bfloat16 >= FASTER * self.float32


_decided: list[bool] = []


def bfloat16_is_faster() -> bool:
    """Return whether bfloat16 is the faster type to train in here: as decided for all ranks, else as measured.

    Without torch, and nothing kept, the processor's flags are the guess.
    """
    if _decided:
        return _decided[0]
    rates = product_rates()
    if rates is not None:
        return rates.bfloat16_is_faster
    return bool({"amx_bf16", "avx512_bf16"} & cpu.cpu_flags())


def decide_for_all_ranks(faster: bool) -> None:
    """Use this answer in this process from now on: ranks that measured for themselves could train in two types."""
    _decided[:] = [faster]


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

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on several a product waits for the slowest, and another program makes one slow
    try:
        pairs = {
            dtype: [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(2)]
            for dtype in (torch.float32, torch.bfloat16)
        }
        best = dict.fromkeys(pairs, float("inf"))
        for repeat in range(1 + REPEATS):
            for dtype, (a, b) in pairs.items():
                began = time.perf_counter()
                a @ b
                if repeat:  # the first one looks for its kernel
                    best[dtype] = min(best[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    flops = 2 * WIDTH**3
    return ProductRates(float32=flops / best[torch.float32], bfloat16=flops / best[torch.bfloat16], time=time.time())


def _place() -> Path:
    flags = sorted(flag for flag in cpu.cpu_flags() if flag.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16")))
    machine = "\n".join([cpu.cpu_name(), *flags, version("torch")])
    return cache_dir() / "processors" / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
