"""A run that was cut after its first save, for the campaigns that need many copies of the same moment."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import evidence, injector
from faults.victim import SAVE_STEPS, Lab, Setting

# Two saves: the first is the one to fall back on, the second meets the fault and then removes the first.
SETTING = Setting(max_steps=2 * SAVE_STEPS, keep=1)
COLD = 20  # of a campaign's cells are made by the cold, real command


def is_cold(trials: Callable[[Lab, int, int], list[str]], lab: Lab, key: str) -> bool:
    """Whether this cell is one of the last of all: a short campaign has none of them."""
    return key in trials(lab, sys.maxsize, 0)[-COLD:]


def cut_after_first_save(lab: Lab, setting: Setting = SETTING) -> Path:
    """The folder of a run that holds checkpoint-4 and was killed before checkpoint-8."""
    base = lab.bases / setting.name
    if not base.exists():
        lab.reference(setting)
        making = lab.trial(f"base-{setting.name}")
        slow = injector.faults(slow_us=20_000, slow_under=making)
        process = lab.start(setting, making / "run", environment=slow)
        while process.poll() is None and not evidence.whole_steps(making / "run"):
            time.sleep(0.002)
        process.kill_everything()
        assert evidence.whole_steps(making / "run") == [SAVE_STEPS], process.output
        base.parent.mkdir(exist_ok=True)
        making.rename(base)
    return base


def copy_of(base: Path, folder: Path) -> Path:
    """The run in the trial's own folder."""
    return Path(shutil.copytree(base / "run", folder / "run"))


def two_checkpoints(lab: Lab, setting: Setting) -> Path:
    """Return a run with two checkpoints whose end was lost."""
    template = lab.bases / f"two-checkpoints-{setting.name}"
    if not template.exists():
        making = lab.trial(template.name)
        status, output = lab.finish(setting, making / "run")
        assert status == 0, output
        forget_the_end(making / "run")
        template.parent.mkdir(exist_ok=True)
        making.rename(template)
    return template / "run"


def forget_the_end(run: Path) -> None:
    """Make a finished run one that was killed after its last checkpoint."""
    shutil.rmtree(run / "model")
    manifest = json.loads((run / "run_manifest.json").read_text())
    del manifest["finished"]
    (run / "run_manifest.json").write_text(json.dumps(manifest))


def calls_of_second_save(lab: Lab, setting: Setting = SETTING) -> list[tuple[int, str, str]]:
    """The file calls below checkpoints/ of the save at step 8 and its rotation, as a start from the base makes them."""
    kept = lab.bases / f"{setting.name}-calls.json"
    if not kept.exists():
        base = cut_after_first_save(lab, setting)
        folder = lab.trial("watch")
        run = copy_of(base, folder)
        log = folder / "calls"
        watched = injector.faults(run / "checkpoints", counter=folder / "counter", log=log)
        status, output = lab.finish(setting, run, environment=watched)
        assert status == 0, output
        calls = injector.logged_calls(log)
        first = next(number for number, _, path in calls if f"checkpoint-{2 * SAVE_STEPS}" in path)
        kept.write_text(json.dumps([call for call in calls if call[0] >= first]))
        shutil.rmtree(folder)
    return [tuple(call) for call in json.loads(kept.read_text())]


def check_next_start(lab: Lab, run: Path, setting: Setting = SETTING, *, cold: bool = False) -> list[str]:
    """The same command without the fault: it must come to the uncut run's bits and leave nothing half behind."""
    wrong = []
    if not evidence.whole_steps(run):
        wrong.append("no whole checkpoint was left")
    status, output = lab.finish(setting, run, cold=cold)
    if status != 0:
        return [*wrong, f"the next start ended with {status}: {output[-1500:]}"]
    if different := evidence.differences(evidence.final_state(run), lab.reference(setting)):
        wrong.append(f"not bitwise the uncut run's: {different[:6]}")
    if left := evidence.left_over(run):
        wrong.append(f"the next start did not clear away {left}")
    return wrong
