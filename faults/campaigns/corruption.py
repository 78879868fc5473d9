"""Every file of a checkpoint damaged in every way: found, named, set aside, and the checkpoint before it used; a file
that does not belong to it is named and ignored.

All cells ask the run directory for its newest whole checkpoint, as a start does; some are real starts.
"""

import random
import shutil
from pathlib import Path

from faults import evidence
from faults.campaigns.base import is_cold, two_checkpoints
from faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "Corruption: each file of a checkpoint x {missing, truncated, empty, one bit flipped, another step's, extra}"
SETTING = Setting(max_steps=2 * SAVE_STEPS)
SHARDED = Setting(max_steps=2 * SAVE_STEPS, ranks=2, accumulation=1, sharded=True)  # of it only the files of its own
DAMAGES = ("missing", "truncated", "empty", "bit", "swapped", "extra")
NEWEST, BEFORE = 2 * SAVE_STEPS, SAVE_STEPS
BITS = 8  # flipped in turn, at places that the seed decides
FACTS = "MANIFEST.json-facts"  # bits of what it says beside the hashes, which no hash covers by itself


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    """The first `times` of all cells, in the seed's order."""
    newest, sharded = (evidence.checkpoints(two_checkpoints(lab, setting))[NEWEST] for setting in (SETTING, SHARDED))
    files = sorted(str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file())
    files += sorted(p.name for p in sharded.iterdir() if p.name not in files)
    cells = [f"{file}-{damage}" for file in files for damage in DAMAGES if damage != "extra"] + [
        "new.bin-extra",
        FACTS,
    ]
    random.Random(seed).shuffle(cells)
    return cells[:times]


def _setting(file: str) -> Setting:
    return SHARDED if "-of-" in file or file.endswith(".index.json") or file == "rng-1.safetensors" else SETTING


def trial(lab: Lab, key: str) -> dict:
    from pipeline.run_dir.checkpoints import newest_whole
    from pipeline.run_dir.run_directory import RunDirectory

    file, damage = key.rsplit("-", 1)
    chance = random.Random(key)
    wrong, tried = [], 0
    for _ in range(BITS if damage in ("bit", "facts") else 1):
        folder = lab.trial(f"corruption-{key}")
        run = Path(shutil.copytree(two_checkpoints(lab, _setting(file)), folder / "run"))
        how = _damage(run, file, damage, chance)
        if how is None:
            return {"ok": True, "wrong": [], "damage": damage, "cells": 0, "real": False}  # equal in both checkpoints
        tried += 1
        directory = RunDirectory(run)
        found, notes = newest_whole(directory.checkpoints, directory.quarantine)
        printed = "\n".join(notes)
        if found is None or found.name != f"checkpoint-{_expected(damage)}":
            wrong.append(f"{how}: {found} was taken")
        elif file not in printed or f"checkpoint-{NEWEST}" not in printed:
            wrong.append(f"{how}: the note does not name checkpoint and file: {printed}")
        elif damage != "extra" and not (run / "quarantine" / f"checkpoint-{NEWEST}").is_dir():
            wrong.append(f"{how}: not moved to quarantine")
    real = is_cold(trials, lab, key)
    if real and not wrong:
        wrong += _real_start(lab, key, file, damage, chance)
    return {"ok": not wrong, "wrong": wrong, "damage": damage, "cells": tried, "real": real}


def _expected(damage: str) -> int:
    """Return the step of the checkpoint that a start takes."""
    return NEWEST if damage == "extra" else BEFORE


def _damage(run: Path, file: str, damage: str, chance: random.Random) -> str | None:
    """Damage the newest checkpoint; says how, or None when the damage would change nothing."""
    newest, before = evidence.checkpoints(run)[NEWEST], evidence.checkpoints(run)[BEFORE]
    path = newest / file
    if damage == "extra":
        path.write_bytes(b"\0" * 100)
        return f"{file} added"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: chance.randrange(1, len(content))])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage in ("bit", "facts"):
        end = content.index(b'"files"') if damage == "facts" else len(content)
        place, bit = chance.randrange(end), chance.randrange(8)
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        return f"bit {bit} of byte {place} of {file} flipped"
    elif (before / file).read_bytes() == content:
        return None
    else:
        shutil.copyfile(before / file, path)
    return f"{file} {damage}"


def _real_start(lab: Lab, key: str, file: str, damage: str, chance: random.Random) -> list[str]:
    """The command itself on a run whose end, after the damaged checkpoint, was lost."""
    folder = lab.trial(f"corruption-{key}")
    setting = _setting(file)
    run = Path(shutil.copytree(two_checkpoints(lab, setting), folder / "run"))
    how = _damage(run, file, damage, chance)
    status, output = lab.finish(setting, run, cold=True)
    if status != 0 or f"going on from checkpoint-{_expected(damage)}" not in output or file not in output:
        return [f"{how}: status {status}: {output[-1500:]}"]
    if different := evidence.differences(evidence.final_state(run), lab.reference(setting)):
        return [f"{how}: not bitwise the uncut run's: {different[:6]}"]
    return []


def figure(rows: list[dict]) -> str:
    damages = sum(row["cells"] for row in rows)
    equal = sum(row["cells"] == 0 for row in rows)
    return (
        f"{sum(row['ok'] for row in rows if row['cells'])} of {len(rows) - equal} cells ({damages} damages, {BITS} bits of every "
        f"file; {sum(row['real'] for row in rows)} by the cold command) were found and named, and the checkpoint before was used (beside an extra file the same one); "
        f"in {equal} further cells both checkpoints hold the same file"
    )
