"""What a run left behind, read without the package's own checks: they are what is being tested."""

import hashlib
import json
import re
from pathlib import Path

LEFT_OVER = (".tmp-", ".trash-")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether exactly the files of MANIFEST.json are there, each with its hash."""
    try:
        listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
        found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"MANIFEST.json"}
        return found == set(listed) and all(sha256(folder / name) == about["sha256"] for name, about in listed.items())
    except (OSError, ValueError, KeyError):  # also one that a rotation removes while it is read
        return False


def checkpoints(run: Path) -> dict[int, Path]:
    folders = (run / "checkpoints").glob("checkpoint-*")
    return dict(sorted((int(p.name.split("-")[1]), p) for p in folders if re.fullmatch(r"checkpoint-\d+", p.name)))


def whole_steps(run: Path) -> list[int]:
    return [step for step, folder in checkpoints(run).items() if is_whole(folder)]


def left_over(run: Path) -> list[str]:
    """What interrupted saves, rotations and publications left, which the next start has to clear away."""
    return [
        p.name for folder in (run, run / "checkpoints") for p in folder.glob(".t*") if p.name.startswith(LEFT_OVER)
    ]


def metrics(run: Path) -> list[dict]:
    """The rows of metrics.jsonl; a line torn by a kill is left out."""
    rows = []
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_bytes().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return [row for row in rows if isinstance(row, dict)]


def logged_step(run: Path) -> int:
    """The last step whose loss was written."""
    return max((row["step"] for row in metrics(run) if "train/loss" in row), default=0)


def has_trained(run: Path, begun: int, step: int) -> bool:
    """Whether the start that came after `begun` others has trained, and has come to that step."""
    rows = metrics(run)
    starts = [i for i, row in enumerate(rows) if row.get("event") == "attempt"]
    return len(starts) > begun and any(row["step"] >= step for row in rows[starts[begun] :] if "train/loss" in row)


def trained_by_last_start(run: Path) -> list[int]:
    """The steps whose loss the newest start has written."""
    rows = metrics(run)
    begun = max((i for i, row in enumerate(rows) if row.get("event") == "attempt"), default=0)
    return [row["step"] for row in rows[begun:] if "train/loss" in row]


def attempts(run: Path) -> list[tuple[int, int]]:
    """For each attempt the step that it went on from, and the steps trained before that it had to make again."""
    found, trained = [], 0
    for row in metrics(run):
        if row.get("event") == "attempt":
            found.append((row["step"], max(0, trained - row["step"])))
            trained = row["step"]
        elif "train/loss" in row:
            trained = row["step"]
    return found


def final_state(run: Path) -> dict[str, str]:
    """What must be bitwise that of the uncut run: weights, optimizer, random state, place in the data, logged losses."""
    step, last = max(checkpoints(run).items())
    position = json.loads((last / "position.json").read_text())
    losses: dict[str, float] = {}
    for row in metrics(run):  # of a step that was made again the later row counts
        for name in ("train/loss", "val/loss", "val/bpb", "sft/loss"):
            if name in row:
                losses[f"{name} {row['step']}"] = row[name]
    files = [run / "model" / "model.safetensors", *last.glob("*.safetensors"), last / "scheduler.json"]
    state = {str(path.relative_to(run)): sha256(path) for path in files}
    state["rows"] = json.dumps(position["rows"], sort_keys=True)
    state["unlogged"] = json.dumps(position["unlogged"], sort_keys=True)
    state["step"] = str(step)
    return state | {name: repr(value) for name, value in losses.items()}


def differences(state: dict[str, str], reference: dict[str, str]) -> list[str]:
    """Names of what is not equal."""
    return sorted(name for name in state.keys() | reference.keys() if state.get(name) != reference.get(name))
