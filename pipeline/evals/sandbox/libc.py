"""Calls of the C library that Python has no name for."""

import ctypes
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Result of the function; OSError with its name where it fails or does not exist."""
    # An int is passed as 64 bits: a C int would leave half of a register of `syscall` and `prctl` undefined.
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    try:
        result = getattr(_libc, name)(*wide)
    except AttributeError as error:
        raise OSError(f"{name}: this C library has no such function") from error
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result
