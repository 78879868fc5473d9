"""Texts that share a row: which models keep them apart, and rows of one text each where they do not."""

import copy
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, BertConfig, BloomConfig, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from pipeline.data.prepare import prepare_now
from pipeline.data.row_plan import plan_rows
from pipeline.data.rows import IGNORED, TrainingRows, bits
from pipeline.data.validation import ValidationRows
from pipeline.evals.bpb import per_token_nll
from pipeline.model.build import build_model, initialize_identity_blocks
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import resolve_start
from pipeline.sources.open import open_sources
from pipeline.tokenizer import load_or_train
from pipeline.training.build import build_from_recipe, resolve_rows, rows_of_recipe
from pipeline.training.isolation import try_isolation
from tests.data.conftest import conversation
from tests.families import GATED, save_model

LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONFIGS = {
    "qwen3": Qwen3Config(**GATED, head_dim=16, vocab_size=420),
    "qwen3_5": Qwen3_5TextConfig(
        **GATED, **LINEAR, head_dim=16, vocab_size=420, layer_types=["linear_attention", "full_attention"]
    ),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=420),
}
LEAK = ("qwen3_5", "bloom")


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))


def save_kind(kind: str, folder):
    """A model of the kind with a tokenizer and chat template of Qwen3's kind."""
    save_model("qwen3", folder)
    model_of(kind).save_pretrained(folder)
    return folder


def recipe_for(tmp_path, cache, kind: str, stage: str, **data):
    lines = [json.dumps({"messages": conversation(i, turns=1 + i % 3)}) for i in range(200)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    texts = [
        json.dumps({"text": f"The {i}th text is about {i * i} and {'a' * (i % 9)}. " * (1 + i % 5)})
        for i in range(300)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(texts))
    source = {"files": str(tmp_path / ("chat.jsonl" if stage == "sft" else "text.jsonl"))}
    recipe = {
        "run": {"stage": stage, "directory": str(tmp_path / "runs"), "name": f"{kind}-{stage}"},
        "data": {"sources": [source], "row_tokens": 128, "batch_tokens": 1024, "cache_dir": str(cache), **data},
        "model": {"start_from": str(save_kind(kind, tmp_path / kind))},
        "optimizer": {"type": "trainer"},
        "train": {"max_steps": 3, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1, "eval_steps": 100, "seed": 7},
        "evals": {"bpb": {"tokens": 2048, "document_bytes": 2000, "at_start": False}},
        "samples": {"every_steps": 0},
        "monitor": {"trackers": []},
    }  # fmt: skip
    path = tmp_path / f"{kind}-{stage}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def opened(path):
    """(recipe with its rows decided, model, preparation) as a training has them."""
    recipe = resolve_start(read_recipe([str(path)], stage=None))
    sources = open_sources(recipe.source_settings())
    tokenizer = load_or_train(recipe.tokenizer_settings(), sources[0], validation=sources[1])
    model = build_from_recipe(recipe, tokenizer)
    model.config.use_cache = False
    recipe = resolve_rows(recipe, model)
    return (
        recipe,
        model,
        prepare_now(plan_rows(row_settings(recipe), tokenizer, sources=sources), tokenizer, sources=sources),
    )


def texts_of(stream, place, *, width: int, bos: int):
    """Slices of the conversations or documents of a row."""
    shard, row = stream.shard(place), place.row
    used = int(shard.used[row])
    starts = bits(shard.starts[row], width) if shard.starts is not None else shard.input_ids[row] == bos
    at = [int(i) for i in starts.nonzero()[0] if i < used]
    return [slice(a, b) for a, b in zip(at, [*at[1:], used], strict=True)]


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_each_texts_loss_in_its_row_equals_its_loss_alone(tmp_path, cache, kind, stage):
    isolate = {"isolate_documents": True} if stage == "pretrain" else {}
    _, model, preparation = opened(recipe_for(tmp_path, cache, kind, stage, **isolate))
    rows = TrainingRows.open(preparation=preparation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = 0
    for step in range(3):
        batch = rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)
        with torch.no_grad():
            together = per_token_nll(model.eval(), batch)
            for i, place in enumerate(rows.places(step)):
                texts = texts_of(rows.stream, place, width=129, bos=preparation.plan["bos"])
                most = max(most, len(texts))
                for text in texts:
                    end = min(text.stop, 128)
                    own = {name: batch[name][i : i + 1, text.start : end] for name in ("input_ids", "shift_labels")}
                    alone = per_token_nll(model, own)
                    torch.testing.assert_close(together[i : i + 1, text.start : end], alone, rtol=1e-4, atol=2e-5)
        loss = model.train()(**batch, num_items_in_batch=torch.tensor(float(rows.num_targets(step)))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (most == 1) == (kind in LEAK)
    padded = rows.shares()["text" if stage == "pretrain" else "chat"]["lost"]["padded"]
    assert (padded > 0.3) == (kind in LEAK)


@pytest.mark.parametrize(("stage", "role"), [("sft", "validation"), ("pretrain", "documents")])
def test_validation_rows_hold_one_text_each_where_texts_see_each_other(tmp_path, cache, stage, role):
    _, _, preparation = opened(recipe_for(tmp_path, cache, "bloom", stage))
    validation = ValidationRows(preparation)
    batches = validation.batches(rows=4) if role == "validation" else validation.document_batches(rows=4)
    stream = validation._sealed(role)
    assert "position_ids" not in next(batches)
    places = stream.places(0, validation.num_rows(role))
    texts = [texts_of(stream, place, width=129, bos=preparation.plan["bos"]) for place in places]
    assert max(map(len, texts)) == 1


@pytest.mark.parametrize(
    ("kind", "attention", "found"),
    [
        ("qwen3", "eager", "isolates"),
        ("qwen3", "sdpa", "isolates"),
        ("qwen3_5", "sdpa", "leaks"),
        ("bloom", "eager", "leaks"),
    ],
)
def test_the_probe_tells_which_model_isolates_texts_and_leaves_it_unchanged(kind, attention, found):
    model = model_of(kind).train()
    model.config._attn_implementation = attention
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert try_isolation(model) == found
    assert try_isolation(model, row_tokens=8) == found
    assert model.training
    assert model.config.use_cache is True
    assert model.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_new_model_whose_blocks_write_nothing_is_tried_with_random_weights():
    for config, found in ((LlamaConfig(**GATED, vocab_size=420), "isolates"), (CONFIGS["qwen3_5"], "leaks")):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        initialize_identity_blocks(model)
        for name, parameter in model.named_parameters():
            if name.endswith("out_proj.weight"):
                torch.nn.init.zeros_(parameter)
        assert try_isolation(model) == found


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path, cache):
    recipe = read_recipe([str(recipe_for(tmp_path, cache, "bloom", "sft"))], stage=None)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for is_decoder in (False, True):
        model = AutoModelForCausalLM.from_config(BertConfig(**sizes, vocab_size=420, is_decoder=is_decoder))
        if is_decoder:
            assert resolve_rows(recipe, model).data.one_text_rows
            continue
        with pytest.raises(RecipeError, match=r"model.start_from: a BertLMHeadModel sees the tokens behind the one"):
            resolve_rows(recipe, model)


def test_new_models_that_contracts_hold_are_not_tried(monkeypatch, tmp_path, cache):
    monkeypatch.setattr("pipeline.training.isolation.try_isolation", None)
    recipe = read_recipe([str(recipe_for(tmp_path, cache, "qwen3", "sft"))], stage=None)
    new = with_values(recipe, {"model.start_from": None, "model.type": "llama"})
    llama = build_model("llama", {**GATED, "vocab_size": 300}, seed=0)
    assert resolve_rows(new, llama) == new


def test_data_command_prepares_the_rows_that_a_training_reads(tmp_path, cache, capsys):
    from pipeline.data.__main__ import main

    for kind, padded in (("bloom", True), ("qwen3", False)):
        folder = tmp_path / kind
        folder.mkdir()
        path = recipe_for(folder, cache, kind, "sft")
        capsys.readouterr()
        assert main([str(path)]) == 0
        said = capsys.readouterr().out
        assert ("so each row holds one conversation, padded" in said) == padded
        recipe = resolve_start(read_recipe([str(path)], stage=None))
        sources = open_sources(recipe.source_settings())
        tokenizer = load_or_train(recipe.tokenizer_settings(), sources[0], validation=sources[1])
        assert rows_of_recipe(recipe, tokenizer).data.one_text_rows == padded


def test_ignored_labels_stand_behind_each_text(tmp_path, cache):
    _, _, preparation = opened(recipe_for(tmp_path, cache, "bloom", "sft"))
    rows = TrainingRows.open(preparation=preparation)
    batch = rows.micro_batch(0, 0, rank=0, world_size=1, rows=8)
    for i, place in enumerate(rows.places(0)):
        used = int(rows.stream.shard(place).used[place.row])
        assert (batch["shift_labels"][i, used - 1 :] == IGNORED).all()
        assert (batch["input_ids"][i, used:] == preparation.plan["pad"]).all()


@pytest.mark.parametrize("masked", [float("-inf"), torch.finfo(torch.float32).min, float("nan")])
def test_masked_logits_hide_no_leak(masked):
    model = model_of("bloom")
    forward = model.forward

    def with_masked(*given, **named):
        output = forward(*given, **named)
        output.logits[..., :3] = masked
        return output

    model.forward = with_masked
    assert try_isolation(model) == "leaks"
