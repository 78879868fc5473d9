"""The process's sign of life: a number that grows with every piece of work.

Whatever may last while a run trains calls `beat` after each piece (micro-batch, batch of an evaluation, token, shard),
and callbacks/hang_watch.py reads it from another thread. One process has one, so that no call has to carry it through.
"""

_beats = 0


def beat() -> None:
    """Note that some work was done. No lock, clock or system call: it is called in every step."""
    global _beats
    _beats += 1


def beats() -> int:
    return _beats
