"""Training on a recipe's sources, and the cache."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from pipeline.process import progress
from pipeline.process.errors import DataError, RecipeError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from pipeline.tokenizer import identity, load_or_train
from pipeline.tokenizer.encode import SPECIALS, byte_lengths, encode_documents
from pipeline.tokenizer.train import SPLIT_PATTERNS, _Counted, cached_folder, train_bpe, training_texts


def recipe_of(tmp_path, files, **tokenizer):
    recipe = Recipe()
    recipe.data.sources = [Source(files=str(file)) for file in files]
    recipe.data.cache_dir = str(tmp_path / "cache")
    for key, value in ({"vocab_size": 400} | tokenizer).items():
        setattr(recipe.tokenizer, key, value)
    return recipe


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def files(tmp_path):
    words = ["alpha", "beta", "gamma", "delta", "it's", "12345", "\u4e2d\u6587", "  x\n"]
    return [
        write(tmp_path / f"{name}.jsonl", [" ".join(words[n % 8 :] + words) + f" {name} {n}" for n in range(60)])
        for name in ("one", "two")
    ]


def test_a_tokenizer_is_trained_once_and_found_again(tmp_path, text_files, capsys):
    recipe = recipe_of(tmp_path, text_files)
    train, validation = open_sources(recipe.source_settings())
    first = load_or_train(recipe.tokenizer_settings(), train, validation=validation)
    assert "bytes per token" in capsys.readouterr().out
    folder = cached_folder(recipe.tokenizer_settings(), train)
    assert sorted(path.name for path in folder.iterdir()) == [
        "MANIFEST.json",
        "byte_lengths.safetensors",
        "chat_template.jinja",
        "report.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    report = json.loads((folder / "report.json").read_text())
    assert set(report["judgement"]["texts"]) == {"train", "validation", "prose", "code", "numbers", "non-English"}
    assert load_file(folder / "byte_lengths.safetensors")["byte_lengths"].tolist() == byte_lengths(first).tolist()
    assert identity(load_or_train(recipe.tokenizer_settings(), train)) == identity(first)
    assert capsys.readouterr().out == ""
    assert len(first) == 400
    recipe.tokenizer.vocab_size = 300
    assert len(load_or_train(recipe.tokenizer_settings(), train)) == 300


def test_the_same_text_gives_the_same_tokenizer_in_another_process(tmp_path, files):
    program = """
import json, sys
from pipeline.tokenizer import identity
from pipeline.tokenizer.train import train_bpe
texts = [json.loads(line)["text"] for name in sys.argv[1:] for line in open(name)]
print(identity(train_bpe(texts, vocab_size=400, split_pattern="nanochat")))
"""
    command = [sys.executable, "-c", program, *map(str, files)]
    found = {
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
        for _ in range(2)
    }
    texts = [json.loads(line)["text"] for file in files for line in file.open()]
    assert found == {identity(train_bpe(texts, vocab_size=400, split_pattern="nanochat")) + "\n"}


def test_the_saved_folder_gives_the_same_ids_beside_any_model_config(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    text = "It's 12345 \u4e2d\u6587 <|user|> x"
    for model_type in ("gpt2", "nanochat", "llama"):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "bos_token_id": 1, "eos_token_id": 2})
        )
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert identity(again) == identity(tokenizer)
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again(text).input_ids[0] == again.bos_token_id


def test_ids_are_bytes_then_merges_then_specials(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(700))
    assert byte_lengths(tokenizer)[:256].tolist() == [1] * 256
    assert tuple(tokenizer.convert_ids_to_tokens(range(690, 700))) == SPECIALS
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|end|>", "<|pad|>")


def test_a_text_full_of_control_strings_grows_no_id_of_that_name():
    tokenizer = train_bpe(["<|bos|> <|user|>"] * 100, vocab_size=400, split_pattern=r"\S+|\s+")
    ids = encode_documents(tokenizer, ["<|bos|> <|user|>"])[0].tolist()
    assert tokenizer.decode(ids) == "<|bos|> <|user|>"
    assert max(ids) < tokenizer.convert_tokens_to_ids("<|bos|>") == len(tokenizer) - len(SPECIALS)


def test_the_split_patterns_cut_numbers_and_words_as_they_say():
    text = "don't 12345 WE'LL"
    cut = {name: train_bpe([text] * 50, vocab_size=330, split_pattern=name) for name in SPLIT_PATTERNS}
    tokens = {name: [t.decode([i]) for i in encode_documents(t, [text])[0]] for name, t in cut.items()}
    assert tokens["nanochat"] == ["don", "'t", " ", "12", "34", "5", " WE", "'LL"]
    assert tokens["gpt2"] == ["don", "'t", " 12345", " WE", "'", "LL"]


def test_a_split_pattern_that_is_no_expression_is_a_recipe_error():
    with pytest.raises(RecipeError, match=r"tokenizer\.split_pattern"):
        train_bpe(["x"], vocab_size=300, split_pattern="(")


def test_characters_are_capped_per_document_and_in_total_and_shared_by_weight(tmp_path):
    recipe = recipe_of(
        tmp_path, [write(tmp_path / "a.jsonl", ["a" * 100] * 8000), write(tmp_path / "b.jsonl", ["b" * 100] * 8000)]
    )
    recipe.data.sources[1].weight = 3.0
    train, _ = open_sources(recipe.source_settings())
    texts = list(training_texts(train, total_chars=100_000, document_chars=10))
    assert {len(text) for text in texts} == {10}
    text = "".join(texts)
    assert len(text) == 100_000
    assert abs(text.count("b") - 75_000) <= 1024 * 10  # Shares are kept to a block.


def test_conversations_are_read_for_their_words_when_there_is_nothing_else(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [
        {"role": "user", "content": "What is zyzzyva?"},
        {"role": "assistant", "content": "zyzzyva is a weevil"},
    ]
    path.write_text((json.dumps({"messages": messages}) + "\n") * 40)
    recipe = recipe_of(tmp_path, [path], vocab_size=300)
    train, _ = open_sources(replace(recipe.source_settings(), kind="chat"))
    tokenizer = load_or_train(recipe.tokenizer_settings(), train)
    assert len(encode_documents(tokenizer, [" zyzzyva"])[0]) == 1


def test_a_text_with_few_pieces_gives_fewer_ids_and_says_so(tmp_path, capsys):
    recipe = recipe_of(tmp_path, [write(tmp_path / "a.jsonl", ["abc"] * 40)], vocab_size=4000)
    train, _ = open_sources(recipe.source_settings())
    assert len(load_or_train(recipe.tokenizer_settings(), train)) == 268
    assert "only 268 different pieces" in capsys.readouterr().out


def test_sources_without_text_are_refused_and_nothing_is_cached(tmp_path):
    recipe = recipe_of(tmp_path, [])
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        load_or_train(recipe.tokenizer_settings(), [])
    assert not cached_folder(recipe.tokenizer_settings(), []).exists()


def test_reading_text_shows_no_share_of_a_size_that_nobody_knows(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert len(list(_Counted(iter(["a" * 1000] * 50)))) == 50
    shown = capsys.readouterr().err
    assert "characters" in shown
    assert "left" not in shown
    assert "%" not in shown
