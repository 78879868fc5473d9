"""What a run promises at its start is what it comes to: counts exactly, and a probe's step and memory in its plan."""

import json
import re

import pytest

from pipeline.plan.__main__ import main as preflight
from pipeline.report.run_data import read_run
from pipeline.report.sections import outcome_text

EXACT = ("parameters", "steps", "tokens (row positions)", "FLOPs, nanochat's formula")


@pytest.mark.full_except("modern-sft")
@pytest.mark.parametrize(("model", "stage"), [("gpt2", "pretrain"), ("modern", "pretrain"), ("modern", "sft")])
def test_parameters_steps_tokens_and_flops_are_those_planned(runner, model, stage):
    write = runner.recipe if stage == "pretrain" else runner.sft_recipe
    run = runner.train(write(f"{model}-{stage}", model, train={"max_steps": 4}), stage=stage)
    text = outcome_text(read_run(str(run.directory)))
    for name in EXACT:
        assert re.search(rf"\| {re.escape(name)} \|.*\| exact \|", text), f"{name}\n{text}"


@pytest.mark.full
def test_a_probe_is_kept_and_the_runs_own_plan_stands_on_it(runner, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    recipe = runner.recipe("probed", "gpt2", train={"max_steps": 4})
    assert preflight([str(recipe), "--probe", "0.2"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"probe: (\d+) steps of ([\d.]+) s \(([\d.]+) to ([\d.]+)\) after a first one of", said)
    assert found, said
    assert int(found[1]) >= 1
    assert float(found[3]) <= float(found[2]) <= float(found[4])
    run = runner.train(recipe)
    plan = json.loads((run.directory / "run_manifest.json").read_text())["plan"]
    assert plan["probe"]["steps"] == int(found[1])
    assert plan["training_s"] == pytest.approx(4 * plan["probe"]["step_s"])
    assert plan["probe"]["peak_bytes"] > 50e6  # Python and torch alone are more
    assert "as probed" not in said  # not known before it was measured
    preflight([str(recipe), "--probe", "0"])
    assert re.search(r"known from +as probed", capsys.readouterr().out)
