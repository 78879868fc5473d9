"""The end of a run: model/, results, report, and the next command to type."""

import os
import shlex
import shutil
import sys
import time
import traceback
from pathlib import Path

from pipeline.artifacts.rows import last_attempts, read_rows
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.data.show import table
from pipeline.hardware.cpu import peak_bytes
from pipeline.hub.beside import Publishing
from pipeline.preflight.durations import remember
from pipeline.preflight.opening import OpenRun
from pipeline.preflight.record import plan_of
from pipeline.preflight.settling import memory_hint
from pipeline.recipe import Recipe
from pipeline.training.finish import mark_finished, write_finished_model
from pipeline.training.trainer import TandemTrainer


def finish_run(recipe: Recipe, run: OpenRun, trainer: TandemTrainer, publishing: Publishing) -> None:
    """Write the finished model and its results, and publish it. Every rank calls it, the first one acts."""
    directory = run.directory
    if trainer.is_world_process_zero():
        write_finished_model(
            directory,
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.processing_class,
            dtype=recipe.hub.dtype,
            step=trainer.state.global_step,
        )
        directory.update_manifest(
            status="finished",
            ended=time.time(),
            results=results(directory),
            shares=trainer.rows.shares(),
            peak_memory_bytes=_peak_memory(trainer),
        )
        if hint := memory_hint(recipe, trainer):
            print(f"note: {hint}")
        print(table(trainer.rows.plan))  # of the data: by now all that the run read is prepared
        _look_back(recipe, run, trainer)
    # The process group is left to the end of the process: taking it down while DDP still holds it can deadlock in gloo.
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        publishing.finish()  # alone: no other rank waits for a service
        mark_finished(directory)  # last: a run cut off before this does its end again
        print(next_command(recipe, directory), flush=True)


def _peak_memory(trainer: TandemTrainer) -> dict[str, int]:
    found = {"host": peak_bytes()}
    return found | ({"device": trainer.log_row.memory.peak()} if trainer.args.device.type == "cuda" else {})


def results(directory: RunDirectory) -> dict[str, float]:
    """The last value of each validation number, the first one as <name>/first, and the time trained."""
    rows = last_attempts(read_rows(directory.metrics))
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(("val/", "sft/", "core/", "core_partial/", "chat/")):
                found.setdefault(f"{name}/first", value)
                found[name] = value
            elif name in ("train/loss", "perf/total_s", "tokens", "step"):
                found[name] = value
    return found


def next_command(recipe: Recipe, directory: RunDirectory) -> str:
    """What a person would want to do now, to be pasted into the shell that started the run."""
    path, python = shlex.quote(str(directory.path)), _python()
    lines = [f"{directory.path}: finished; the model is in {directory.model}"]
    if recipe.stage == "pretrain":
        lines.append(f"stage 2:          bash run_sft.sh recipes/quickstart_sft.yaml model.start_from={path}")
        lines.append(f'continue a text:  {python} -m pipeline.chat {path} -p "Once upon a time"')
    else:
        lines.append(f"chat with it:     {python} -m pipeline.chat {path}")
    return "\n".join(lines)


def _python() -> str:
    """`python` where that is this environment's, else its path: the scripts make one without activating it."""
    found = shutil.which("python")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "python"
    return shlex.quote(os.path.relpath(sys.executable))


def _look_back(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> None:
    """Write the report and keep what the run took. An error of theirs is printed: the run is whole without them."""
    from pipeline.report.run_data import read_run
    from pipeline.report.single import write_report

    directory = run.directory
    try:
        data = read_run(str(directory.path))
        write_report(data)
        if run.step == 0:  # one that was stopped and went on tells nothing of a start
            remember(plan_of(recipe, run, trainer), data)
    except Exception:
        traceback.print_exc()
        path = shlex.quote(str(directory.path))
        print(
            f"{directory.report}: the report, or the record of its times, could not be written, for the reason above; nothing else of the run depends on it. "
            f"To try again: {_python()} -m pipeline.report {path}",
            file=sys.stderr,
        )
