"""Tensor parallelism on two gloo ranks keeps the contracts: losses of one process, exact resume, whole checkpoints."""

import pytest

from pipeline.model.saved import read_tensors
from pipeline.run_dir.checkpoints import by_step, step_of
from pipeline.training.staging_buffer import layout_of
from tests.contracts.test_exact_resume import assert_same_end, positions
from tests.contracts.test_one_step_any_shape import TOLERANCE

SPLIT = {"ranks": 2, "tensor_parallel": True}
FP32 = "train.bf16=false"


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("portable", []),
        ("portable", ["optimizer.type=adamw"]),
    ],
)
def test_two_tensor_parallel_ranks_have_the_losses_of_one_process(runner, model, more):
    recipe = runner.recipe("shape", model, train={"max_steps": 20, "logging_steps": 1, "max_grad_norm": 0.5})
    small = ("train.per_device_train_batch_size=2", *more, FP32)
    one, two = (runner.train(recipe, f"run.name={name}", *small, **how) for name, how in (("one", {}), ("two", SPLIT)))
    assert "2 processes, each layer split among them (tensor parallel)" in two.output
    for name in ("train/loss", "optim/grad_norm", "train/bpb"):
        assert len(one.values(name)) == 20
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name
    for name in ("optim/param_norm", "optim/update_ratio", "optim/num_zeros_in_grad", "val/loss"):
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name
    ends = [run.directory / "checkpoints" / "checkpoint-20" for run in (one, two)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (read_tensors(end, name) for end in ends)
        assert layout_of(first) == layout_of(second)


@pytest.mark.slow
def test_ranks_that_share_layers_draw_the_same_dropout_masks_as_one_process(runner):
    recipe = runner.recipe("dropout", "modern", train={"max_steps": 12, "logging_steps": 1})
    more = ("train.per_device_train_batch_size=2", "model.options.value_embeddings=false", FP32)
    drop = "model.options.resid_pdrop=0.1"
    one, two, without = (
        runner.train(recipe, f"run.name={name}", *more, *drops, **how)
        for name, drops, how in (("one", [drop], {}), ("two", [drop], SPLIT), ("without", [], SPLIT))
    )
    for name in ("train/loss", "val/bpb"):
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE["modern"]), name
    assert two.values("train/loss") != pytest.approx(without.values("train/loss"), rel=1e-3)


@pytest.mark.slow
def test_in_bf16_the_losses_are_those_of_one_process(runner):
    recipe = runner.recipe("half", "portable", train={"bf16": True, "max_steps": 10, "logging_steps": 1})
    slowly = ("optimizer.rate_scale=0.1", "train.per_device_train_batch_size=2")  # as in test_one_step_any_shape.py
    one, two = (
        runner.train(recipe, f"run.name={name}", *slowly, **how) for name, how in (("one", {}), ("two", SPLIT))
    )
    assert two.values("train/loss") == pytest.approx(one.values("train/loss"), rel=1e-3)
    assert two.values("val/bpb") == pytest.approx(one.values("val/bpb"), rel=1e-3)


@pytest.mark.slow
def test_a_run_killed_midway_ends_bitwise_as_the_uncut_one(runner):
    recipe = runner.recipe("resume", "portable", samples={"every_steps": 10, "prompts": ["the"], "max_new_tokens": 8})
    more = (FP32,)
    uncut = runner.train(recipe, "run.name=uncut", *more, **SPLIT)
    directory = runner.kill(recipe, *more, name="cut", after_step=12, **SPLIT)
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, "run.name=cut", *more, **SPLIT)
    assert f"going on from {newest}" in cut.output
    assert_same_end(cut, uncut)
    texts = [(run.directory / "samples.jsonl").read_text() for run in (cut, uncut)]
    assert texts[0].count('"text"') == texts[1].count('"text"') > 0


@pytest.mark.slow
def test_switching_from_split_layers_neither_repeats_nor_skips_rows(runner):
    recipe = runner.recipe("shapes", "portable")
    whole = runner.train(recipe, "run.name=whole", FP32)
    shapes = (SPLIT, {"ranks": 1}, {"ranks": 2, "sharded": True})
    for after_step, shape in zip((6, 11), shapes, strict=False):
        directory = runner.kill(recipe, FP32, name="shapes", after_step=after_step, **shape)
    assert [step_of(checkpoint) for checkpoint in by_step(directory / "checkpoints")] == [5, 10]
    last = runner.train(recipe, FP32, **shapes[-1])
    assert "sharded False -> True" in last.output
    assert last.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=TOLERANCE["portable"])
    assert positions(last.directory)[20]["rows"] == positions(whole.directory)[20]["rows"]


def test_a_model_without_a_plan_is_refused_before_the_first_step(runner):
    refused = runner.train(runner.recipe("refused", "modern"), status=64, **SPLIT)
    assert "the launcher asks for tensor parallelism, and TandemForCausalLM has no plan for it" in refused.output
