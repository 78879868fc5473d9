"""A failure at every single file call of one save, from its first folder to the end of the rotation.

Every trial goes on from a copy of the same run, cut after its first save; the second save meets the fault.
"""

import random
from dataclasses import replace

from faults import evidence, injector
from faults.campaigns import base
from faults.victim import Lab, Setting

WHAT = "A failure at every file call of one save"
FAULTS = ("kill", "kill-all", "EIO", "ENOSPC")
SETTING = replace(base.SETTING, report=False)
ENDS = (0, 73, 74)  # the save could do without the call; cannot write; disk full


def trials(lab: Lab, times: int, seed: int, setting: Setting = SETTING) -> list[str]:
    """The first `times` of all cells call x fault, in the seed's order."""
    calls = base.calls_of_second_save(lab, setting)
    cells = [f"{n}-{fault}" for n, kind, _ in calls for fault in FAULTS if (kind, fault) != ("unlink", "ENOSPC")]
    random.Random(seed).shuffle(cells)
    return cells[:times]


def trial(lab: Lab, key: str) -> dict:
    return failed_call(lab, key, SETTING, name="calls", cold=base.is_cold(trials, lab, key))


def failed_call(lab: Lab, key: str, setting: Setting, *, name: str, cold: bool = False) -> dict:
    """Make one call of the second save fail, then start the same command again."""
    number, fault = key.split("-", 1)
    (call,) = [call for call in base.calls_of_second_save(lab, setting) if call[0] == int(number)]
    folder = lab.trial(f"{name}-{key}")
    run = base.copy_of(base.cut_after_first_save(lab, setting), folder)
    rules = f"at={number}:{fault}"
    met = injector.faults(run / "checkpoints", rules=rules, counter=folder / "counter")
    status, output = lab.finish(setting, run, environment=met, cold=cold)
    wrong = []
    if injector.calls_so_far(folder / "counter") < int(number):
        wrong.append("the call was not made")
    if not fault.startswith("kill"):
        if status not in ENDS:
            wrong.append(f"status {status} at a failed {call[1]}: {output[-1500:]}")
        elif status and "Traceback" in output:
            wrong.append(f"a traceback at a failed {call[1]}: {output[-1500:]}")
    whole = evidence.whole_steps(run)
    wrong += base.check_next_start(lab, run, setting, cold=cold)
    return {
        "ok": not wrong,
        "wrong": wrong,
        "kind": call[1],
        "fault": fault,
        "status": status,
        "whole": whole,
        "cold": cold,
    }


def figure(rows: list[dict]) -> str:
    kinds = sorted({row["kind"] for row in rows})
    cold = sum(row["cold"] for row in rows)
    left = sum(bool(row["whole"]) for row in rows)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} cells call x {{{', '.join(FAULTS)}}} ({', '.join(kinds)}; {cold} by the cold command); {left} of "
        f"{len(rows)} left a whole checkpoint, and a directory that the next start cleaned and went on from to the uncut run's bits"
    )
