"""Activations that are computed again change nothing: losses, weights and a resume are those without, to the bit."""

import pytest
import yaml

from tests.families import save_model

RECOMPUTE = "train.activation_checkpointing=true"


def recipe_for(runner, folder, model):
    recipe = yaml.safe_load(runner.sft_recipe("recompute", "gpt2").read_text())
    recipe |= {"model": {"start_from": str(folder), **model}, "optimizer": {"type": "trainer"}}
    recipe["train"] |= {"learning_rate": 1e-2, "bf16": False}
    del recipe["tokenizer"]
    path = runner.folder / "recompute.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def weights(run):
    return [file.read_bytes() for file in sorted((run.directory / "model").glob("*.safetensors"))]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "model"),
    [("qwen3", {}), ("gemma3", {}), ("gpt_neox", {}), ("llama", {"adapter": {"r": 4, "dropout": 0.2}})],
)
def test_recomputed_activations_change_no_loss_weight_or_resume(runner, tmp_path, family, model):
    if model:
        pytest.importorskip("peft")
    recipe = recipe_for(runner, save_model(family, tmp_path / "base"), model)
    kept = runner.train(recipe, "run.name=kept", stage="sft")
    runner.kill(recipe, RECOMPUTE, name="recomputed", after_step=12, stage="sft")
    recomputed = runner.train(recipe, "run.name=recomputed", RECOMPUTE, stage="sft")
    assert "going on from" in recomputed.output
    for name in ("train/loss", "val/loss", "optim/grad_norm"):
        assert recomputed.values(name) == kept.values(name)
    assert weights(recomputed) == weights(kept)


@pytest.mark.full
def test_recomputed_blocks_of_gpt2_drop_the_same_channels(runner):
    recipe = runner.recipe("dropout", "gpt2")
    dropout = "model.options={resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.1}"
    kept = runner.train(recipe, "run.name=kept", dropout)
    recomputed = runner.train(recipe, "run.name=recomputed", dropout, RECOMPUTE)
    assert recomputed.values("train/loss") == kept.values("train/loss")
    assert weights(recomputed) == weights(kept)
