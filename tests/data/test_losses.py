"""What packing leaves out is counted, said before training, and advised on with the rows that would hold it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from pipeline.data.losses import ENOUGH_BYTES, conversation_facts, loss_warnings, new_counts, table, warning_lines
from pipeline.data.prepare import ShardBuilder
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.process.errors import DataError
from pipeline.process.progress import short_count
from pipeline.recipe.schema import Source
from pipeline.sources.formats import ROLES
from pipeline.tokenizer.chat import render
from pipeline.tokenizer.encode import byte_lengths
from tests.conftest import ROOT, docstrings, shared_data
from tests.families import FAMILIES, tokenizer_of

pytestmark = pytest.mark.full


def talk(question, answer, turns=1):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * turns


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(bench, recipe):
    """(warnings, rows) of a recipe that is prepared now."""
    sources = bench.sources(recipe)
    preparation = bench.prepared(recipe)
    rows = TrainingRows.open(preparation=preparation)
    validation = ValidationRows(preparation)
    return warning_lines(rows.plan, validation, sources=sources, tokenizer=bench.tokenizer), rows


@pytest.fixture
def uneven(tmp_path):
    """300 conversations of docstrings: many do not fit rows of 64, some lose turns."""
    texts = docstrings(modules=20)[:300]
    return write(tmp_path / "uneven.jsonl", [{"messages": talk("What?", t[:400], 1 + i % 3)} for i, t in enumerate(texts)])  # fmt: skip


def test_rows_of_the_advised_length_hold_99_percent_of_conversations_whole(bench, uneven):
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(uneven))], train={"num_train_epochs": 1})
    (warning, *_), rows = said(bench, recipe)
    facts = rows.shares()["uneven"]["conversations"]
    lengths = [
        len(render(bench.tokenizer, json.loads(line)["messages"])[0]) - 1 for line in uneven.read_text().splitlines()
    ]
    advised = facts["row_tokens_99"]
    assert np.mean(np.array(lengths) <= advised) >= 0.99
    assert np.mean(np.array(lengths) <= advised - 64) < 0.99
    assert facts["too_long"] + facts["cut"] == sum(length > 64 for length in lengths)
    assert min(facts["too_long"], facts["cut"]) > 0
    assert f"{facts['too_long']} of {len(lengths)} conversations" in warning
    assert f"{facts['cut']} ({100 * facts['cut'] / len(lengths):.2f} %) lose their last turns" in warning
    assert f"rows of {advised} would hold 99 %. Set data.row_tokens" in warning
    kept = rows.stream.datasets[0].totals()["text_tokens"]
    assert facts["tokens_lost"] == pytest.approx(1 - kept / sum(length + 1 for length in lengths))
    fits = bench.recipe(stage="sft", sources=recipe.data.sources, train=recipe.train, row_tokens=advised, batch_tokens=8 * advised)  # fmt: skip
    warnings, rows = said(bench, fits)
    assert not [line for line in warnings if "uneven" in line]
    assert rows.shares()["uneven"]["conversations"]["too_long"] <= 0.01 * len(lengths)


def test_the_counts_are_the_same_after_an_interruption_behind_any_shard(bench, uneven):
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(uneven))], train={"num_train_epochs": 1}, shard_rows=8, packing_documents=16)  # fmt: skip
    whole = TrainingRows.open(preparation=bench.prepared(recipe)).stream.datasets[0]
    again = bench.recipe(stage="sft", sources=[Source(files=str(uneven))], train={"num_train_epochs": 1}, shard_rows=8, packing_documents=16, cache="other")  # fmt: skip
    sources = bench.sources(again)
    plan = bench.plan(again, sources=sources)
    while any(not dataset.end for dataset in ShardBuilder(plan, bench.tokenizer, sources=sources).streams["train"].datasets):  # fmt: skip
        ShardBuilder(plan, bench.tokenizer, sources=sources).extend("train", 0)
    cut = ShardBuilder(plan, bench.tokenizer, sources=sources).streams["train"].datasets[0]
    assert len(cut.seals) > 5
    assert cut.totals() == whole.totals()
    assert [seal["read"] for seal in cut.seals] == [seal["read"] for seal in whole.seals]


@pytest.mark.parametrize(("bad", "said_of"), [(3, 0), (8, 1)])
def test_empty_and_unreadable_rows_above_one_percent_are_reported(bench, tmp_path, bad, said_of):
    good, alone = {"messages": talk("What?", "That.")}, {"messages": [{"role": "user", "content": "Alone?"}]}
    chat = write(tmp_path / "chat.jsonl", [good] * 100 + [{"messages": 7}] * bad + [good] * (300 - bad))
    talks = write(tmp_path / "talks.jsonl", [good] * 100 + [alone] * bad + [good] * (300 - bad))
    text = write(tmp_path / "text.jsonl", [{"text": "Some text."}] * 100 + [{"text": " "}] * bad + [{"text": "More."}] * (300 - bad))  # fmt: skip
    empty = "are empty, or have nothing to learn from and are left out"
    said_as = {chat: "are unreadable and are left out", talks: empty, text: empty}
    for stage, path, what in (("sft", chat, "bad"), ("sft", talks, "empty"), ("pretrain", text, "empty")):
        recipe = bench.recipe(stage=stage, sources=[Source(files=str(path))], train={"num_train_epochs": 1}, max_bad_rows=9)  # fmt: skip
        warnings, rows = said(bench, recipe)
        mine = [line for line in warnings if f": {path.stem}: " in line]
        assert len(mine) == said_of, mine
        assert rows.shares()[path.stem]["lost"][what] == bad / 400
        assert f"{100 * bad / 400:.2f} %" in table(rows.plan) or what == "bad"
        assert table(rows.plan).splitlines()[0].endswith("text prepared")  # of whole shards, whatever is read of them
        if mine:
            assert f"8 of 400 rows (2.00 %) {said_as[path]}" in mine[0]


@pytest.mark.parametrize("train", [{"max_steps": 5}, {"num_train_epochs": 1}])
@pytest.mark.parametrize("at_end", ["repeat", "drop"])
def test_a_run_that_fits_no_conversation_names_the_row_length_to_set(bench, tmp_path, train, at_end):
    path = write(tmp_path / "long.jsonl", [{"messages": talk("Why?", "because " * 200)}] * 20)
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(path), at_end=at_end)], train=train)
    with pytest.raises(DataError, match=r"nothing is left to train on. long: 20 rows, 20 too long for a row of 64 tokens. Set data.row_tokens to \d+"):  # fmt: skip
        TrainingRows.open(preparation=bench.prepared(recipe))


def test_a_run_whose_template_refuses_every_conversation_gives_the_reason(bench, tmp_path, monkeypatch):
    roles = (*ROLES, "critic")  # one that the tokenizer's template lacks
    monkeypatch.setattr("pipeline.sources.formats.ROLES", roles)
    path = write(
        tmp_path / "odd.jsonl", [{"messages": [*talk("Why?", "So."), {"role": "critic", "content": "No."}]}] * 20
    )
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(path))], train={"num_train_epochs": 1})
    with pytest.raises(DataError, match=r"20 rows are unreadable .*\n.*has the role critic; roles are system"):
        TrainingRows.open(preparation=bench.prepared(recipe))


def test_a_validation_that_fits_no_conversation_is_refused_before_training(bench, tmp_path):
    path = write(tmp_path / "held.jsonl", [{"messages": talk("Why?", "because " * 200)}] * 20)
    recipe = bench.recipe(stage="sft", validation=[Source(files=str(path))])
    with pytest.raises(DataError, match=r"no row to score. held: 20 rows, 20 too long"):
        said(bench, recipe)


def test_the_command_exits_with_65_and_no_stack_when_nothing_fits(bench, tmp_path):
    import yaml

    bench.tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "long.jsonl", [{"messages": talk("Why?", "because " * 200)}] * 20)
    recipe = {
        "run": {"stage": "sft"},
        "tokenizer": {"path": str(tmp_path / "tokenizer"), "vocab_size": 600},
        "data": {"sources": [{"files": str(path)}], "validation": [{"files": str(bench.chat_files[2])}], "row_tokens": 64, "batch_tokens": 512, "cache_dir": str(tmp_path / "cache")},
        "model": {"n_layer": 2, "n_embd": 32, "n_head": 2},
        "train": {"max_steps": 2},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "pipeline.data", str(tmp_path / "r.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 65
    assert "nothing is left to train on" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_the_scored_bytes_are_those_of_the_labels(bench, stage):
    rows = ValidationRows(bench.prepared(bench.recipe(stage=stage)))
    lengths = byte_lengths(bench.tokenizer)

    def of(batches):
        return sum(
            int(lengths[labels[labels >= 0]].sum()) for batch in batches for labels in [batch["labels"].numpy()]
        )

    expected = {"sft/assistant_bpb" if stage == "sft" else "val/bpb": of(rows.batches(rows=3))}
    if stage == "pretrain":
        expected["val/bpb_documents"] = of(rows.document_batches(rows=3))
    assert rows.scored_bytes(bench.tokenizer) == expected
    warning = said(bench, bench.recipe(stage=stage))[0][-1]
    name, count = max(expected.items(), key=lambda pair: pair[1])
    assert f"data.validation: {name} is over {count:,} bytes, fewer than 100,000" in warning


def test_a_large_validation_is_not_mentioned(bench, text_files):
    recipe = bench.recipe(sources=[Source(files=str(text_files[1]))])
    recipe.data.validation = [Source(files=str(text_files[0]))]
    recipe.evals.bpb.tokens, recipe.evals.bpb.document_bytes = 10_000_000, 4_000_000
    assert max(ValidationRows(bench.prepared(recipe)).scored_bytes(bench.tokenizer).values()) > ENOUGH_BYTES
    assert said(bench, recipe)[0] == []


@pytest.mark.parametrize("program", ["pandas", "datasets"])
def test_files_of_other_programs_with_published_questions_are_counted_as_they_are(bench, tmp_path, program):
    if (folder := shared_data()) is None:
        pytest.skip("no shared data")
    rows = [json.loads(line) for line in (folder / "chat" / "train" / "dolly_sample.jsonl").open(encoding="utf-8")]
    path = tmp_path / "dolly.jsonl"
    if program == "pandas":
        import pandas

        pandas.DataFrame(rows).to_json(path, orient="records", lines=True)
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_json(path)
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(path))], row_tokens=256, batch_tokens=2048, train={"num_train_epochs": 1})  # fmt: skip
    (warning, *_), opened = said(bench, recipe)
    lengths = [len(render(bench.tokenizer, row["messages"])[0]) for row in rows]
    dropped = sum(length > 257 for length in lengths)
    assert opened.shares()["dolly"]["conversations"]["too_long"] == dropped
    assert f"dolly: {dropped} of {len(rows)} conversations" in warning
    assert opened.shares()["dolly"]["conversations"]["row_tokens_99"] == 64 * int(
        np.ceil((sorted(lengths)[int(np.ceil(0.99 * len(rows))) - 1] - 1) / 64)
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_024, "1.02k"),
        (12_300, "12.3k"),
        (999_960, "1M"),
        (3_891_200, "3.89M"),
        (1.05e10, "10.5B"),
    ],
)
def test_counts_are_printed_in_the_unit_that_shows_them(count, text):
    assert short_count(count) == text


# Of what the data mark as the assistant's, what is not trained: said, or refused, before the first step.

STRIPPING = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def thinking(path, *, thought, every):
    answers = [f"<think>{thought}</think>It is {i}." if i % every == 0 else f"It is {i}." for i in range(200)]
    return Source(files=str(write(path, [{"messages": talk("What?", answer)} for answer in answers])))


@pytest.fixture
def stripping(bench):
    bench.tokenizer = tokenizer_of(FAMILIES["qwen2"], template=STRIPPING)
    return bench


def test_mostly_untrained_answers_are_refused_unless_the_run_has_begun(stripping, tmp_path):
    recipe = stripping.recipe(stage="sft", sources=[thinking(tmp_path / "all.jsonl", thought="I take it from here.", every=1)])  # fmt: skip
    with pytest.raises(DataError, match=r"data.sources: all: 6\d\.\d % of the answers' characters are not trained: the chat template takes <think>"):  # fmt: skip
        said(stripping, recipe)
    rows = TrainingRows.open(preparation=stripping.prepared(recipe))
    sources = stripping.sources(recipe)
    validation = ValidationRows(rows.preparation)
    warning_lines(rows.plan, validation, sources=sources, tokenizer=stripping.tokenizer, has_begun=True)


def test_a_few_answers_that_are_not_trained_are_said(stripping, tmp_path):
    recipe = stripping.recipe(stage="sft", sources=[thinking(tmp_path / "few.jsonl", thought="I take it.", every=20)])
    (warning, *_), _ = said(stripping, recipe)
    assert "warning: data.sources: few: " in warning
    assert "% of the answers' characters are not trained" in warning


def test_counts_of_an_earlier_version_without_lengths_give_no_advice():
    counts = {**new_counts("chat"), "conversations": 400, "too_long": 40, "no_target": 5}
    del counts["longer"]
    assert conversation_facts(counts, row_tokens=64) == {"read": 400, "too_long": 40, "cut": 0, "no_target": 5}
    lines = loss_warnings("a", counts, kind="chat", row_tokens=64)
    assert [line.partition(" are ")[0] for line in lines] == ["a: 40 of 400 conversations (10.00 %)", "a: 5 of 400 rows (1.25 %) have no answer of the assistant and"]  # fmt: skip
