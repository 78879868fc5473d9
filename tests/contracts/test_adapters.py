"""Adapters hold the contracts: exact resume, any shape, whole checkpoints of kilobytes, each of which is PEFT's."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pipeline.contrib.export import export
from pipeline.evals.subject import find_subject, load
from pipeline.run_dir.checkpoints import by_step, problems, read_seal
from tests.families import FAMILIES, save_model

pytest.importorskip("peft")
# The embedding whole, and dropout, whose state must survive too.
DROPOUT = (
    "model.adapter={r: 4, dropout: 0.2, target: [q_proj, v_proj], use_dora: true, modules_to_save: [embed_tokens]}"
)
WEIGHTS = "adapter_model.safetensors"
FOREIGN = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import save_file
folder, merged, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
message = [{"role": "user", "content": "Is it so?"}]
ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
models = {"peft": AutoPeftModelForCausalLM.from_pretrained(folder)}
models["merged"] = AutoModelForCausalLM.from_pretrained(merged)
with torch.no_grad():
    logits = {name: model.eval()(input_ids=ids).logits[0] for name, model in models.items()}
save_file({"ids": ids[0], **logits}, output)
"""


def recipe_for(runner, folder, stage="sft", **adapter):
    make = runner.sft_recipe if stage == "sft" else runner.recipe
    recipe = yaml.safe_load(make("adapter", "gpt2").read_text())
    recipe |= {"model": {"start_from": str(folder), "adapter": {"r": 4, **adapter}}, "optimizer": {"type": "trainer"}}
    recipe["train"] |= {"learning_rate": 1e-2, "bf16": False}
    del recipe["tokenizer"]
    path = runner.folder / "adapter.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def same_end(cut, uncut):
    assert cut.values("train/loss") == uncut.values("train/loss")
    assert cut.values("val/loss") == uncut.values("val/loss")
    a, b = ((run.directory / "model" / WEIGHTS).read_bytes() for run in (cut, uncut))
    assert a == b


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "ranks", "adapter"), [("sft", 1, DROPOUT), ("sft", 2, DROPOUT), ("pretrain", 1, DROPOUT)]
)
def test_adapters_killed_in_the_middle_end_bitwise_as_uncut(runner, tmp_path, stage, ranks, adapter):
    recipe = recipe_for(runner, save_model("qwen3", tmp_path / "base"), stage)
    how = {"stage": stage, "ranks": ranks}
    uncut = runner.train(recipe, "run.name=uncut", adapter, **how)
    directory = runner.kill(recipe, adapter, name="cut", after_step=12, **how)
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, "run.name=cut", adapter, **how)
    assert f"going on from {newest}" in cut.output
    same_end(cut, uncut)


@pytest.mark.full
def test_losses_of_adapters_do_not_depend_on_micro_batch_or_ranks(runner, tmp_path):
    recipe = recipe_for(runner, save_model("llama", tmp_path / "base"))
    reference = runner.train(recipe, "run.name=a", "train.per_device_train_batch_size=8", stage="sft").values(
        "train/loss"
    )
    assert len(reference) == 20
    for name, rows, ranks in (("b", 3, 1), ("c", 2, 2), ("d", 3, 2)):
        more = [f"run.name={name}", f"train.per_device_train_batch_size={rows}"]
        losses = runner.train(recipe, *more, stage="sft", ranks=ranks).values("train/loss")
        assert losses == pytest.approx(reference, rel=1e-5), f"micro-batch {rows} on {ranks} ranks"


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_and_its_merge_give_the_same_logits_elsewhere(runner, stock, tmp_path, name):
    base = save_model(name, tmp_path / "base")
    before = (base / "model.safetensors").read_bytes()
    run = runner.train(recipe_for(runner, base), "train.max_steps=6", stage="sft")
    folder = run.directory / "model"
    assert (base / "model.safetensors").read_bytes() == before
    for written in (folder, by_step(run.directory / "checkpoints")[-1]):
        assert problems(written) == []
        assert sum(file.stat().st_size for file in written.glob("adapter_*")) < 80_000
        assert not (written / "model.safetensors").exists()
        assert json.loads((written / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    recorded = read_seal(written)["base"]
    assert recorded == run_inputs(run)["start_from"]
    assert recorded["model.safetensors"]
    merged = export(str(run.directory), to="safetensors", max_shard_size="5GB", merge=True)
    stock.run(FOREIGN, folder, merged, tmp_path / "theirs", folder=tmp_path)
    theirs = load_file(tmp_path / "theirs")
    ours, tokenizer = load(find_subject(str(run.directory)), device="cpu")
    with torch.no_grad():
        logits = ours(theirs["ids"][None]).logits[0]
    assert torch.allclose(theirs["peft"], logits, rtol=0, atol=1e-6)
    assert torch.allclose(theirs["merged"], logits, rtol=0, atol=1e-4)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(merged).get_vocab()
    plain, _ = load(find_subject(str(base)), device="cpu")
    if len(tokenizer) <= len(plain.get_input_embeddings().weight):
        with torch.no_grad():
            assert not torch.allclose(plain(theirs["ids"][None]).logits[0], logits, atol=1e-3)


def run_inputs(run):
    return json.loads((run.directory / "run_manifest.json").read_text())["inputs"]
