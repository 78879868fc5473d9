"""The loss that balances experts counts once a step, and neither train/loss nor train/bpb holds it."""

import json

import pytest

MIXTURE = {
    "type": "mixtral",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "options": {"intermediate_size": 64, "num_local_experts": 4, "output_router_logits": True},
}
FACTOR = "model.options.router_aux_loss_coef"


@pytest.fixture
def alike(runner):
    """A recipe whose rows are all the same: the loss that balances is one number, however a batch is cut."""
    text = runner.folder / "yes.jsonl"
    text.write_text(json.dumps({"text": " yes" * 60_000}) + "\n")
    return runner.recipe(
        "experts",
        "gpt2",
        model=MIXTURE,
        data={"sources": [{"files": str(text)}]},
        optimizer={"type": "trainer"},
        train={"max_steps": 3, "max_grad_norm": 0},
    )


@pytest.mark.parametrize(("micro_batch", "ranks"), [(2, 1), (2, 2)])
def test_experts_are_balanced_alike_for_any_micro_batch_and_ranks(runner, alike, micro_batch, ranks):
    whole = runner.train(alike, f"{FACTOR}=3.0", "run.name=whole", "train.per_device_train_batch_size=8")
    size = f"train.per_device_train_batch_size={micro_batch}"
    cut = runner.train(alike, f"{FACTOR}=3.0", "run.name=cut", size, ranks=ranks)
    for name in ("train/loss", "train/bpb", "optim/grad_norm"):
        assert cut.values(name) == pytest.approx(whole.values(name), rel=1e-3), name
    unbalanced = runner.train(alike, f"{FACTOR}=0.0", "run.name=unbalanced", size, ranks=ranks)
    for name in ("train/loss", "train/bpb"):
        assert cut.values(name)[1] == pytest.approx(unbalanced.values(name)[1], rel=1e-6), name
    assert cut.values("optim/grad_norm")[1] > 1.2 * unbalanced.values("optim/grad_norm")[1]
