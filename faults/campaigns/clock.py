"""A wall clock that is wrong, or set while the run goes on: checkpoints are ordered by step, waits measured by another clock.

One rank: the ranks' own waits in a collective would mix the moved time with the kernel's.
"""

import itertools
import random
import time

from faults import evidence, injector
from faults.victim import MAX_STEPS, SAVE_STEPS, Lab, Setting

WHAT = "A clock that is wrong or set while the run goes on"
DAY, YEARS = 86_400, 10 * 365 * 86_400
CELLS = {
    "a day back": (-DAY, 0),
    "a day back in the run": (-DAY, 1500),
    "ten years on": (YEARS, 0),
    "ten years on in the run": (YEARS, 1500),
    "1970": (-int(time.time()) + 3600, 0),
    "1970 in the run": (-int(time.time()) + 3600, 1500),
}
SETTING = Setting()


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return [f"{name}-{number}" for number in range(seed, seed + -(-times // len(CELLS))) for name in CELLS][:times]


def trial(lab: Lab, key: str) -> dict:
    """Two starts under the wrong clock and one under the right one, the first two killed behind a checkpoint."""
    added_s, after_ms = CELLS[key.rsplit("-", 1)[0]]
    chance = random.Random(f"clock {key}")
    run = lab.trial(f"clock-{key.replace(' ', '-')}") / "run"
    wrong = []
    for attempt, clock in enumerate([{}, {"FAULTS_CLOCK": f"{added_s}:{after_ms}"}]):
        until = min(MAX_STEPS - 2, (attempt + 1) * 2 * SAVE_STEPS + chance.randint(1, SAVE_STEPS))
        slow = injector.faults(slow_us=2000, slow_under=run.parent)
        process = lab.start(SETTING, run, "run.hang_timeout=20", environment={**slow, **clock})
        while process.poll() is None and not evidence.has_trained(run, attempt, until):
            time.sleep(0.002)
        if process.poll() is not None:
            wrong.append(f"it ended by itself with {process.poll()}: {process.output[-1500:]}")
        process.kill_everything()
    status, output = lab.finish(SETTING, run, "run.hang_timeout=20")
    starts = [step for step, _ in evidence.attempts(run)]
    if status != 0:
        wrong.append(f"the last start ended with {status}: {output[-1500:]}")
    elif different := evidence.differences(evidence.final_state(run), lab.reference(SETTING)):
        wrong.append(f"not bitwise the uncut run's: {different[:6]}")
    if starts != sorted(set(starts)):
        wrong.append(f"the starts went on from {starts}")
    dates = [row["time"] for row in evidence.metrics(run) if "time" in row]
    moved = max(abs(a - b) for a, b in itertools.pairwise(dates))
    if moved < DAY / 2:
        wrong.append("the clock was not wrong")
    return {"ok": not wrong, "wrong": wrong, "starts": starts, "moved_s": round(moved)}


def figure(rows: list[dict]) -> str:
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} runs ({', '.join(CELLS)}) ended with the uncut run's bits, each start from a later "
        "checkpoint than the one before"
    )
