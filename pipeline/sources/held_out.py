"""The rows of a one-file source that are kept from training.

A source of several files gives its last one to validation. One of a single file gives rows: of every `period`
consecutive rows one, at a place drawn by a hash, so that neither a sorted nor an interleaved file biases the choice.
"""

import hashlib

MIN_ROWS = 8  # Held out at least, where the file has twice as many.
MAX_PERIOD = 100  # One per cent of a large file.


def period_of(rows: int) -> int:
    """Of how many consecutive rows one is held out; 0 when the file has too few rows to part with one."""
    return 0 if rows < 2 else max(2, min(MAX_PERIOD, rows // MIN_ROWS))


def is_held_out(row: int, period: int) -> bool:
    group, place = divmod(row, period)
    drawn = int.from_bytes(hashlib.blake2b(str(group).encode(), digest_size=8).digest(), "big")
    return drawn % period == place
