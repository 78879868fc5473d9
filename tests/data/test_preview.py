"""`python -m pipeline.data FILE_OR_FOLDER_OR_ID`, on files that pandas and datasets wrote, as a terminal shows it."""

import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from pipeline.data.__main__ import main
from pipeline.data.preview import is_recipe
from pipeline.recipe import read_recipe
from pipeline.sources.open import open_sources

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    alpaca = [
        {"instruction": f"Count to {n}.", "input": "" if n % 2 else "aloud", "output": "one two " * n, "topic": 1.5}
        for n in range(1, 41)
    ]
    pd.DataFrame(alpaca).to_json("alpaca.jsonl", orient="records", lines=True)
    talks = [
        {"conversations": [{"from": "human", "value": f"Hi {n}"}, {"from": "gpt", "value": "Hello."}]}
        for n in range(40)
    ]
    talks[7]["conversations"].pop()
    datasets.Dataset.from_list(talks).to_parquet("sharegpt.parquet")
    Path("texts").mkdir()
    for name in ("a", "b"):
        pd.DataFrame({"url": ["x"] * 9, "content": [f"A text of {name}.\nIts second line."] * 9}).to_json(
            f"texts/{name}.jsonl", orient="records", lines=True
        )
    datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 9).to_json("pairs.jsonl")
    pd.DataFrame({"title": ["t"] * 9, "essay": ["a longer text"] * 9}).to_parquet("essays.parquet")
    return tmp_path


def run(*arguments, cwd):
    command = [sys.executable, "-m", "pipeline.data", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_instructions_are_shown_as_trained_with_the_lines_for_a_recipe_in_80_columns(folder):
    done = run("alpaca.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("alpaca.jsonl: Alpaca instructions (columns instruction, input, output)\n40 rows, ")
    assert "input        text     50%    context" in done.stdout
    assert "topic        number  100%    -" in done.stdout
    assert "<|bos|><|user|>Count to 2.\n\n  aloud<|end|><|assistant|>[[one two one two <|end|>]]" in done.stdout
    assert done.stdout.count("\nrow ") == 3
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_printed_lines_are_a_recipe_that_reads_the_same_rows(folder):
    out = run("texts", cwd=folder).stdout
    assert out.startswith("texts: text (column content)\n18 rows, ")
    lines = out[out.index("In a recipe:\n") + 13 : out.index("\nOr over")]
    tree = yaml.safe_load(lines)
    tree |= {"model": {"n_layer": 1, "n_embd": 32, "n_head": 2}, "train": {"max_steps": 1}}
    tree["data"] |= {"batch_tokens": 2048, "cache_dir": str(folder / "cache")}
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = read_recipe(["recipe.yaml"], stage=None)
    assert recipe.stage == "pretrain"
    train, held_out = open_sources(recipe, kind="text")
    assert sum(len(block.items) for source in train + held_out for block in source.read()) == 18
    assert "data.sources=[{files: texts}]" in out


def test_what_is_left_out_is_counted_and_a_tokenizer_counts_tokens(folder, bench):
    bench.tokenizer.save_pretrained("tokenizer")
    done = run("sharegpt.parquet", "--tokenizer", "tokenizer", "--show", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "sharegpt.parquet: ShareGPT conversations (column conversations)\n40 rows" in done.stdout
    assert "In the first 39 conversations:" in done.stdout
    assert "sharegpt.parquet row 7: no assistant" in done.stdout
    assert "longer than rows  of 512: 0.0%, 1,024: 0.0%, 2,048: 0.0%" in done.stdout
    assert done.stdout.count("\nrow ") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["pairs.jsonl"], 65, "holds preference pairs (columns chosen, rejected)"),
        (["essays.parquet"], 65, "Set text_column: essay to pretrain on it; for SFT name the columns"),
        (["nowhere.jsonl"], 66, "nowhere.jsonl: there is no such file or folder"),
        (["alpaca.jsonl", "colums={}"], 64, "colums"),
        (["alpaca.jsonl", "split"], 64, "split is no key of a source"),
        (["alpaca.jsonl", "columns={prompt:instruction}"], 64, "columns: names 'prompt:instruction', which is none of"),
        (["alpaca.jsonl", "format=alpaca"], 64, "format: is 'alpaca'. Write text, messages"),
    ],
)
def test_data_that_cannot_be_trained_on_ends_with_the_usual_sentence_and_status(arguments, status, said, folder):
    done = run(*arguments, cwd=folder)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_of_a_source_can_be_tried_beside_the_file(folder, capsys):
    assert main(["essays.parquet", "text_column=essay"]) == 0
    assert "      text_column: essay" in capsys.readouterr().out
    assert main(["pairs.jsonl", "columns={prompt: prompt, response: chosen}"]) == 0
    out = capsys.readouterr().out
    assert "<|bos|><|user|>a<|end|><|assistant|>[[b<|end|>]]" in out
    assert "data.sources=[{files: pairs.jsonl, columns: {prompt: prompt, response: chosen}}]" in out


def test_text_files_have_no_columns_and_rows_name_their_file(folder, capsys):
    Path("notes").mkdir()
    for n in range(3):
        Path(f"notes/note {n}.txt").write_text(f"The text of note {n}.")
    assert main(["notes"]) == 0
    out = capsys.readouterr().out
    assert "filled" not in out
    assert "row 0 of note 1.txt (19 characters)\n  The text of note 1." in out


def test_a_path_that_yaml_would_read_otherwise_is_quoted_for_yaml_and_the_shell(folder, capsys):
    Path("my texts: new").mkdir()
    Path("texts/a.jsonl").rename("my texts: new/it's.jsonl")
    assert main(["my texts: new/it's.jsonl"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(line) == ['data.sources=[{files: "my texts: new/it\'s.jsonl"}]']


def test_a_recipe_is_told_from_data_by_its_ending_or_its_name_among_recipes(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert is_recipe("mine.yaml")
    assert is_recipe("quickstart_pretrain")
    assert not is_recipe("recipes/identity.jsonl")
    assert not is_recipe("owner/name")
    assert not is_recipe("docs")
