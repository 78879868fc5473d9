"""What a resume costs: from the start of the process to its first step, at 10^2 and at 10^6 rows used, beside a cold start.

By the cold, real command, in turn, on a run of a million rows of real source code whose model takes no time.
"""

import json
import shutil
import statistics
import sysconfig
import time
from pathlib import Path

from faults import callbacks, evidence
from faults.processes import ColdRun
from faults.victim import WAIT_S, Lab

WHAT = "Resume cost: start to first step, less that of a cold start"
ROWS_PER_STEP, FAR, STEPS = 100, 10_000, 12_000  # steps of milliseconds: room to kill the run behind the far one
TEXT_BYTES = 40_000_000
CASES = {"cold": 0, "100 rows": 1, "1000000 rows": FAR}  # the step of the checkpoint


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return [str(number) for number in range(seed, seed + times)]


def trial(lab: Lab, key: str) -> dict:
    base = _base(lab)
    seconds, wrong = {}, []
    for case, step in CASES.items():
        folder = lab.trial(f"cost-{key}")
        run = folder / "run"
        if step:
            shutil.copytree(base / "run", run)
            for other in set(evidence.checkpoints(run)) - {step}:
                shutil.rmtree(evidence.checkpoints(run)[other])
        begun = len(evidence.attempts(run))
        process = _start(lab, folder, "train.logging_steps=1")
        while process.poll() is None and not evidence.has_trained(run, begun, 0):
            time.sleep(0.01)
        first = time.monotonic()
        process.kill_everything()
        seconds[case] = round(first - process.started, 2)
        if not evidence.attempts(run) or evidence.attempts(run)[-1][0] != step:
            wrong.append(f"{case}: went on from {evidence.attempts(run)[-1:]}: {process.output[-1500:]}")
    return {"ok": not wrong, "wrong": wrong, "seconds_to_step": seconds}


def _start(lab: Lab, folder: Path, *overrides: str) -> ColdRun:
    recipe = _recipe(lab)
    where = [f"run.directory={folder}", "run.name=run", f"data.cache_dir={lab.folder / 'cache-cost'}", *overrides]
    environment = {"HF_HUB_OFFLINE": "1", "LOCAL_WORLD_SIZE": "2"}
    return ColdRun(
        lab.runner.command(recipe, *where), environment=environment, folder=lab.folder, log=folder / "run.log"
    )


def _recipe(lab: Lab) -> Path:
    shutil.copy(callbacks.__file__, lab.runner.folder / "callbacks_of_campaign.py")
    return lab.runner.recipe(
        "cost",
        "gpt2",
        run={"callbacks": ["callbacks_of_campaign:SaveFirst"]},
        model={"n_layer": 1, "n_embd": 16, "n_head": 2},
        data={
            "sources": [{"files": str(_text(lab))}],
            "row_tokens": 8,
            "batch_tokens": 8 * ROWS_PER_STEP,
            "shard_rows": 4096,
        },
        train={
            "max_steps": STEPS,
            "per_device_train_batch_size": ROWS_PER_STEP,
            "logging_steps": 1000,
            "save_steps": FAR,
            "save_total_limit": None,
            "eval_steps": 10 * FAR,
            "seed": 7,
        },
    )


def _text(lab: Lab) -> Path:
    """Source code of the installed packages: real text, and enough of it on every machine."""
    path = lab.texts / "code.jsonl"
    if not path.exists():
        size = 0
        with open(path, "w") as file:
            for source in sorted(Path(sysconfig.get_paths()["purelib"], "transformers").rglob("*.py")):
                text = source.read_text(errors="replace")
                size += len(text)
                file.write(json.dumps({"text": text}) + "\n")
                if size > TEXT_BYTES:
                    break
    return path


def _base(lab: Lab) -> Path:
    """The run that used a million rows, with checkpoints at its first and its last hundred."""
    base = lab.bases / "cost"
    if not base.exists():
        making = lab.trial("base-cost")
        process = _start(lab, making)
        ends = time.monotonic() + 6 * WAIT_S
        while process.poll() is None and FAR not in evidence.whole_steps(making / "run") and time.monotonic() < ends:
            time.sleep(0.5)
        process.kill_everything()
        assert set(evidence.whole_steps(making / "run")) == {1, FAR}, process.output[-3000:]
        base.parent.mkdir(exist_ok=True)
        making.rename(base)
    return base


def figure(rows: list[dict]) -> str:
    def median(case: str) -> float:
        return statistics.median(row["seconds_to_step"][case] for row in rows)

    more = {case: median(case) - median("cold") for case in CASES if case != "cold"}
    return f"a cold start takes {median('cold'):.1f} s (median of {len(rows)}); " + ", ".join(
        f"{seconds:+.1f} s after {case}" for case, seconds in more.items()
    )
