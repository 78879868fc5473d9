"""The verdict on a run does not depend on how often it was logged."""

import json
from statistics import fmean

import numpy as np
import pytest

from faults.audit import audit
from pipeline.process.storage import write_text
from pipeline.recipe.schema import Monitor
from pipeline.report.diagnosis import verdict
from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.run_data import read_run
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.guard import StepGuard
from pipeline.training.meters import StepMeter
from tests.report.made_runs import falling, noisy

STEPS = 640


def logged(folder, every, *, norms, losses):
    """A run of these norms and losses by step, logged every so many steps by the trainer's own parts."""
    run = RunDirectory(folder)
    run.path.mkdir()
    guard, meter = StepGuard(run, Monitor()), StepMeter(tokens_at=lambda step: step, max_steps=STEPS, world_size=1)
    run.add_event("attempt", step=0, attempt=1)
    write_text(run.recipe, json.dumps({"train": {"max_grad_norm": 1.0, "logging_steps": every}}))
    for end in [*range(every, STEPS, every), STEPS]:
        begin = (end - 1) // every * every
        guard.norms = norms[begin:end]
        row = {"step": end, "attempt": 1, "train/loss": fmean(losses[begin:end])}
        row["train/loss_ema"] = meter.read(step=end, losses=losses[begin:end], wait_s=0.0)["train/loss_ema"]
        append_row(run.metrics, row | guard.read(max_norm=1.0))
        guard.report_spikes(end, {"optim/grad_norm": norms[begin:end], "train/loss": losses[begin:end]})
    return read_run(str(folder))


def quiet_series():
    return {"norms": noisy(np.linspace(0.4, 0.27, STEPS), share=0.1), "losses": noisy(falling(STEPS), seed=1)}


def spiking_series():
    """As the chat quickstart's at logging_steps=1: 24 norms of eight times the usual one, none of them at a step that 20 divides."""
    series = quiet_series()
    for step in range(30, 630, 25):
        series["norms"][step] = 2.26
    return series


def diverging_series():
    """The same, and the loss follows the norm."""
    series = spiking_series()
    for step in (331, 432, 530):
        series["losses"][step] *= 2
    return series


SERIES = [(quiet_series(), "healthy"), (spiking_series(), "healthy"), (diverging_series(), "trouble")]


@pytest.mark.parametrize(("series", "level"), SERIES)
def test_logging_steps_of_1_7_and_20_give_one_verdict(tmp_path, series, level):
    runs = {every: logged(tmp_path / f"every-{every}", every, **series) for every in (1, 7, 20)}
    findings = {every: diagnose(run) for every, run in runs.items()}
    levels = {every: {rule: result.level for rule, result in found.items()} for every, found in findings.items()}
    assert levels[1] == levels[7] == levels[20]
    assert not any(found.wrong for run in runs.values() for found in audit(run).values())
    assert levels[1]["loss does not spike"] == level
    assert verdict(findings[1]) == verdict(findings[7]) == verdict(findings[20])
    assert len({found["loss does not spike"].evidence for found in findings.values()}) == 1
    clipped = {found["clipping acts now and then"].evidence.partition(" of ")[0] for found in findings.values()}
    assert len(clipped) == 1
