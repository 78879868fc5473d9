"""A cached tokenizer is what its training left, or it is trained again; never another one without a word."""

import json
import os
import shutil

import pytest

from pipeline.recipe.schema import Recipe, Source
from pipeline.run_dir.checkpoints import SEAL, problems, seal
from pipeline.sources.open import open_sources
from pipeline.tokenizer import identity, load_or_train
from pipeline.tokenizer.train import cached_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_files):
    """(recipe, sources, folder of the cached tokenizer, its identity)"""
    recipe = Recipe()
    recipe.data.sources = [Source(files=str(file)) for file in text_files]
    recipe.data.cache_dir = str(tmp_path_factory.mktemp("cache"))
    recipe.tokenizer.vocab_size, recipe.tokenizer.train_chars = 300, 50_000
    sources = open_sources(recipe.source_settings())[0]
    first = load_or_train(recipe.tokenizer_settings(), sources)
    return recipe, sources, cached_folder(recipe.tokenizer_settings(), sources), identity(first)


@pytest.fixture
def kept(trained, tmp_path):
    """As `trained`; the cached folder is put back afterwards."""
    folder = trained[2]
    shutil.copytree(folder, tmp_path / "kept")
    yield trained
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_digit(path):
    data = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    place = digits[len(digits) // 2]
    data[place] = ord("0") + (data[place] - ord("0") + 1) % 10
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": flip_bit,
    "another digit": change_digit,
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "byte_lengths.safetensors", SEAL])
def test_a_damaged_cached_tokenizer_is_named_and_trained_again_the_same(kept, capsys, name, damage):
    recipe, sources, folder, before = kept
    damage(folder / name)
    assert identity(load_or_train(recipe.tokenizer_settings(), sources)) == before
    said = capsys.readouterr().out
    assert problems(folder) == []
    assert f"tokenizer: {folder}: {name} " in said
    assert "so it is trained again" in said


def test_a_cached_tokenizer_with_other_control_tokens_is_trained_again(kept, capsys):
    recipe, sources, folder, before = kept
    state = json.loads((folder / "tokenizer.json").read_text())
    assert state["added_tokens"].pop()["content"] == "<|pad|>"  # as before a contributor added a token
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / SEAL).unlink()
    seal(folder)
    assert identity(load_or_train(recipe.tokenizer_settings(), sources)) == before
    assert (
        f"{folder}: has other control tokens than tokenizer/encode.py, so it is trained again"
        in capsys.readouterr().out
    )
