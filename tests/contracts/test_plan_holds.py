"""What a run promises at its start is what it comes to: counts exactly, and a probe's step and memory in its plan."""

import re

import pytest

from pipeline.plan.__main__ import main
from pipeline.report.cost import plan_vs_actual_text
from pipeline.report.run_data import read_run

EXACT = ("parameters", "steps", "tokens (row positions)", "FLOPs, nanochat's formula")


@pytest.mark.full_except("modern-sft")
@pytest.mark.parametrize(("model", "stage"), [("gpt2", "pretrain"), ("modern", "pretrain"), ("modern", "sft")])
def test_parameters_steps_tokens_and_flops_are_those_planned(runner, model, stage):
    write = runner.recipe if stage == "pretrain" else runner.sft_recipe
    run = runner.train(write(f"{model}-{stage}", model, train={"max_steps": 4}), stage=stage)
    text = plan_vs_actual_text(read_run(str(run.directory)))
    for name in EXACT:
        assert re.search(rf"\| {re.escape(name)} \|.*\| exact \|", text), f"{name}\n{text}"


@pytest.mark.full
def test_a_probe_measures_steps_of_the_recipe(runner, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert main([str(runner.recipe("probed", "gpt2", train={"max_steps": 4})), "--probe", "0.2"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"probe: (\d+) steps of ([\d.]+) s after a first one of", said)
    assert found, said
    assert int(found[1]) >= 1
    assert re.search(r"time, without preparing data and benchmarks +[\d.]+ min, as probed", said)
