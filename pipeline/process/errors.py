"""The ways a run can end, one exception class and one exit status each.

A message reads *where: what is wrong, and what follows. What to do.* Everything that is not one of these classes is
our own mistake: it keeps its traceback and ends with status 1.
"""

import re
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 20_000  # of a message; what it repeats of a file may be of any length
# C0 and C1 but tab and line feed move the cursor, set the title, write the clipboard; then what turns the order of
# characters on the screen, and halves of surrogate pairs, which no file can hold.
UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def readable(text: str, *, most: int = MOST_CHARACTERS) -> str:
    """Return a text that repeats somebody else's as it can be shown and stored: control characters escaped, its middle
    left out beyond `most`."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return UNREADABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, else its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class TandemError(Exception):
    """A mistake or an outage that is explained to the user in a sentence, without a traceback."""

    status = 1
    of_all_ranks = False  # whether every rank raises it, so that the first one's word is enough
    facts: dict | None = None  # what the sentence says, for programs: failure.json holds it

    def __str__(self) -> str:
        return readable(super().__str__())


class RecipeError(TandemError):
    """The recipe cannot mean what it says."""

    status = 64
    of_all_ranks = True


class DataError(TandemError):
    """A file was found and its content is not what the recipe promises."""

    status = 65


class DamagedFileError(DataError, ValueError):
    """A file that this program or another one wrote as JSON is not that any more. A ValueError: who can do without it
    passes over it."""


class InputMissingError(TandemError):
    """A file, folder, model or data set that the recipe names does not exist."""

    status = 66


class ServiceError(TandemError):
    """A service that this run cannot start without is away."""

    status = 69
    wait_s = 0.0  # how long it asked to be left alone


class HangError(TandemError):
    """A rank made no progress for run.hang_timeout, or is lost: run the same command again."""

    status = 70


class OutOfMemoryError(TandemError):
    """The device has too little memory for the micro-batch."""

    status = 71


class CannotWriteError(TandemError):
    """A folder cannot be written, or belongs to another run or process."""

    status = 73


class DiskFullError(TandemError):
    """The disk ran full; everything that was whole before is whole still."""

    status = 74


class Preempted(TandemError):
    """SIGTERM or SIGHUP arrived and a whole checkpoint was written: run the same command again."""

    status = 75
    of_all_ranks = True


class DivergedError(TandemError):
    """A loss, gradient or parameter is no finite number, or spiked; the last good checkpoint was kept."""

    status = 76
    of_all_ranks = True


class Interrupted(TandemError):
    """Ctrl-C arrived and a whole checkpoint was written."""

    status = 130
    of_all_ranks = True


class Stopped(BaseException):
    """SIGTERM or SIGHUP for a command that is no training. `except Exception` does not take it for an error of the
    work."""


def raised(check: Callable[..., object], *given: Any) -> list[TandemError]:
    """Return what the check raises of these, or nothing."""
    try:
        check(*given)
    except TandemError as error:
        return [error]
    return []


def raise_errors(problems: list[TandemError]) -> None:
    """Raise all problems as one, each once, with the class of the lowest status: the recipe's before the data's."""
    if problems:
        ordered = sorted(problems, key=lambda problem: problem.status)
        raise type(ordered[0])("\n".join(dict.fromkeys(map(str, ordered))))


def from_rust_panic(error: BaseException) -> DataError | None:
    """Return the sentence for a panic of the tokenizers library, which no `except Exception` takes; None for any other
    error."""
    if type(error).__name__ != "PanicException":
        return None
    reason = next(iter(str(error).strip().splitlines()), "no reason given")
    return DataError(
        f"the tokenizers library gave up on a text ({reason}). A pattern does so that tries too many ways: "
        "tokenizer.split_pattern, or the pre-tokenizer in tokenizer.json. Write a simpler one."
    )
