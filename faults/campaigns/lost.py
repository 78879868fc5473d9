"""All checkpoints of a run that has trained lost, damaged or strayed into: never begun again without a word from the user.

Where one is whole the same command goes on from it to the uncut run's bits. Where none is, the command ends with 65 and
changes nothing, twice, and `run.resume=never` starts anew.
"""

import random
import shutil
from pathlib import Path

from faults import evidence
from faults.campaigns.base import two_checkpoints
from faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "Lost progress: all checkpoints of a cut run {gone, damaged, strayed into}, one and two of them"
# Files that file managers, network file systems, editors and people leave in folders.
STRAYS = (".DS_Store", "._config.json", "Thumbs.db", "desktop.ini", ".nfs0000000001", "README.md", "notes.txt", ".ipynb_checkpoints/x.ipynb")  # fmt: skip
WAYS = ("strays", "damaged", "emptied", "folders-gone", "checkpoints-gone", "damaged-and-strays", "last-damaged")


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return [str(number) for number in range(seed, seed + times)]


def trial(lab: Lab, key: str) -> dict:
    chance = random.Random(f"lost {key}")
    way = WAYS[int(key) % len(WAYS)]
    setting = Setting(
        model=chance.choice(("modern", "gpt2")),
        stage=chance.choice(("pretrain", "sft")),
        max_steps=2 * SAVE_STEPS,
        keep=2,
    )
    folder = lab.trial(f"lost-{key}")
    run = Path(shutil.copytree(two_checkpoints(lab, setting), folder / "run"))
    kept = chance.choice(((SAVE_STEPS,), (2 * SAVE_STEPS,), (SAVE_STEPS, 2 * SAVE_STEPS)))
    for step, path in evidence.checkpoints(run).items():
        if step not in kept:
            shutil.rmtree(path)
    lost = _lose(run, way, chance)
    wrong: list[str] = []
    if lost:
        before = _progress(run)
        for attempt in ("the same command", "the same command again"):
            status, output = lab.finish(setting, run)
            if status != 65 or "run.resume=never" not in output or "quarantine" not in output:
                wrong.append(f"{way}: {attempt} ended with {status}: {output[-1500:]}")
        if _progress(run) != before:
            wrong.append(f"{way}: the refused starts changed what was there: {before} -> {_progress(run)}")
        status, output = lab.finish(setting, run, "run.resume=never")
        if status != 0 or ": starting" not in output:
            wrong.append(f"{way}: run.resume=never ended with {status}: {output[-1500:]}")
        elif different := evidence.differences(evidence.final_state(run), lab.reference(setting)):
            wrong.append(f"{way}: started anew, not the uncut run's bits: {different[:6]}")
    else:
        status, output = lab.finish(setting, run)
        attempts = evidence.attempts(run)
        if status != 0 or attempts[-1][0] == 0:
            wrong.append(f"{way}: ended with {status}, went on from {attempts[-1:]}: {output[-1500:]}")
        elif different := evidence.differences(evidence.final_state(run), lab.reference(setting)):
            wrong.append(f"{way}: not bitwise the uncut run's: {different[:6]}")
    return {"ok": not wrong, "wrong": wrong, "way": way, "lost": lost, "kept": kept}


def _lose(run: Path, way: str, chance: random.Random) -> bool:
    """Do it to every checkpoint; return whether none is whole any more."""
    folders = list(evidence.checkpoints(run).values())
    for folder in folders:
        if "strays" in way:
            for name in chance.sample(STRAYS, chance.randint(1, 3)):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(chance.randbytes(100))
        if way.startswith("damaged") or (way == "last-damaged" and folder == folders[-1]):
            path = chance.choice(sorted(p for p in folder.iterdir() if p.is_file() and p.name not in STRAYS))
            content = bytearray(path.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        if way == "emptied":
            path = folder / chance.choice(("model.safetensors", "optimizer.safetensors", "MANIFEST.json"))
            path.write_bytes(b"")
        if way == "folders-gone":
            shutil.rmtree(folder)
    if way == "checkpoints-gone":
        shutil.rmtree(run / "checkpoints")
    return way in ("damaged", "emptied", "folders-gone", "checkpoints-gone", "damaged-and-strays") or (
        way == "last-damaged" and len(folders) == 1
    )


def _progress(run: Path) -> tuple[bool, list[str]]:
    """Return what a start must not take away: the finished model, and all checkpoints, wherever they lie now."""
    folders = [*run.glob("checkpoints/checkpoint-*"), *run.glob("quarantine/checkpoint-*")]
    return (run / "model").is_dir(), sorted(folder.name for folder in folders)


def figure(rows: list[dict]) -> str:
    lost = [row for row in rows if row["lost"]]
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} trials without a step thrown away: {len(rows) - len(lost)} went on from the "
        f"newest whole checkpoint to the uncut run's bits, {len(lost)} had none left, ended with status 65 twice, and started anew "
        "with run.resume=never"
    )
