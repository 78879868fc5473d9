"""Trials on tensors without data against known parameter counts and real steps."""

import sys
from pathlib import Path

import pytest

from pipeline.evals.bpb import LOGITS_AT_ONCE
from pipeline.plan.__main__ import main
from pipeline.plan.fit import TABLE, config_of, known_models
from pipeline.plan.memory import SCORED_LOGITS
from pipeline.plan.step_memory import memory_of_config
from pipeline.process.errors import InputMissingError
from pipeline.recipe.model_sizes import sizes_from_config
from pipeline.recipe.schema import Adapter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SHARED = {"attention": "sdpa", "on_cpu": True, "row_tokens": 128, "half": False, "isolated": False}


def activations(name, *, rows=2, adapter=None, checkpointing=None):
    step = memory_of_config(config_of(name), adapter=adapter, checkpointing=checkpointing, **SHARED)
    peaks = step.peaks(rows)
    return step, max(peaks.blocks, peaks.at_head + peaks.logits)


@pytest.mark.parametrize("name", known_models())
def test_a_known_model_has_its_published_number_of_parameters(name):
    sizes = sizes_from_config(config_of(name), 512)
    assert sizes.parameters()["total"] == known_models()[name]["parameters"]


def test_scoring_holds_as_many_logits_as_planned():
    assert SCORED_LOGITS == LOGITS_AT_ONCE


def test_recomputed_activations_and_fewer_rows_hold_less():
    _, kept = activations("SmolLM2-135M", rows=8)
    _, recomputed = activations("SmolLM2-135M", rows=8, checkpointing={})
    _, few = activations("SmolLM2-135M", rows=4)
    assert recomputed < kept / 2
    assert few < 0.75 * kept


def test_an_adapter_of_a_known_model_is_counted_by_peft():
    pytest.importorskip("peft")
    step, _ = activations("SmolLM2-135M", adapter=Adapter(r=16))
    # r x (inputs + outputs) of the seven matrices of each of 30 blocks.
    block = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    assert step.trained == 30 * 16 * block
    assert step.total == 134_515_008 + step.trained


def test_gpt2_is_tried_as_the_model_that_is_trained():
    pytest.importorskip("peft")
    whole, _ = activations("gpt2")
    adapted, _ = activations("gpt2", adapter=Adapter(r=16))
    assert whole.chunked  # a Tandem; PEFT's names are those of transformers' own class
    assert not adapted.chunked
    assert whole.total == adapted.total - adapted.trained == 124_439_808


@pytest.mark.full
def test_what_fits_a_card_is_printed_for_a_known_model(capsys):
    pytest.importorskip("peft")
    assert main(["SmolLM2-135M", "--fit", "8GB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = next(line.split()[4:] for line in lines if "rows of 512 tokens" in line)
    full, full_recomputed, lora, lora_recomputed = map(int, rows)
    assert 0 < full < full_recomputed < lora_recomputed
    assert full < lora


def test_a_model_that_is_not_here_is_refused_with_the_known_names():
    with pytest.raises(InputMissingError, match="SmolLM2-135M"):
        config_of("nobody/nothing")
    assert TABLE.is_file()


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_real_steps_take_what_a_trial_says(tmp_path, number):
    pytest.importorskip("peft")
    from memory_against_plan import CASES, baseline, compare

    row = compare(CASES[number], tmp_path, base=baseline(), process=False)
    assert 0.9 < row["ratio"] < 1.15
