"""`kill -9` at a random moment of a run on a slow disk, then the same command until it ends.

A trial's seed decides the ranks, the moment, whom it hits (the whole group with every child, the ranks alone, one rank) and
whether it is hit twice. The disk is slow, so that most of a run's time is the writing of checkpoints.
"""

import random
import time

from faults import evidence, injector
from faults.victim import SAVE_STEPS, SLOW_US, Lab, Setting
from pipeline.run_dir.failures import REPORT_S

WHAT = "`kill -9` at random moments, then the same command"
COLD_EVERY = 10  # trials by the cold, real command; the others are forked
SAVE_S = 150 * SLOW_US / 1e6  # a save and its rotation are about 150 file calls
OTHERS_END_S = (
    60 + REPORT_S
)  # in which the ranks that were not killed have to end by themselves; their last act is the report


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return [str(number) for number in range(seed, seed + times)]


def trial(lab: Lab, key: str) -> dict:
    ranks = 1 + int(key) % 2
    return killed_run(lab, key, Setting(ranks=ranks, accumulation=2 // ranks), name="kill")


def killed_run(lab: Lab, key: str, setting: Setting, *, name: str) -> dict:
    chance = random.Random(f"{name} {key}")
    ranks = setting.ranks
    reference = lab.reference(setting)
    cold = int(key) % COLD_EVERY in (0, 5)  # both numbers of ranks
    folder = lab.trial(f"{name}-{key}")
    run = folder / "run"
    cache = lab.partly_prepared(setting, folder)
    slow = injector.faults(slow_us=SLOW_US, slow_under=folder)
    wrong, kills = [], []
    for _ in range(chance.choice((1, 1, 2))):
        whom = chance.choice(("everything", "ranks", "one rank") if ranks > 1 else ("everything", "ranks"))
        if setting.sharded and whom == "ranks" and chance.random() < 0.5:
            whom = "ranks and a writer"
        hit = _kill(lab, setting, run, chance, whom=whom, how={"cold": cold, "cache": cache, "environment": slow})
        if hit is None:
            break  # it had ended before
        kills.append(hit)
        wrong += hit.pop("wrong")
    status, output = lab.finish(setting, run, cold=cold, cache=cache)
    if status != 0:
        wrong.append(f"the same command ended with {status}: {output[-2000:]}")
    else:
        wrong += _check_end(run, kills, reference)
    return {
        "ok": not wrong,
        "wrong": wrong,
        "ranks": ranks,
        "cold": cold,
        "kills": kills,
        "lost": [lost for _, lost in evidence.attempts(run)[1:]],
    }


def _kill(lab: Lab, setting: Setting, run, chance: random.Random, *, whom: str, how: dict) -> dict | None:
    begun = len(evidence.attempts(run))
    process = lab.start(setting, run, **how)
    # Three of four while something is written under a temporary name, at a moment of that time; one at any moment.
    in_save = chance.random() < 0.75
    target = SAVE_STEPS * chance.randint(1, setting.max_steps // SAVE_STEPS) if in_save else chance.randint(1, 23)
    later = chance.random() * SAVE_S
    while process.poll() is None and not (
        evidence.has_trained(run, begun, target) and (evidence.left_over(run) or not in_save)
    ):
        time.sleep(0.002)
    time.sleep(later)
    victims = {"everything": process.everything, "ranks": process.ranks}.get(
        whom, lambda: [chance.choice(ranks)] if (ranks := process.ranks()) else []
    )()
    if whom == "ranks and a writer":
        writers = process.writers()
        victims = [*process.ranks(), *([chance.choice(writers)] if writers else [])]
        whom = whom if writers else "ranks"
    if process.poll() is not None or not victims:
        process.kill_everything()
        return None
    writer = whom in ("everything", "ranks and a writer") and bool(evidence.left_over(run))
    process.kill(victims)
    killed = time.monotonic()
    writing, step = evidence.left_over(run), evidence.logged_step(run)
    wrong = []
    others_s = None
    if whom != "everything":
        if process.wait(OTHERS_END_S) is None:
            wrong.append(f"after the kill of {whom}, others were still there after {OTHERS_END_S:.0f} s")
        others_s = round(time.monotonic() - killed, 1)
    if whom == "everything" or process.poll() is None:
        process.kill_everything()
    return {
        "whom": whom,
        "step": step,
        "with_writer": writer,
        "writing": sorted({name.split("-")[0].strip(".") for name in writing}),
        "others_s": others_s,
        "whole": evidence.whole_steps(run),
        "wrong": wrong,
    }


def _check_end(run, kills: list[dict], reference: dict[str, str]) -> list[str]:
    wrong = []
    attempts = evidence.attempts(run)[1:]
    if len(attempts) != len(kills):
        wrong.append(f"{len(kills)} kills, but {len(attempts)} further attempts")
    for (step, lost), hit in zip(attempts, kills, strict=False):
        # Saving goes on when only the ranks were killed: the newest may be newer than what was whole at the kill.
        newest = max(hit["whole"], default=0)
        if step < newest or (hit["whom"] == "everything" and step != newest):
            wrong.append(f"went on from step {step}, and the newest whole checkpoint was {newest}")
        # A checkpoint is written by a process that outlives the run. Killed with it, as by a power cut, the one in the
        # making is lost too: at most one is in the making, so at most as many steps again.
        if lost > SAVE_STEPS * (1 + hit["with_writer"]):
            wrong.append(f"{lost} steps were lost, with a checkpoint every {SAVE_STEPS}")
    if left := evidence.left_over(run):
        wrong.append(f"left behind: {left}")
    if different := evidence.differences(evidence.final_state(run), reference):
        wrong.append(f"not bitwise the uncut run's: {different[:6]}")
    return wrong


def figure(rows: list[dict]) -> str:
    kills = [hit for row in rows for hit in row["kills"]]
    inside = sum(bool(hit["writing"]) for hit in kills)
    lost = [(steps, hit["with_writer"]) for row in rows for steps, hit in zip(row["lost"], row["kills"], strict=False)]
    most, most_with_writer = (
        max((n for n, w in lost if w == with_writer), default=0) for with_writer in (False, True)
    )
    by_ranks = ", ".join(
        f"{sum(r['ranks'] == n for r in rows)} on {n} rank(s)" for n in sorted({r["ranks"] for r in rows})
    )
    waited = max((hit["others_s"] for hit in kills if hit["others_s"] is not None), default=0.0)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} went on by the same command to the uncut run's bits ({by_ranks}; "
        f"{sum(row['cold'] for row in rows)} by the cold command); {len(kills)} kills, {inside} "
        f"({100 * inside // max(1, len(kills))} %) inside a save, a rotation or the publication; at most {most} "
        f"steps lost with a checkpoint every {SAVE_STEPS}, {most_with_writer} where the checkpoint in the making was killed too; the ranks left alone ended within {waited} s"
    )
