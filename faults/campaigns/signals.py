"""SIGTERM in every phase, through every launcher, for the launcher, all processes or one of two ranks; the real commands."""

import itertools
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from faults import callbacks, evidence, injector
from faults.processes import ColdRun
from faults.victim import SAVE_STEPS, SLOW_US, WAIT_S, Lab, Setting
from tests.conftest import ROOT

WHAT = "SIGTERM through every launcher, to the launcher, all processes or one rank, in every phase"
LAUNCHERS = ("run_pretrain.sh", "accelerate launch", "torchrun")
TARGETS = ("launcher", "all", "one rank")
BEFORE_STEP_1 = ("before step 1", "preparation", "compilation", "resuming")
PHASES = (*BEFORE_STEP_1, "step", "accumulation", "evaluation", "sampling", "save")
SETTINGS = {ranks: Setting(ranks=ranks, accumulation=8 // ranks, max_steps=400) for ranks in (1, 2)}
END_WITHIN_S = 10  # after the step, batch or kernel that runs


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    """`times` of the 135 cells in the seed's order, each named once more in every further round."""
    cells = list(itertools.product(LAUNCHERS, TARGETS, PHASES, ("1 rank", "2 ranks")))
    cells = [cell for cell in cells if (cell[1], cell[3]) != ("one rank", "1 rank")]
    random.Random(seed).shuffle(cells)
    return ["/".join([*cells[i % len(cells)], str(i // len(cells))]).replace(" ", "_") for i in range(times)]


def trial(lab: Lab, key: str) -> dict:
    launcher, target, phase, ranks, _ = key.replace("_", " ").replace("run pretrain", "run_pretrain").split("/")
    setting, chance = SETTINGS[int(ranks[0])], random.Random(key)
    folder = lab.trial("signals-" + key.replace("/", "-"))
    run = folder / "run"
    if phase == "resuming":
        _begin(lab, setting, folder, launcher)
    process = _start(lab, setting, folder, launcher, phase)
    met = _wait_for(process, setting, run, phase, chance)
    targets = {"launcher": process.own, "all": lambda: _all(process)}.get(target, lambda: process.ranks()[:1])()
    if chance.random() < 0.5 and target == "one rank":
        targets = process.ranks()[-1:]
    sent = time.monotonic()
    if phase in BEFORE_STEP_1 and evidence.trained_by_last_start(run):
        phase = "step"  # it was quicker
    process.send(signal.SIGTERM, targets)
    while process.everything() and time.monotonic() - sent < WAIT_S:
        process.poll()
        time.sleep(0.02)
    seconds = round(time.monotonic() - sent, 1)
    status = process.poll()
    wrong = [] if met and targets else [f"the phase was not met: {process.output[-1000:]}"]
    if left := process.everything():
        wrong.append(f"{len(left)} processes were still there after {WAIT_S} s")
        process.kill_everything()
    if launcher == "run_pretrain.sh" and status != 75:  # the others have statuses of their own
        wrong.append(f"status {status}, not 75: {process.output[-1500:]}")
    whole, saved, trained = evidence.whole_steps(run), evidence.checkpoints(run), evidence.trained_by_last_start(run)
    if sorted(saved) != whole:
        wrong.append(f"checkpoints {sorted(saved)}, whole are {whole}")
    expected = trained[-1] if trained else max([step for step, _ in evidence.attempts(run)], default=0)
    if max(whole, default=0) != expected:
        wrong.append(f"the run came to step {expected}, and the newest whole checkpoint is {max(whole, default=0)}")
    if whole and len(list(saved[whole[-1]].glob("rng-*"))) != setting.ranks:
        wrong.append("the checkpoint lacks a rank's random state")
    if not wrong:
        shutil.rmtree(folder)
    return {
        "ok": not wrong,
        "wrong": wrong,
        "launcher": launcher,
        "target": target,
        "phase": phase,
        "ranks": setting.ranks,
        "status": status,
        "trained": len(trained),
        "whole": whole,
        "seconds_to_end": seconds,
    }


def _begin(lab: Lab, setting: Setting, folder: Path, launcher: str) -> None:
    """A run that was killed behind its first checkpoint, for the start that the signal meets."""
    process = _start(lab, setting, folder, launcher, "step")
    while process.poll() is None and not evidence.whole_steps(folder / "run"):
        time.sleep(0.01)
    process.kill_everything()


def _start(lab: Lab, setting: Setting, folder: Path, launcher: str, phase: str) -> ColdRun:
    shutil.copy(callbacks.__file__, lab.runner.folder / "callbacks_of_campaign.py")
    recipe = lab.recipe(setting)
    cache = lab.cache
    slow = {}
    if phase == "preparation":
        cache = lab.partly_prepared(Setting(), folder)
        shutil.rmtree(cache / "shards")
        slow = injector.faults(slow_us=50_000, slow_under=cache / "shards")
    elif phase == "save":
        slow = injector.faults(slow_us=SLOW_US, slow_under=folder / "run")
    overrides = [f"run.directory={folder}", "run.name=run", f"data.cache_dir={cache}"]
    overrides += ["run.callbacks=[callbacks_of_campaign:Phases]", "data.shard_rows=256"]
    if phase == "evaluation":
        overrides.append("evals.tasks=[callbacks_of_campaign:slow_task]")
    if phase == "sampling":
        overrides += ["samples.max_new_tokens=400", f"samples.every_steps={SAVE_STEPS}"]
    if phase == "compilation":
        overrides.append("train.torch_compile=true")
        slow = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    entry = [str(ROOT / "pipeline" / "pretrain.py"), str(recipe), *overrides]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FAULTS_PHASE_FILE": str(folder / "phase"), **slow}
    if launcher == "run_pretrain.sh":
        command = ["bash", str(ROOT / "run_pretrain.sh"), *entry[1:]]
        environment |= {"VIRTUAL_ENV": sys.prefix, "NPROC": str(setting.ranks), "CUDA_VISIBLE_DEVICES": ""}
    elif launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # on a free port
        command += ["--nproc_per_node", str(setting.ranks), *entry]
        environment["ACCELERATE_USE_CPU"] = "true"
    else:
        command = lab.runner.command(recipe, *overrides, ranks=setting.ranks, launcher=True)
    return ColdRun(command, environment=environment, folder=lab.folder, log=folder / "run.log")


def _wait_for(process: ColdRun, setting: Setting, run: Path, phase: str, chance: random.Random) -> bool:
    """Wait for the phase; False when the run ended before."""
    after, phase_file = chance.randint(1, 2 * SAVE_STEPS), run.parent / "phase"

    def met() -> bool:
        if phase in ("before step 1", "resuming"):
            begun = 2 if phase == "resuming" else 1
            return len(evidence.attempts(run)) == begun and len(process.ranks()) == setting.ranks
        if phase == "compilation":
            return any((run.parent / "compiled").rglob("*.cpp")) and len(process.ranks()) == setting.ranks
        if phase == "preparation":
            return any((run.parent / "cache" / "shards").rglob("*")) and len(process.ranks()) == setting.ranks
        if phase == "save":
            return any(name.startswith(".tmp-checkpoint") for name in evidence.left_over(run))
        if phase == "sampling":
            return any("val/bpb" in row and row["step"] > 0 for row in evidence.metrics(run))
        now = phase_file.read_text() if phase_file.exists() else ""
        return now == phase and (phase == "evaluation" or evidence.logged_step(run) >= after)

    ends = time.monotonic() + WAIT_S
    while not (there := met()) and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.002)
    if phase in ("before step 1", "resuming"):
        time.sleep(chance.random() / 5)  # less than the first step takes
    return there and process.poll() is None


def _all(process: ColdRun) -> list[int]:
    """The launcher and the ranks; the child that prepares data is a process of the run's own."""
    return [*process.own(), *process.ranks()]


def figure(rows: list[dict]) -> str:
    seconds = sorted(row["seconds_to_end"] for row in rows)
    script = [row for row in rows if row["launcher"] == "run_pretrain.sh"]
    stepped = sum(bool(row["trained"]) for row in rows)
    kept = sum(bool(row["whole"]) and not row["trained"] for row in rows)
    phases = ", ".join(f"{sum(r['phase'] == phase for r in rows)} {phase}" for phase in PHASES)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} ({phases}; {sum(r['ranks'] == 2 for r in rows)} on two ranks): {stepped} had made "
        f"a step and left one whole checkpoint at the last one, of all ranks; of the others {kept} left the checkpoint that they came from "
        f"and {len(rows) - stepped - kept}, new runs, none; status 75 from run_pretrain.sh in {sum(r['status'] == 75 for r in script)} of "
        f"{len(script)} (the launchers of torch and accelerate give their own); seconds from the signal to the end of all processes: median "
        f"{seconds[len(seconds) // 2]}, most {seconds[-1]} ({sum(s <= END_WITHIN_S for s in seconds)} of {len(rows)} within {END_WITHIN_S})"
    )
