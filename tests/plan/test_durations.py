"""How long a run takes: what a probe and arithmetic say of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.hardware.accelerators import device_without_torch, planned_device
from pipeline.hardware.rates import ProductRates
from pipeline.plan import plan as durations
from pipeline.plan.plan import (
    CPU_MFU,
    Probe,
    evaluation_tokens,
    evaluations_of,
    make_plan,
    plan_of_run,
)
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import sizes_of
from pipeline.run_dir.run_directory import RunDirectory

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart_pretrain.yaml")
KIND = ("train.bf16=false", "train.torch_compile=false")
PROBE = Probe(step_s=0.5, low_s=0.4, high_s=0.9, steps=9, first_step_s=7.0, peak_bytes=2**30, time=1.0)


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    rates = ProductRates(float32=1e11, bfloat16=2e11, time=0.0)
    monkeypatch.setattr(durations, "product_rates", lambda: rates)
    monkeypatch.setattr(durations, "physical_cores", lambda: 4)

    def make(*overrides, kind=KIND, hardware=None, scored_bytes=None, processes=1):
        recipe = read_recipe([QUICKSTART, f"data.cache_dir={tmp_path}", *kind, *overrides])
        device = replace(device_without_torch(), kind="cpu", name="A processor", peak_flops=None)
        device = planned_device(hardware) if hardware else device
        return make_plan(recipe, device, processes=processes, scored_bytes=scored_bytes)

    return make


def test_on_a_processor_the_range_is_a_share_of_its_measured_products(plan_of):
    step = plan_of("train.max_steps=100").duration.step
    flops = plan_of().sizes.flops_per_token("exact_causal") * 1024
    assert step.low == pytest.approx(flops / (CPU_MFU[1] * 4 * 1e11))
    assert step.high == pytest.approx(flops / (CPU_MFU[0] * 4 * 1e11))
    halved = plan_of("train.per_device_train_batch_size=2", processes=2)  # half the work on half the cores
    assert halved.duration.step.high == pytest.approx(step.high)


def test_narrow_models_are_not_promised_a_wide_ones_share_of_a_gpu(plan_of):
    spans = [plan_of(f"model.n_embd={width}", hardware="1xH100").duration.step for width in (256, 768, 1536)]
    assert [round(span.high / span.low, 2) for span in spans] == [round(0.55 / 0.15 * 9, 2), 3.67, 3.67]


def test_the_plan_of_a_run_counts_the_vocabulary_that_its_text_gave(plan_of, tmp_path):
    recipe, run = plan_of("tokenizer.vocab_size=4096").recipe, RunDirectory(tmp_path / "run")
    run.update_manifest(inputs={"tokenizer": {"identity": "x", "size": 3318}})
    plan = plan_of_run(recipe, run, micro_batch=2, processes=1)
    assert plan.facts()["parameters"] == sizes_of(recipe, 3318).parameters()["total"]
    assert plan.facts()["steps"] == recipe.train["max_steps"]


def test_a_probe_of_the_steps_counts_before_arithmetic(plan_of):
    assert plan_of().duration.source.startswith("by arithmetic")
    duration = replace(plan_of(), probe=PROBE).duration
    assert (duration.source, duration.step.value) == ("as probed", 0.5)
    assert (duration.step.low, duration.step.high) == pytest.approx((0.5 / 1.15, 0.5 * 1.15))


def test_evaluations_and_saves_are_in_the_time(plan_of):
    assert evaluations_of(plan_of().recipe, 2400) == 1 + 3
    assert evaluations_of(plan_of("train.eval_strategy=no", "evals.bpb.at_start=false").recipe, 1900) == 1
    few, many = (plan_of(f"train.eval_steps={n}", scored_bytes=10**6).duration for n in (2400, 100))
    assert many.evaluations.value == pytest.approx(few.evaluations.value * 21 / 2)
    assert plan_of("train.save_strategy=no").duration.saves.high == 0 < few.saves.low
    parts = (few.start, few.steps, few.evaluations, few.saves)
    assert few.total.value == pytest.approx(sum(p.value for p in parts))


def test_what_is_scored_is_known_from_the_data_once_they_are_open(plan_of):
    # More than the quickstart's validation has, so that the range is one.
    recipe = plan_of("evals.bpb.tokens=131072", "evals.bpb.document_bytes=200000").recipe
    unknown, known = evaluation_tokens(recipe, None), evaluation_tokens(recipe, 350_000)
    assert known.value == pytest.approx(100_000)
    assert unknown.high == pytest.approx(131_072 + 200_000 / 3.5)
    assert unknown.low < unknown.value < unknown.high
