"""Bitwise resume: every shape of a run, cut at every kind of place, ends with the uncut run's bits.

There is no DataLoader and so no number of its workers (StepLoader in data/rows.py); model and optimizer take its place in the matrix.
"""

import itertools
import random
import shutil

from faults import callbacks, evidence
from faults.campaigns.base import is_cold
from faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "Bitwise resume: {1, 2 ranks} x {accumulation 1, 4} x {Muon, AdamW} x {prepared, tokenizing ahead} x {pretrain, SFT} x cut"
# In the middle of a step between two saves; behind the evaluation and the save of their own steps.
CUTS = {"accumulation": 2 * SAVE_STEPS + 2, "evaluation": 2 * SAVE_STEPS, "save": 3 * SAVE_STEPS}
STEPS = 4 * SAVE_STEPS


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    """The first `times` of the 96 cells, in the seed's order."""
    cells = itertools.product((1, 2), (1, 4), ("modern", "gpt2"), ("prepared", "ahead"), ("pretrain", "sft"), CUTS)
    names = ["-".join(map(str, cell)) for cell in cells]
    random.Random(seed).shuffle(names)
    return names[:times]


def trial(lab: Lab, key: str) -> dict:
    ranks, accumulation, model, data, stage, cut = key.split("-")
    setting = Setting(model=model, stage=stage, ranks=int(ranks), accumulation=int(accumulation), max_steps=STEPS)
    reference = lab.reference(setting)
    folder = lab.trial(f"resume-{key}")
    run = folder / "run"
    cache = lab.partly_prepared(setting, folder) if data == "ahead" else lab.cache
    shutil.copy(callbacks.__file__, lab.runner.folder / "callbacks_of_campaign.py")
    environment = {"FAULTS_CUT": cut, "FAULTS_CUT_STEP": str(CUTS[cut])}
    cold = is_cold(trials, lab, key)
    how = {"cache": cache, "environment": environment, "cold": cold}
    status, output = lab.finish(setting, run, "run.callbacks=[callbacks_of_campaign:Cut]", **how)
    wrong = []
    if status not in ((-9, 1) if cold else (-9,)):  # 1: of the launcher of two ranks
        wrong.append(f"was not cut: status {status}: {output[-1500:]}")
    status, output = lab.finish(setting, run, cache=cache, cold=cold)
    attempts = evidence.attempts(run)
    if status != 0:
        wrong.append(f"status {status}: {output[-1500:]}")
    elif different := evidence.differences(evidence.final_state(run), reference):
        wrong.append(f"not bitwise the uncut run's: {different[:6]}")
    if len(attempts) != 2 or attempts[1][0] == 0:
        wrong.append(f"it did not go on from a checkpoint: {attempts}")
    return {
        "ok": not wrong,
        "wrong": wrong,
        "cut": cut,
        "from_step": attempts[-1][0] if attempts else None,
        "cold": cold,
    }


def figure(rows: list[dict]) -> str:
    cuts = ", ".join(f"{sum(row['cut'] == cut for row in rows)} after {cut}" for cut in ("evaluation", "save"))
    middle = sum(row["cut"] == "accumulation" for row in rows)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} cells equal in weights, optimizer, random state, rows and logged losses "
        f"({middle} cut in the middle of a step, {cuts}; {sum(row['cold'] for row in rows)} by the cold command). There is no DataLoader here, and so no number of workers"
    )
