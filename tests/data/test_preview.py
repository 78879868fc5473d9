"""`python -m pipeline.data FILE_OR_FOLDER_OR_ID`, on files that pandas and datasets wrote, as a terminal shows it."""

import copy
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from pipeline.data import estimate
from pipeline.data.__main__ import main
from pipeline.data.estimate import about_tokens
from pipeline.data.preview import is_recipe
from pipeline.data.rows import TrainingRows
from pipeline.process.errors import DataError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import Recipe
from pipeline.sources.open import open_sources
from tests.families import FAMILIES, tokenizer_of

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


def test_instructions_are_shown_as_trained_within_80_columns(folder):
    done = run("alpaca.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("alpaca.jsonl: Alpaca instructions (columns instruction, input, output)\n40 rows, ")
    assert re.search(r"input +text +context", done.stdout)
    assert re.search(r"topic +number +-", done.stdout)
    assert "<|bos|><|user|>Count to 2.\n\n  aloud<|end|><|assistant|>[[one two one two <|end|>]]" in done.stdout
    assert done.stdout.count("\nrow ") == 3
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_tools_are_shown_as_the_template_of_the_named_tokenizer_writes_them(folder, capsys):
    tokenizer_of(FAMILIES["qwen2"]).save_pretrained("own")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}], "tools": tools}
    Path("tools.jsonl").write_text(json.dumps(row) + "\n")
    main(["tools.jsonl", "--tokenizer", "own"])
    out = capsys.readouterr().out
    assert "row 0 of tools.jsonl (2 messages, tools: 1)" in out
    assert '"name": "add"' in "".join(out.splitlines())


def test_the_printed_lines_are_a_recipe_that_reads_the_same_rows(folder):
    out = run("texts", cwd=folder).stdout
    assert out.startswith("texts: text (column content)\n18 rows, ")
    lines = out[out.index("A recipe:\n") + 10 : out.index("\nOr on")]
    Path("recipe.yaml").write_text(textwrap.dedent(lines))
    recipe = read_recipe(["recipe.yaml", f"data.cache_dir={folder / 'cache'}"], stage=None)
    assert recipe.stage == "pretrain"
    train, held_out = open_sources(recipe.source_settings())
    assert sum(len(block.items) for source in train + held_out for block in source.read()) == 18
    command = shlex.split(out[out.index("  bash ") :].replace("\\\n", ""))
    assert Path(command[1]).resolve() == ROOT / "run_pretrain.sh"
    assert command[2:] == ["own_text", "data.sources=[{files: texts}]"]
    assert read_recipe(command[2:], stage=None).data.sources[0].files.endswith("texts")


def test_a_column_of_tools_is_shown_as_read(folder, capsys):
    tool = {"type": "function", "function": {"name": "add"}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    Path("tools.jsonl").write_text((json.dumps({"messages": talk, "tools": [tool]}) + "\n") * 4)
    assert main(["tools.jsonl"]) in (None, 0)
    out = capsys.readouterr().out
    assert out.startswith("tools.jsonl: chat messages (columns messages, tools)\n")
    assert re.search(r"tools +tools +tools", out)


def test_what_is_left_out_is_counted_and_a_tokenizer_counts_tokens(folder, bench):
    bench.tokenizer.save_pretrained("tokenizer")
    done = run("sharegpt.parquet", "--tokenizer", "tokenizer", "--show", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "sharegpt.parquet: ShareGPT conversations (column conversations)\n40 rows" in done.stdout
    assert "39 conversations of " in done.stdout
    assert "sharegpt.parquet row 7: no assistant" in done.stdout
    assert done.stdout.count("\nrow ") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["pairs.jsonl"], 65, "holds preference pairs (columns chosen, rejected)"),
        (["essays.parquet"], 65, "Set text_column: essay to pretrain on it; for SFT name the columns"),
        (["nowhere.jsonl"], 66, "nowhere.jsonl: there is no such file or folder"),
        (["data/train.parquet"], 66, "data/train.parquet: there is no such file or folder"),
        (["alpaca.jsonl", "colums={}"], 64, "colums"),
        (["alpaca.jsonl", "split"], 64, "split is no key of a source"),
        (
            ["alpaca.jsonl", "columns={prompt:instruction}"],
            64,
            "columns.prompt:instruction: is null; it must be text",
        ),
        (["alpaca.jsonl", "format=alpaca"], 64, "format: is 'alpaca'. Write text, messages"),
    ],
)
def test_data_that_cannot_be_trained_on_ends_with_sentence_and_status(arguments, status, said, folder):
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
    assert "text        " not in out
    assert "row 0 of note 1.txt (19 characters)\n  The text of note 1." in out


def test_a_path_yaml_would_misread_is_quoted_for_yaml_and_shell(folder, capsys):
    Path("my texts: new").mkdir()
    Path("texts/a.jsonl").rename("my texts: new/it's.jsonl")
    assert main(["my texts: new/it's.jsonl"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    (setting,) = shlex.split(line)
    assert yaml.safe_load(setting.partition("=")[2]) == [{"files": "my texts: new/it's.jsonl"}]


def test_conversations_left_out_are_named_by_line_wherever_the_file_is(folder, capsys):
    Path("talks").mkdir()
    with open("talks/a.jsonl", "w") as file:
        for n in range(20):
            messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
            print(json.dumps({"messages": messages[: 1 if n == 3 else 2]}), file=file)
    assert main(["talks/a.jsonl"]) == 0
    assert "a.jsonl:4: no assistant message" in " ".join(capsys.readouterr().out.split())


def test_conversations_that_the_template_refuses_are_named_and_the_rest_is_counted(folder, bench, capsys):
    tokenizer = copy.deepcopy(bench.tokenizer)  # that of the bench is every test's
    tokenizer.chat_template = (
        "{% if messages|length > 2 %}{{ raise_exception('one question alone') }}{% endif %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained("strict")
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    datasets.Dataset.from_list([{"messages": turn * (2 if n == 0 else 1)} for n in range(20)]).to_json("talks.jsonl")
    assert main(["talks.jsonl", "--tokenizer", "strict"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "row 0 of talks.jsonl (4 messages, tools: 0) left out: the chat template refuses the conversation: one question alone"
        in out
    )
    assert "1 bad rows for this tokenizer" in out


def test_untrained_shares_of_answers_are_shown_and_refused_when_too_large(folder, bench, capsys):
    bench.tokenizer.save_pretrained("tokenizer")
    assert main(["sharegpt.parquet", "--tokenizer", "tokenizer"]) == 0
    assert "not trained" not in capsys.readouterr().out
    template = bench.tokenizer.chat_template.replace("{{- text -}}", "{{- text | replace('Hello', '') -}}")
    Path("tokenizer/chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=r"sharegpt: 83\.3 % of the answers' characters are not trained: the chat template leaves out text"):  # fmt: skip
        main(["sharegpt.parquet", "--tokenizer", "tokenizer"])
    assert "39 conversations of " in capsys.readouterr().out


def test_a_recipe_is_told_from_data_by_its_ending_or_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert is_recipe("quickstart_pretrain")  # shipped
    monkeypatch.chdir(ROOT)
    assert is_recipe("mine.yaml")
    assert is_recipe("quickstart_pretrain")
    assert not is_recipe("recipes/identity.jsonl")
    assert not is_recipe("owner/name")
    assert not is_recipe("docs")


def tokens_of(recipe: Recipe) -> tuple[float | None, int | None]:
    epochs, start = recipe.train["num_train_epochs"], recipe.model.start_from
    return about_tokens(recipe.source_settings(), recipe.tokenizer_settings(), start_from=start, epochs=epochs)


@pytest.mark.parametrize("counted_bytes", [1_000_000, 20_000])
@pytest.mark.parametrize(("stage", "is_trained"), [("pretrain", True), ("pretrain", False), ("sft", True)])
def test_the_steps_of_epochs_are_estimated_within_ten_percent_before_packing(
    bench, stage, is_trained, counted_bytes, monkeypatch
):
    monkeypatch.setattr(estimate, "COUNTED_BYTES", counted_bytes)
    recipe = bench.recipe(stage=stage, train={"num_train_epochs": 20, "seed": 7})
    recipe.tokenizer.vocab_size = 600
    if is_trained:
        recipe.tokenizer.path = str(bench.folder / "tokenizer")
        bench.tokenizer.save_pretrained(recipe.tokenizer.path)
    tokens, held_out = tokens_of(recipe)
    steps = recipe.step_rows.steps(int(tokens / recipe.data.row_tokens))
    assert steps == pytest.approx(TrainingRows.open(preparation=bench.prepared(recipe)).total_steps(), rel=0.1)
    assert held_out == pytest.approx(Path(recipe.data.validation[0].files).stat().st_size, rel=0.05)


def test_steps_are_not_estimated_where_a_source_has_a_weight(bench):
    recipe = bench.recipe(train={"num_train_epochs": 2})
    recipe.data.sources[0].weight = 1.0
    assert tokens_of(recipe)[0] is None


def test_tokens_are_not_counted_where_the_model_and_its_tokenizer_lie_elsewhere(bench):
    recipe = bench.recipe(stage="sft", train={"num_train_epochs": 2})
    recipe.model.start_from = "owner/name"
    for recipe.tokenizer.vocab_size in (None, 600):
        assert tokens_of(recipe)[0] is None
