"""Cost of the attempts of a run beside its steps, from the rows that they left."""

from collections.abc import Iterable
from typing import Any


def first_start(rows: Iterable[dict[str, Any]]) -> float | None:
    """Return the seconds since 1970 at which the process of the run's first attempt began; None where no row says it.

    Its row was written after imports and checks; runs of earlier versions have no other time.
    """
    return next((row.get("began", row["time"]) for row in rows if row.get("event") == "attempt"), None)


def lost_steps(rows: Iterable[dict[str, Any]]) -> int:
    """Return steps that were made, and then made again because a later attempt went on from an earlier step.

    As far as they were logged: of a killed attempt nobody knows the steps after its last row.
    """
    lost = newest = 0
    for row in rows:
        step = row.get("step", 0)
        if row.get("event") == "attempt":
            lost += max(0, newest - step)
            newest = step
        elif "event" not in row:
            newest = max(newest, step)
    return lost
