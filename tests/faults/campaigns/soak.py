"""Random faults for as long as asked: runs that are hit again and again until each has come to its end.

--times is in minutes. Every run is one trial: killed, terminated, its disk full or failing, in any order.
"""

import random
import signal
import time

from tests.faults import evidence, injector
from tests.faults.victim import MAX_STEPS, WAIT_S, Lab, Setting

WHAT = "Soak: random faults, one after the other"
FAULTS = ("kill everything", "kill one rank", "SIGTERM", "ENOSPC", "EIO")
HITS = 6  # at most per run; then it may end


def trials(lab: Lab, times: int, seed: int):
    """Numbers, until the minutes are over."""
    ends = time.monotonic() + 60 * times
    number = seed
    while time.monotonic() < ends:
        yield str(number)
        number += 1


def trial(lab: Lab, key: str) -> dict:
    chance = random.Random(f"soak {key}")
    ranks = 1 + int(key) % 2
    setting = Setting(ranks=ranks, accumulation=2 // ranks, max_steps=2 * MAX_STEPS)
    reference = lab.reference(setting)
    folder = lab.trial(f"soak-{key}")
    run = folder / "run"
    cache = lab.partly_prepared(setting, folder)
    hits, wrong = [], []
    while len(hits) < HITS:
        fault = chance.choice(FAULTS)
        status, output = _hit(lab, setting, run, cache, fault, chance)
        if status == 0:
            break
        hits.append(fault)
        if fault in ("ENOSPC", "EIO") and status not in (73, 74):
            wrong.append(f"{fault}: status {status}: {output[-1500:]}")
        if fault == "SIGTERM" and status != 75:
            wrong.append(f"{fault}: status {status}: {output[-1500:]}")
    status, output = lab.finish(setting, run, cache=cache)
    if status != 0:
        wrong.append(f"the last start ended with {status}: {output[-1500:]}")
    elif different := evidence.differences(evidence.final_state(run), reference):
        wrong.append(f"not bitwise the uncut run's: {different[:6]}")
    return {"ok": not wrong, "wrong": wrong, "hits": hits, "lost": [lost for _, lost in evidence.attempts(run)[1:]]}


def _hit(lab: Lab, setting: Setting, run, cache, fault: str, chance: random.Random) -> tuple[int | None, str]:
    """One start that meets the fault: its status and what it printed; 0 when it came to its end before."""
    environment = {}
    if fault in ("ENOSPC", "EIO"):
        rules = f"at={chance.randint(1, 400)}:{fault}" if fault == "EIO" else f"from={chance.randint(1, 400)}:{fault}"
        environment = injector.faults(run / "checkpoints", rules=rules, counter=run.parent / "counter")
    log = run.parent / "run.log"
    before = log.stat().st_size if log.exists() else 0
    begun = len(evidence.attempts(run))
    process = lab.start(setting, run, cache=cache, environment=environment, log=log)
    if not environment:
        until = evidence.logged_step(run) + chance.randint(1, setting.max_steps // 4)
        while process.poll() is None and not evidence.has_trained(run, begun, until):
            time.sleep(0.005)
        time.sleep(chance.random() / 2)
        if fault == "SIGTERM":
            process.send(signal.SIGTERM, process.ranks())
        elif fault == "kill one rank":
            process.kill(process.ranks()[-1:])
        else:
            process.kill_everything()
    status = process.wait(WAIT_S)
    if status is None:
        process.kill_everything()
    return status, log.read_bytes()[before:].decode(errors="replace")


def figure(rows: list[dict]) -> str:
    hits = [fault for row in rows for fault in row["hits"]]
    by_kind = ", ".join(f"{hits.count(fault)} {fault}" for fault in FAULTS)
    minutes = sum(row["seconds"] for row in rows) / 60
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} runs ended with the clean run's bits, after {len(hits)} faults "
        f"({by_kind}) in {minutes:.0f} minutes"
    )
