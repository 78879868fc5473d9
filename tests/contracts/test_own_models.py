"""Models that people have, of Llama's, Qwen's, SmolLM3's, Gemma's and GPT-NeoX' kind, trained on: what comes out is still one of theirs."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from pipeline.data.rows import positions
from pipeline.model.load import load_model
from pipeline.recipe import read_recipe
from pipeline.recipe.start_from import resolve_start
from pipeline.tokenizer import identity
from pipeline.tokenizer.encode import document_end
from pipeline.tokenizer.load import load_ready
from pipeline.training.build import build_from_recipe
from tests.families import FAMILIES, save_model
from tests.runner import Runner

EMBEDDING = {"gpt_neox": "gpt_neox.embed_in.weight"}
QUESTION = [{"role": "user", "content": "Is it so?"}]
ANSWER = "Yes, it is."
# Loaded as anybody would: in a process without this package, no code of the model's own.
STOCK = """
import datetime, json, sys
import transformers.utils.chat_template_utils
from transformers import AutoModelForCausalLM, AutoTokenizer
class Day:  # of the rows, for templates that write the date
    now = staticmethod(lambda: datetime.datetime(2024, 7, 26))
transformers.utils.chat_template_utils.datetime = Day
folder, messages = sys.argv[1], json.loads(sys.argv[2])
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1]:]
print(json.dumps({
    "model_type": model.config.model_type, "ids": ids.tolist(), "text": tokenizer.decode(ids, skip_special_tokens=True),
    "eos_token_id": model.generation_config.eos_token_id, "chat_template": tokenizer.chat_template,
}))
"""


def recipe_for(runner, name, stage, folder):
    chat = runner.folder / "chat.jsonl"
    line = json.dumps({"messages": [*QUESTION, {"role": "assistant", "content": ANSWER}]})
    chat.write_text(f"{line}\n" * 600)
    sources = {
        "sft": {"sources": [{"files": str(chat)}], "validation": [{"files": str(runner.chat_files[1])}]},
        "pretrain": {
            "sources": [{"files": str(runner.text_files[0])}],
            "validation": [{"files": str(runner.text_files[2])}],
        },
    }
    recipe = yaml.safe_load(runner.recipe(f"{name}-{stage}", "gpt2").read_text())
    recipe["run"]["stage"] = stage
    recipe["data"] |= {**sources[stage], "row_tokens": 128, "batch_tokens": 512}
    recipe |= {"model": {"start_from": str(folder)}, "optimizer": {"type": "trainer"}}
    recipe["train"] |= {"max_steps": 60 if stage == "sft" else 3, "save_steps": 60, "learning_rate": 1e-2}
    del recipe["tokenizer"]
    path = runner.folder / f"{name}-{stage}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fine_tuned_model_keeps_its_family_and_template_in_stock_transformers(runner, tmp_path, stock, name):
    folder = save_model(name, tmp_path / name)
    result = runner.train(recipe_for(runner, name, "sft", folder), stage="sft")
    found = json.loads(stock.run(STOCK, result.directory / "model", json.dumps(QUESTION), folder=tmp_path))
    before, after = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(result.directory / "model")
    assert found["model_type"] == FAMILIES[name].config.model_type
    # Qwen3's template has an empty <think> block before the last answer, which the model learns to write.
    assert found["text"].removeprefix("<think>\n\n</think>\n\n").strip() == ANSWER
    assert len(found["ids"]) < 40
    stops = found["eos_token_id"] if isinstance(found["eos_token_id"], list) else [found["eos_token_id"]]
    assert found["ids"][-1] in stops
    if FAMILIES[name].template is None:  # ours, and said
        assert "added: 402 -> 411 ids" in result.output
        assert "model: 9 embeddings added for new tokens (402 -> 411)" in result.output
        return
    assert found["chat_template"] == before.chat_template
    assert identity(after) == identity(before)
    ends = before.convert_tokens_to_ids(list(FAMILIES[name].ends))
    assert set(stops) == set(ends)
    old, new = (load_file(place / "model.safetensors") for place in (folder, result.directory / "model"))
    assert {key: value.shape for key, value in new.items()} == {key: value.shape for key, value in old.items()}
    assert f"keeps its chat template and its {len(before):,} ids; nothing is added" in result.output


@pytest.mark.full_except("qwen3")
@pytest.mark.parametrize("name", FAMILIES)
def test_continued_pretraining_keeps_the_tokenizer_the_vocabulary_and_document_starts(runner, tmp_path, name):
    folder = save_model(name, tmp_path / name)
    result = runner.train(recipe_for(runner, name, "pretrain", folder))
    before, after = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(result.directory / "model")
    model = load_model(result.directory / "model")
    assert model.config.model_type == FAMILIES[name].config.model_type
    old, new = (load_file(place / "model.safetensors") for place in (folder, result.directory / "model"))
    row = EMBEDDING.get(name, "model.embed_tokens.weight")
    if FAMILIES[name].template is not None:
        assert identity(after) == identity(before)
        assert new[row].shape == old[row].shape
    if not model.config.tie_word_embeddings:
        # A row that no text has gets no gradient: with train.weight_decay 0 it stays bitwise what it was.
        unseen = before.convert_tokens_to_ids(list(FAMILIES[name].specials[1:]))
        unseen = [i for i in unseen if i not in (before.bos_token_id, before.pad_token_id, document_end(before))]
        assert torch.equal(new[row][unseen], old[row][unseen])
        assert not torch.equal(new[row], old[row][: len(new[row])])


@pytest.mark.full
def test_rows_that_no_text_has_shrink_by_the_weight_decay_alone(runner, tmp_path):
    folder = save_model("qwen2", tmp_path / "qwen2")
    recipe = recipe_for(runner, "qwen2", "pretrain", folder)
    result = runner.train(recipe, "train.weight_decay=0.5", "train.lr_scheduler_type=constant")
    name = "model.embed_tokens.weight"
    old, new = (load_file(place / "model.safetensors")[name] for place in (folder, result.directory / "model"))
    unseen = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    torch.testing.assert_close(new[unseen], old[unseen] * (1 - 1e-2 * 0.5) ** 3, rtol=1e-6, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_conversations_do_not_see_each_other_in_an_own_model(tmp_path, name, attention):
    model = load_model(save_model(name, tmp_path), attn_implementation=attention).train()
    model.config.use_cache = False  # as Trainer sets it; with a cache transformers takes a row for one text
    generator = torch.Generator().manual_seed(1)
    one, two = (torch.randint(5, 300, (1, length), generator=generator) for length in (37, 50))
    starts = torch.zeros(2, 87, dtype=torch.bool)
    starts[:, [0, 37]] = True
    packed = torch.cat([one, two], dim=1).repeat(2, 1)
    logits = model(input_ids=packed, position_ids=torch.from_numpy(positions(starts.numpy()))).logits
    alone = [model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0] for ids in (one, two)]
    torch.testing.assert_close(logits[1], torch.cat(alone), rtol=0, atol=2e-6)
    together = model(input_ids=packed[:1], position_ids=torch.arange(87)[None]).logits[0]
    assert (together[37:] - alone[1]).abs().max() > 1e-3


def test_generation_also_ends_at_the_end_of_turn_of_the_template(tmp_path, cache, text_files, chat_files, capsys):
    runner = Runner(tmp_path, cache, text_files, chat_files)
    # As Qwen2.5's base models are: a chat template, and <|endoftext|> as the only end.
    folder = save_model("qwen2", tmp_path / "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    text_end, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    GenerationConfig(eos_token_id=text_end).save_pretrained(folder)
    for stage, ends in (("sft", [turn_end, text_end]), ("pretrain", text_end)):
        recipe = read_recipe([str(recipe_for(runner, "qwen2", stage, folder))], stage=stage)
        recipe = resolve_start(recipe)
        model = build_from_recipe(recipe, load_ready(recipe.tokenizer_settings()))
        assert model.generation_config.eos_token_id == ends
    assert "generation also ends at '<|im_end|>'" in capsys.readouterr().out
