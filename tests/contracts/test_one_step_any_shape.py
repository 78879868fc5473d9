"""Contract 1: the same batch_tokens give the same losses for any number of processes, micro-batch and accumulation."""

import pytest

TOLERANCE = {"gpt2": 1e-5, "modern": 1e-4}  # relative; Muon's orthogonalisation amplifies the last bits


@pytest.mark.parametrize("model", ["gpt2", "modern"])
def test_the_losses_of_20_steps_do_not_depend_on_micro_batch_or_processes(runner, model):
    recipe = runner.recipe("shape", model)
    reference = runner.train(recipe, "run.name=a", "train.per_device_train_batch_size=8").values("train/loss")
    assert len(reference) == 20
    for name, overrides, ranks in (
        ("b", ["train.per_device_train_batch_size=2"], 1),
        ("c", ["train.per_device_train_batch_size=3"], 1),  # 8 rows in micro-batches of 3: the last one is filled up
        ("d", ["train.per_device_train_batch_size=2"], 2),
        ("e", ["train.per_device_train_batch_size=3"], 2),
    ):
        losses = runner.train(recipe, f"run.name={name}", *overrides, ranks=ranks).values("train/loss")
        assert losses == pytest.approx(reference, rel=TOLERANCE[model]), f"{overrides} on {ranks} ranks"
