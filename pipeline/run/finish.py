"""The end of a run: model/, its results in the manifest, the report."""

import sys
import time
from typing import Any

from pipeline.data.losses import table
from pipeline.hardware.processor import peak_bytes
from pipeline.process.commands import command
from pipeline.process.progress import waiting
from pipeline.run.summary import results
from pipeline.run_dir.failures import write_report
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import write_finished_model
from pipeline.training.trainer import TandemTrainer


def finish_run(directory: RunDirectory, trainer: TandemTrainer, publishing: Any, *, dtype: str) -> None:
    """Write the finished model in this dtype, its results and the report, and publish it (publishing:
    run_dir/hub_queue.py; None without hub.id). Every rank calls it, the first one acts."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = model.state_dict()
    if trainer.is_sharded:
        from pipeline.training.sharding import whole_on_rank_0

        weights = whole_on_rank_0(weights)
    if trainer.is_world_process_zero():
        with waiting("writing the model", after_s=1.0):
            write_finished_model(
                directory,
                model,
                trainer.processing_class,
                weights=weights,
                dtype=dtype,
                step=trainer.state.global_step,
            )
        directory.update_manifest(
            status="finished",
            ended=time.time(),
            results=results(directory),
            shares=trainer.rows.shares(),
            peak_memory_bytes=_peak_memory(trainer),
        )
        with open(directory.console, "a", encoding="utf-8") as log:  # by now all that the run read is prepared
            log.write(f"{table(trainer.rows.plan)}\n")
        _write_report(directory)
    # The process group is left to the end of the process: taking it down while DDP still holds it can deadlock in
    # gloo.
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        if publishing is not None:
            publishing.finish()  # alone: no other rank waits for a service
        # Last: a run cut off before this does its end again, after it the same command says so and exits 0.
        directory.update_manifest(finished=time.time())


def _peak_memory(trainer: TandemTrainer) -> dict[str, int]:
    found = {"host": peak_bytes()}
    if trainer.args.device.type == "cuda":
        found["device"] = trainer.log_row.memory.peak()
    return found


def _write_report(directory: RunDirectory) -> None:
    """Write the report. An error of it is printed: the run is whole without it."""
    with waiting("writing the report", after_s=1.0):
        problem = write_report(directory)
    if problem:
        print(
            f"{problem}\n{directory.report}: the report could not be written, for the reason above; nothing else of "
            f"the run depends on it. To try again: {command('report', directory.path)}",
            file=sys.stderr,
        )
