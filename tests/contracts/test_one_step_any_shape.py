"""Contract 1: the same batch_tokens give the same losses for any number of processes, micro-batch and accumulation."""

import pytest

TOLERANCE = {
    "gpt2": 1e-5,
    "modern": 1e-4,
    "portable": 1e-4,
}  # relative; Muon's orthogonalisation amplifies the last bits


@pytest.fixture
def runner(runner):
    return runner


@pytest.mark.full_except("pretrain-modern")
@pytest.mark.parametrize(
    ("stage", "model"),
    [
        ("pretrain", "modern"),
        ("sft", "gpt2"),
        pytest.param("pretrain", "gpt2", marks=pytest.mark.slow),
        pytest.param("sft", "modern", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_micro_batch_or_processes(runner, stage, model):
    # SFT rows carry uneven masks: a mean of means would show.
    recipe = runner.recipe("shape", model) if stage == "pretrain" else runner.sft_recipe("shape", model)
    reference = runner.train(recipe, "run.name=a", "train.per_device_train_batch_size=8", stage=stage).values(
        "train/loss"
    )
    assert len(reference) == 20
    for name, micro_batch, ranks in (
        ("b", 3, 1),  # 8 rows in micro-batches of 3: the last one is filled up
        ("c", 2, 2),
        ("d", 3, 2),
    ):
        how = {"stage": stage, "ranks": ranks}
        run = runner.train(recipe, f"run.name={name}", f"train.per_device_train_batch_size={micro_batch}", **how)
        losses = run.values("train/loss")
        assert losses == pytest.approx(reference, rel=TOLERANCE[model]), f"micro-batch {micro_batch} on {ranks} ranks"


@pytest.mark.full
def test_in_bf16_the_losses_stay_within_its_rounding(runner):
    recipe = runner.recipe("half", "modern", train={"bf16": True, "max_steps": 20, "logging_steps": 1})
    # Slowly, so that steps do not amplify the rounding: at full rates CPUs without AMX come to 2e-2 by step 7.
    slowly = "optimizer.rate_scale=0.1"
    one, other = (
        runner.train(recipe, slowly, f"run.name={name}", f"train.per_device_train_batch_size={rows}").values(
            "train/loss"
        )
        for name, rows in (("a", 8), ("b", 3))
    )
    assert one == pytest.approx(other, rel=1e-3)
    assert one != other
