"""Every file of a checkpoint damaged in every way: found, named, set aside, and the checkpoint before it used.

All cells ask the run directory for its newest whole checkpoint, as a start does; some are real starts.
"""

import json
import random
import shutil
from pathlib import Path

from tests.faults import evidence
from tests.faults.campaigns.base import is_cold
from tests.faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "Corruption: each file of a checkpoint x {missing, truncated, empty, one bit flipped, another step's, extra}"
SETTING = Setting(max_steps=2 * SAVE_STEPS)
DAMAGES = ("missing", "truncated", "empty", "bit", "swapped", "extra")
NEWEST, BEFORE = 2 * SAVE_STEPS, SAVE_STEPS
BITS = 8  # flipped in turn, at places that the seed decides
FACTS = "MANIFEST.json-facts"  # bits of what it says beside the hashes, which no hash covers by itself


def _template(lab: Lab) -> Path:
    """A run with two checkpoints, whose end was lost."""
    template = lab.bases / "two-checkpoints"
    if not template.exists():
        making = lab.trial("two-checkpoints")
        status, output = lab.finish(SETTING, making / "run")
        assert status == 0, output
        template.parent.mkdir(exist_ok=True)
        making.rename(template)
    return template / "run"


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    """The first `times` of all cells, in the seed's order."""
    newest = evidence.checkpoints(_template(lab))[NEWEST]
    files = sorted(str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file())
    cells = [f"{file}-{damage}" for file in files for damage in DAMAGES if damage != "extra"] + ["new.bin-extra", FACTS]
    random.Random(seed).shuffle(cells)
    return cells[:times]


def trial(lab: Lab, key: str) -> dict:
    from pipeline.artifacts.run_directory import RunDirectory

    file, damage = key.rsplit("-", 1)
    chance = random.Random(key)
    wrong, tried = [], 0
    for _ in range(BITS if damage in ("bit", "facts") else 1):
        folder = lab.trial(f"corruption-{key}")
        run = Path(shutil.copytree(_template(lab), folder / "run"))
        how = _damage(run, file, damage, chance)
        if how is None:
            return {"ok": True, "wrong": [], "damage": damage, "cells": 0, "real": False}  # equal in both checkpoints
        tried += 1
        found, notes = RunDirectory(run).newest_checkpoint()
        told = "\n".join(notes)
        if found is None or found.name != f"checkpoint-{BEFORE}":
            wrong.append(f"{how}: {found} was taken")
        elif file not in told or f"checkpoint-{NEWEST}" not in told:
            wrong.append(f"{how}: the note does not name checkpoint and file: {told}")
        elif not (run / "quarantine" / f"checkpoint-{NEWEST}").is_dir():
            wrong.append(f"{how}: not moved to quarantine")
    real = is_cold(trials, lab, key)
    if real and not wrong:
        wrong += _real_start(lab, key, file, damage, chance)
    return {"ok": not wrong, "wrong": wrong, "damage": damage, "cells": tried, "real": real}


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
    run = Path(shutil.copytree(_template(lab), folder / "run"))
    how = _damage(run, file, damage, chance)
    _forget_the_end(run)
    status, output = lab.finish(SETTING, run, cold=True)
    if status != 0 or f"going on from checkpoint-{BEFORE}" not in output or file not in output:
        return [f"{how}: status {status}: {output[-1500:]}"]
    if different := evidence.differences(evidence.final_state(run), lab.reference(SETTING)):
        return [f"{how}: not bitwise the uncut run's: {different[:6]}"]
    return []


def _forget_the_end(run: Path) -> None:
    shutil.rmtree(run / "model")
    manifest = json.loads((run / "run_manifest.json").read_text())
    del manifest["finished"]
    (run / "run_manifest.json").write_text(json.dumps(manifest))


def figure(rows: list[dict]) -> str:
    damages = sum(row["cells"] for row in rows)
    equal = sum(row["cells"] == 0 for row in rows)
    return (
        f"{sum(row['ok'] for row in rows if row['cells'])} of {len(rows) - equal} cells ({damages} damages, {BITS} bits of every "
        f"file; {sum(row['real'] for row in rows)} by the cold command) were found and named, and the checkpoint before was used; "
        f"in {equal} further cells both checkpoints hold the same file"
    )
