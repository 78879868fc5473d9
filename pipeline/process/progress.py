"""Progress of what takes long: a bar on a terminal, elsewhere plain lines at intervals; on the first rank alone.

Bars are on stderr and vanish when they are done, so that what is printed meanwhile (`write`) and every log keep their
lines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm

FIRST_LINE_S = 10.0  # what is done sooner needs no line
LINE_EVERY_S = 30.0
REDRAW_S = 0.5
MANY = 10_000  # from where on a bar counts in thousands and millions
LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
DETAIL_EVERY_S = 2.0  # may read many files

tqdm.set_lock(threading.RLock())  # its own is of multiprocessing, which starts a process on some systems


def in_colour() -> bool:
    """Return whether what is printed may have colours: on a terminal, where NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def on_terminal() -> bool:
    """Return whether somebody looks at a bar on stderr: a terminal that can go back in its line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Bar(tqdm):
    """A bar of tqdm on a terminal, elsewhere lines at intervals. unit: of what is counted; shown: default on the first
    rank alone."""

    def __init__(self, name: str, *, total: float | None = None, unit: str = "batches", shown: bool | None = None):
        if shown is None:
            shown = int(os.environ.get("RANK", 0)) == 0
        self.is_line = not on_terminal()
        super().__init__(
            desc=name,
            total=total,
            unit=unit,
            unit_scale=(total or MANY) >= MANY,
            leave=False,
            dynamic_ncols=True,
            bar_format=LINE if self.is_line and total else None,
            file=sys.stderr,
            disable=not shown,
            # Drawn with the first thing that is done: what waits for that may have the line.
            delay=FIRST_LINE_S if self.is_line else 0.001,
            mininterval=LINE_EVERY_S if self.is_line else 0.1,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if not self.is_line:
            return super().display(msg, pos)
        text = str(self) if msg is None else msg
        if text:
            print(text, file=sys.stderr, flush=True)
        return True

    def reach(self, done: float, *, total: float | None = None) -> None:
        """Say how much is done in all, and of how much where that is known by now."""
        if total is not None:
            self.total = total
        self.update(max(done - self.n, 0))


def count_text(count: float) -> str:
    """Return a count in the unit that shows it: 9, 12.3k, 1.2M, 10.5G."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.99995 * size:
            return f"{count / size:,.1f}{letter}"
    if count < 10 and count != int(count):
        return f"{count:.1f}"
    return f"{count:.0f}"


def short_count(count: float) -> str:
    """Return a count in three digits, as models and data are called: 1.16M, 10B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:  # 999,960 is 1,000k, which is 1M
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def seconds_text(seconds: float) -> str:
    """Return a time as people say it: 9 s, 4.2 min, 3.1 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def progress(
    items: Iterable, *, name: str, unit: str = "batches", total: int | None = None, shown: bool | None = None
) -> Iterator[Any]:
    """Yield the items, with a bar while they are gone through. total: their number, where they do not know it
    themselves.

    The first of them may be long in coming back, as it compiles: until then the time is shown.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(name, total=total, unit=unit, shown=shown) as bar, ExitStack() as first:
        if not bar.disable:
            first.enter_context(waiting(name, after_s=1.0))  # redraws the line that the bar will have
        for item in items:
            yield item
            first.close()
            bar.update()


@contextmanager
def waiting(what: str, *, detail: Callable[[], str] = str, after_s: float = 0.0) -> Iterator[None]:
    """Show while the block runs that it does, and for how long by now: for work whose length nobody knows.

    detail: what to add, called from another thread. after_s: seconds before which nothing is shown.
    """
    if int(os.environ.get("RANK", 0)) != 0:
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def show() -> None:
        if over.wait(after_s):
            return
        # On a terminal the line is drawn again and again; in a log each line stays, so they are few.
        terminal, next_line, more, detail_at = on_terminal(), FIRST_LINE_S, "", 0.0
        while True:
            elapsed = time.monotonic() - began
            text = f"{what}: {seconds_text(elapsed)}"
            if elapsed - detail_at >= DETAIL_EVERY_S:
                more, detail_at = detail(), elapsed
                if more:
                    more = f", {more}"
            if terminal:
                sys.stderr.write(f"\r{text}{more}\x1b[K")
                sys.stderr.flush()
            elif elapsed >= next_line:
                next_line = elapsed + LINE_EVERY_S
                print(f"{text} so far{more}", file=sys.stderr, flush=True)
            if over.wait(REDRAW_S):
                break
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def write(text: str) -> None:
    """Print a line of the console, above the bars that are open."""
    if not on_terminal():
        print(text, flush=True)
        return
    with tqdm.external_write_mode(file=sys.stdout):
        print(text, flush=True)
