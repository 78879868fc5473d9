"""FSDP2 on two gloo ranks keeps the contracts: losses of one process, exact resume, whole checkpoints, all evaluations."""

import pytest

from tests.contracts.test_one_step_any_shape import TOLERANCE

SHARDED = {"ranks": 2, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # as accelerate_configs/fsdp2.yaml sets them


@pytest.mark.parametrize("model", ["gpt2", "modern"])
def test_the_losses_and_gradient_norms_of_two_ranks_that_share_a_model_are_those_of_one_process(runner, model):
    recipe = runner.recipe("sharded", model, train={"max_steps": 20, "logging_steps": 1, "max_grad_norm": 0.5})
    one, two = (
        runner.train(recipe, f"run.name={name}", "train.per_device_train_batch_size=2", "train.bf16=false", **how)
        for name, how in (("one", {}), ("two", SHARDED))
    )
    assert "2 processes, the model sharded (FSDP2)" in two.output
    for name in ("train/loss", "optim/grad_norm", "train/bpb"):
        assert len(one.values(name)) == 20
        assert two.values(name) == pytest.approx(one.values(name), rel=TOLERANCE[model]), name
    assert two.values("val/bpb") == pytest.approx(one.values("val/bpb"), rel=TOLERANCE[model])
