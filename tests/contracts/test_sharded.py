"""FSDP2 on two gloo ranks keeps the contracts: losses of one process, exact resume, whole checkpoints, all evaluations."""

import json

import pytest

from pipeline.model.saved import read_tensors
from pipeline.run_dir.checkpoints import by_step, step_of
from pipeline.training.checkpoint_parts import part_file
from pipeline.training.staging_buffer import layout_of
from tests.contracts.test_benchmarks_in_training import events, recipe_of
from tests.contracts.test_exact_resume import CANDIDATES, assert_same_end, positions
from tests.contracts.test_one_step_any_shape import TOLERANCE

SHARDED = {"ranks": 2, "sharded": True}
HYBRID = {"ranks": 4, "sharded": True, "replicas": 2}
FP32 = "train.bf16=false"


@pytest.mark.full_except("pretrain-modern-more1")
@pytest.mark.parametrize(
    ("stage", "model", "more"),
    [
        ("pretrain", "gpt2", {}),
        ("pretrain", "modern", {}),
        ("sft", "modern", {"gradient_checkpointing": True}),
        ("pretrain", "portable", {}),
    ],
)
def test_two_sharded_ranks_have_the_losses_and_norms_of_one_process(runner, stage, model, more):
    make, bpb = (runner.recipe, "bpb") if stage == "pretrain" else (runner.sft_recipe, "assistant_bpb")
    recipe = make("shape", model, train={"max_steps": 20, "logging_steps": 1, "max_grad_norm": 0.5, **more})
    small = ("train.per_device_train_batch_size=2", FP32)
    one, two = (
        runner.train(recipe, f"run.name={name}", *small, stage=stage, **how)
        for name, how in (("one", {}), ("two", SHARDED))
    )
    assert "2 processes, the model sharded (FSDP2)" in two.output
    for name in ("train/loss", "optim/grad_norm", f"train/{bpb}"):
        assert len(one.values(name)) == 20
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name
    for name in ("optim/param_norm", "optim/update_ratio"):
        assert sorted(one.values(name)) == [10, 20]
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name
    assert two.values("val/loss") == pytest.approx(one.values("val/loss"), rel=TOLERANCE[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "modern"])
def test_four_hybrid_sharded_ranks_have_the_losses_of_one_process(runner, model):
    recipe = runner.recipe("hybrid", model, train={"max_steps": 20, "logging_steps": 1, "max_grad_norm": 0.5})
    small = ("train.per_device_train_batch_size=2", FP32)
    one, four = (
        runner.train(recipe, f"run.name={name}", *small, **how) for name, how in (("one", {}), ("four", HYBRID))
    )
    assert "4 processes, 2 copies of the model, each sharded (HSDP)" in four.output
    for name in ("train/loss", "optim/grad_norm", "val/loss"):
        assert four.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name


@pytest.mark.full
def test_sharded_losses_in_bf16_keep_their_digits_and_match_one_process(runner):
    recipe = runner.recipe("half", "modern", train={"bf16": True, "max_steps": 10, "logging_steps": 1})
    # Slowly, as in test_one_step_any_shape.py.
    slowly = ("optimizer.rate_scale=0.1", "train.per_device_train_batch_size=2")
    one, two = (
        runner.train(recipe, f"run.name={name}", *slowly, **how) for name, how in (("one", {}), ("two", SHARDED))
    )
    assert two.values("train/loss") == pytest.approx(one.values("train/loss"), rel=1e-3)
    assert two.values("val/bpb") == pytest.approx(one.values("val/bpb"), rel=1e-3)
    eighths = [
        loss * 32 for loss in two.values("train/loss").values()
    ]  # bfloat16 knows of 6.2 no finer steps than 1/32
    assert all(abs(loss - round(loss)) > 1e-4 for loss in eighths[1:])


@pytest.mark.full
def test_separately_compiled_blocks_give_the_losses_of_one_process(runner):
    more = ("model.n_layer=10", "train.max_steps=6", "train.eval_steps=3", "samples.every_steps=3", FP32)
    recipe = runner.recipe("compiled", "modern", train={"per_device_train_batch_size": 2})
    one = runner.train(recipe, "run.name=one", *more)
    two = runner.train(recipe, "run.name=two", "train.torch_compile=true", *more, **SHARDED)
    assert "the model sharded (FSDP2), " in two.output
    assert ", torch.compile, " in two.output
    for name in ("train/loss", "val/bpb"):
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE["modern"]), name
    assert "recompile_limit" not in two.output  # ten blocks, and evaluations between the steps: four graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt2", []),
        ("modern", [*CANDIDATES]),
        ("modern", ["train.torch_compile=true", "train.gradient_checkpointing=true"]),
    ],
)
def test_a_sharded_run_killed_midway_ends_bitwise_as_the_uncut_one(runner, model, more):
    recipe = runner.recipe("resume", model)
    uncut = runner.train(recipe, "run.name=uncut", FP32, *more, **SHARDED)
    directory = runner.kill(recipe, FP32, *more, name="cut", after_step=12, **SHARDED)
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, "run.name=cut", FP32, *more, **SHARDED)
    assert f"going on from {newest}" in cut.output
    assert_same_end(cut, uncut)


@pytest.mark.full
def test_switching_between_sharded_and_one_process_neither_repeats_nor_skips_rows(runner):
    recipe = runner.recipe("elastic", "modern")
    whole = runner.train(recipe, "run.name=whole", FP32, ranks=2)
    directory = runner.kill(recipe, FP32, name="elastic", after_step=6, **SHARDED)
    runner.kill(recipe, FP32, name="elastic", after_step=11, ranks=1)
    assert [step_of(checkpoint) for checkpoint in by_step(directory / "checkpoints")] == [5, 10]
    elastic = runner.train(recipe, FP32, **SHARDED)
    assert "going on with another shape (processes 1 -> 2; " in elastic.output
    assert "sharded False -> True" in elastic.output
    assert elastic.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=TOLERANCE["modern"])
    assert positions(elastic.directory)[20]["rows"] == positions(whole.directory)[20]["rows"]
    # A checkpoint holds the same tensors, whatever wrote it; of a sharded model each rank has written a part of them.
    one, two = (run.directory / "checkpoints" / "checkpoint-20" for run in (whole, elastic))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert layout_of(read_tensors(one, name)) == layout_of(read_tensors(two, name))
        parts = [(two / part_file(name, rank, 2)).stat().st_size for rank in (0, 1)]
        assert max(parts) < 0.6 * (one / name).stat().st_size
        assert not (two / name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "modern"])
def test_changing_ranks_and_model_copies_neither_repeats_nor_skips_rows(runner, model):
    recipe = runner.recipe("shapes", model)
    whole = runner.train(recipe, "run.name=whole", FP32, ranks=2)
    shapes = [SHARDED, {"ranks": 1}, {"ranks": 4, "sharded": True}, HYBRID]
    for after_step, shape in zip((6, 11, 16), shapes, strict=False):
        directory = runner.kill(recipe, FP32, name="shapes", after_step=after_step, **shape)
    assert [step_of(checkpoint) for checkpoint in by_step(directory / "checkpoints")] == [10, 15]
    last = runner.train(recipe, FP32, **shapes[-1])
    assert "replicas 1 -> 2" in last.output
    assert last.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=TOLERANCE[model])
    assert positions(last.directory)[20]["rows"] == positions(whole.directory)[20]["rows"]


@pytest.mark.slow
def test_a_hybrid_run_killed_midway_ends_bitwise_as_the_uncut_one(runner):
    recipe = runner.recipe("resume", "modern")
    uncut = runner.train(recipe, "run.name=uncut", FP32, **HYBRID)
    runner.kill(recipe, FP32, name="cut", after_step=12, **HYBRID)
    assert_same_end(runner.train(recipe, "run.name=cut", FP32, **HYBRID), uncut)


@pytest.mark.full
def test_a_sharded_model_has_the_samples_and_scores_of_one_process(runner):
    recipe = recipe_of(runner, "watched", "modern")
    looks = ["train.eval_steps=4", "train.max_steps=6", "evals.bpb.at_start=true", "samples.every_steps=2"]
    looks += ["samples.prompts=[The, A]", "samples.max_new_tokens=4", "samples.temperature=1.0", FP32]
    one, two = (
        runner.train(recipe, f"run.name={name}", *looks, **how) for name, how in (("one", {}), ("two", SHARDED))
    )
    for name, steps in (("val/bpb", [0, 4, 6]), ("val/bpb_documents", [0, 4, 6]), ("core_partial/v1", [4, 6])):
        assert sorted(one.values(name)) == steps, name
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE["modern"]), name
    a, b = (
        [
            (row["step"], row["prompt"], row["text"])
            for row in map(json.loads, (run.directory / "samples.jsonl").open())
        ]
        for run in (one, two)
    )
    assert a == b
    assert len(a) == 6


@pytest.mark.full
def test_a_failing_benchmark_is_reported_once_and_signals_end_both_ranks(runner):
    recipe = recipe_of(runner, "broken", "gpt2")
    run = runner.train(recipe, "run.callbacks=[breaks:Breaks]", **SHARDED)
    assert [event["step"] for event in events(run, "evaluation_failed")] == [4]
    assert sorted(run.values("core_partial/v1")) == [8, 10]
    run = runner.train(recipe, "run.name=signalled", "run.callbacks=[breaks:Signalled]", status=75, **SHARDED)
    assert by_step(run.directory / "checkpoints")[-1].name == "checkpoint-4"
    run = runner.train(recipe, "run.name=signalled", **SHARDED)
    assert sorted(run.values("core_partial/v1")) == [4, 8, 10]
