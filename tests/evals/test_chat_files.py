"""Files of the chat tasks: what is read from them, in which order, and what is said of those that are none."""

import gzip
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from chat_task_files import NAMES, arc_row, bundle_row, gsm8k_row, humaneval_row, mmlu_row, write_all, write_jsonl

from benchmarks.spelling import word_conversation
from pipeline.evals.chat_tasks import (
    BUILT_IN,
    arc_item,
    built_in_tasks,
    custom_task,
    gsm8k_item,
    load_chat_tasks,
    mmlu_item,
    number_said,
    spelling_correct,
    spelling_item,
)
from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.recipe.schema import Source
from pipeline.sources.built_in import corpus_folder
from tests.conftest import ROOT, shared_data


def load(names, *places, cache):
    return load_chat_tasks(
        built_in_tasks(names, execute=True, unsafe_exec=True, where="chat"),
        places=[str(place) for place in places],
        cache=cache,
    )


def question(item):
    (message,) = item.messages
    assert message["role"] == "user"
    return message["content"]


def test_arc_is_asked_with_its_own_labels_behind_the_choices():
    row = {
        "question": "Which is wet?",
        "choices": {"text": ["fire", "rain", "dust"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    }
    item = arc_item(row)
    assert question(item) == (
        "Multiple Choice question: Which is wet?\n- fire=1\n- rain=2\n- dust=3\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert (item.letters, item.answer) == (("1", "2", "3"), "2")


def test_arc_of_the_core_bundle_loses_the_word_question_and_gets_letters():
    item = arc_item({"query": "Question: Which is wet?", "choices": ["fire", "rain"], "gold": 1})
    assert question(item) == (
        "Multiple Choice question: Which is wet?\n- fire=A\n- rain=B\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert (item.letters, item.answer) == (("A", "B"), "B")


def test_mmlu_is_asked_like_arc_and_keeps_its_subject():
    item = mmlu_item(
        {"question": "Q\nwith a line", "choices": ["0", "4", "2", "6"], "answer": 3, "subject": "algebra"}
    )
    assert question(item) == (
        "Multiple Choice question: Q\nwith a line\n- 0=A\n- 4=B\n- 2=C\n- 6=D\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert (item.letters, item.answer, item.subject) == (("A", "B", "C", "D"), "D", "algebra")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("He has <<3+4=7>>7.\n#### 1,234", True),
        ("#### 1234 and more", True),
        ("#### 1234\n#### 5", True),
        ("#### 5\n#### 1234", False),
        ("#### 1234.0", False),
        ("#### -1234", False),
        ("####1234", False),
        ("1234", False),
        ("", False),
    ],
)
def test_gsm8k_is_judged_by_the_first_number_behind_the_marks_without_commas(text, right):
    item = gsm8k_item({"question": "How many?", "answer": "So <<1=1>>1.\n#### 1,234"})
    assert question(item) == "How many?"
    assert BUILT_IN["gsm8k"].check(item, text) is right


def test_spelling_is_judged_by_its_letters_and_counting_by_the_number():
    rows = [word_conversation(word) for word in ("strawberry", "seven", "letter", "banana", "mississippi", "queue")]
    items = [spelling_item(row) for row in rows]
    assert len({item.answer.isdecimal() for item in items}) == 2  # both kinds are among them
    for item, row in zip(items, rows, strict=True):
        assert spelling_correct(item, row["messages"][1]["content"])
        assert not spelling_correct(item, "a, b, c and so 99")
    spelled = spelling_item({"messages": [{"content": "Spell one."}, {"content": "one: o, n, e."}]})
    assert spelled.answer == "one"
    for text in ("o-n-e", "The word one: O, N, E.", "one:o,n,e"):
        assert spelling_correct(spelled, text)
    for text in ("one", "o, n, n, e", "x, o, n, e"):
        assert not spelling_correct(spelled, text)
    said = ["It occurs three times.", "#### 3", "1, 2, 3", "I count 2, no: 3", "once, twice: three"]
    assert [number_said(text) for text in said] == ["3"] * 5
    assert number_said("It occurs no times.") == "0"
    assert number_said("letters") is None


def test_words_held_out_for_spelling_never_appear_in_training(tmp_path, cache):
    (loaded,) = load(["spelling_bee"], tmp_path, cache=cache)
    rows = (corpus_folder(cache) / "spelling-train.jsonl").read_text().splitlines()
    train = {json.loads(row)["messages"][0]["content"] for row in rows}
    assert train
    assert not train & {question(item) for item in loaded.items}


def test_the_order_is_that_of_datasets_shuffle_with_seed_42(tmp_path, cache):
    from datasets import Dataset

    rows = [arc_row(n) for n in range(50)]
    write_jsonl(tmp_path / "arc_easy.jsonl", rows)
    (loaded,) = load(["arc_easy"], tmp_path, cache=cache)
    shuffled = Dataset.from_list(rows).shuffle(seed=42)
    assert [question(i) for i in loaded.items] == [question(arc_item(row)) for row in shuffled]


def test_a_folder_s_files_are_recognised_and_other_splits_left_out(tmp_path, cache):
    loaded = load(NAMES, write_all(tmp_path), cache=cache)
    assert [task.task.name for task in loaded] == NAMES
    assert [len(task.items) for task in loaded[:5]] == [12] * 5
    assert [task.files[0]["label"] for task in loaded] == [
        "ARC-Easy.jsonl",
        "arc_challenge.jsonl",
        "mmlu_test.jsonl",
        "gsm8k_test.jsonl",
        "HumanEval.jsonl.gz",
        "spelling-validation.jsonl",
    ]
    assert all(len(file["sha256"]) == 64 for task in loaded for file in task.files)


def test_a_clone_of_the_hub_repository_is_recognised_by_its_folders(tmp_path, cache):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for config in ("ARC-Easy", "ARC-Challenge"):
        for split in ("train", "test"):
            folder = tmp_path / "ai2_arc" / config
            folder.mkdir(parents=True, exist_ok=True)
            rows = [arc_row(n) for n in range(5 if split == "test" else 9)]
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    for place in (tmp_path, tmp_path / "ai2_arc" / "ARC-Easy"):
        (loaded,) = load(["arc_easy"], place, cache=cache)
        assert sorted(map(question, loaded.items)) == sorted(question(arc_item(arc_row(n))) for n in range(5))


def test_two_files_that_could_be_the_task_are_refused(tmp_path, cache):
    for name in ("mmlu_test.jsonl", "mmlu_redux.jsonl"):
        write_jsonl(tmp_path / name, [mmlu_row(1)])
    with pytest.raises(RecipeError, match=r"mmlu: mmlu_redux.jsonl, mmlu_test.jsonl in .* could all be it"):
        load(["mmlu"], tmp_path, cache=cache)


def test_a_task_without_a_file_is_named_with_what_was_looked_for(tmp_path, cache):
    write_jsonl(tmp_path / "mmlu_dev.jsonl", [mmlu_row(1)])
    with pytest.raises(InputMissingError) as caught:
        load(["mmlu", "gsm8k"], tmp_path, cache=cache)
    assert "mmlu: no file of it" in str(caught.value)
    assert "mmlu_dev.jsonl is of another split" in str(caught.value)
    assert "gsm8k: no file of it" in str(caught.value)


XML = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
WRONG_FILES = {
    "gsm8k_test.jsonl": (XML, "XML error page (AccessDenied)"),
    "HumanEval.jsonl.gz": (gzip.compress(json.dumps(humaneval_row(1)).encode() * 400)[:-20], "truncated or damaged"),
    "arc_easy.jsonl": (b'{"text": "a"}\n{"text": "b"}\n', "every row has no column 'choices'; found: text"),
    "arc_challenge.jsonl": (b"", "is empty (0 bytes)"),
    "mmlu_test.jsonl": (
        "".join(json.dumps(mmlu_row(n) | ({"answer": 4} if n == 2 else {})) + "\n" for n in range(9)).encode(),
        "mmlu_test.jsonl:3: has the answer 4, outside its 4 choices",
    ),
}


def test_every_wrong_file_is_reported_at_once_before_anything_is_scored(tmp_path, cache):
    for name, (content, _) in WRONG_FILES.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(NAMES, tmp_path, cache=cache)
    for name, (_, reason) in WRONG_FILES.items():
        assert any(name in line and reason in line for line in str(caught.value).split("\n")), (
            name,
            str(caught.value),
        )


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("arc_easy", arc_row(1) | {"answerKey": "E"}, "answerKey 'E', which is none of its choices A, B, C, D"),
        (
            "arc_easy",
            arc_row(1) | {"choices": {"text": ["a"], "label": ["A", "B"]}},
            "1 choices under the labels A, B",
        ),
        ("arc_easy", bundle_row(1) | {"gold": -1}, "the answer -1, outside its"),
        ("arc_easy", arc_row(1) | {"question": None}, "NoneType in the column 'question', not str"),
        ("mmlu", mmlu_row(1) | {"choices": ["a", None, "b", "c"]}, "choices that are not all texts"),
        ("mmlu", mmlu_row(1) | {"answer": True}, "bool in the column 'answer', not int"),
        ("mmlu", mmlu_row(1) | {"choices": ["only"], "answer": 0}, "has 1 choices"),
        ("gsm8k", gsm8k_row(1) | {"answer": "seven"}, "an answer without a number after ####"),
        ("gsm8k", gsm8k_row(1) | {"question": "half a \ud800 character"}, "surrogates not allowed"),
        ("humaneval", {k: v for k, v in humaneval_row(1).items() if k != "test"}, "no column 'test'"),
        ("gsm8k", ["a", "list"], "is list, not a mapping of columns"),
    ],
)
def test_a_bad_row_among_good_ones_is_named_by_file_and_line(tmp_path, cache, name, row, reason):
    good = {"arc_easy": arc_row, "mmlu": mmlu_row, "gsm8k": gsm8k_row, "humaneval": humaneval_row}[name]
    path = write_jsonl(tmp_path / f"{name.replace('_', '-')}.jsonl", [good(1), row, good(2)])
    with pytest.raises(DataError) as caught:
        load([name], tmp_path, cache=cache)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_conversation_that_does_not_end_in_an_answer_is_refused(tmp_path, cache):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    open_end = {"messages": [*good["messages"], {"role": "user", "content": "c"}]}
    path = write_jsonl(tmp_path / "own.jsonl", [good, open_end])
    task = custom_task("own", source=Source(files=str(path)), checker="exact")
    with pytest.raises(DataError, match=r"own\.jsonl:2: does not end with an assistant message"):
        load_chat_tasks([task], cache=cache)


def test_a_checker_that_there_is_not_is_refused_by_its_name(tmp_path):
    source = Source(files=str(tmp_path))
    (tmp_path / "own_checks.py").write_text("number = 7\n")
    for name, reason in {
        "exactly": "there is no checker 'exactly'",
        "own_checks:absent": "cannot be imported",
        "own_checks:number": "is no function",
    }.items():
        with pytest.raises(RecipeError, match=reason):
            custom_task("own", source=source, checker=name, folder=str(tmp_path))
    for name in ("gsm8k", "core", "eval_s", "core_part", "a/b"):
        with pytest.raises(RecipeError, match=f"{name} cannot be the name of your own task"):
            custom_task(name, source=source, checker="exact")


READ = """
import dataclasses, json, sys
from pathlib import Path
from pipeline.evals.chat_tasks import load_chat_tasks
from pipeline.evals.chat_tasks import BUILT_IN
(loaded,) = load_chat_tasks([BUILT_IN["arc_easy"]], cache=Path(sys.argv[1]))
print(json.dumps([loaded.revision, loaded.files, [item.messages[0]["content"] for item in loaded.items]]))
"""


def test_the_test_split_of_a_hub_configuration_is_read_with_commit(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "sources"))
    try:
        from dataset_hub import COMMIT, HubServer
    finally:
        sys.path.pop(0)
    hub = HubServer()
    rows = "".join(json.dumps(arc_row(n)) + "\n" for n in range(20))
    files = {f"ARC-Easy/{split}.jsonl": rows.encode() for split in ("train", "test")}
    hub.others["allenai/ai2_arc"] = files | {f"ARC-Challenge/{split}.jsonl": b"{}\n" for split in ("train", "test")}
    hub.card = {
        "configs": [
            {"config_name": name, "data_files": [{"split": s, "path": f"{name}/{s}.jsonl"} for s in ("train", "test")]}
            for name in ("ARC-Challenge", "ARC-Easy")
        ]
    }
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "cache")],
            env=environment | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
    assert done.returncode == 0, done.stderr
    revision, recorded, questions = json.loads(done.stdout)
    assert revision == COMMIT
    assert recorded[0]["label"] == "ARC-Easy/test.jsonl"
    assert questions == [question(arc_item(arc_row(int(n)))) for n in np.random.default_rng(42).permutation(20)]


@pytest.mark.skipif(shared_data() is None, reason="the real files are not here")
def test_the_real_files_have_as_many_rows_as_the_official_sets(cache):
    names = ["mmlu", "gsm8k", "humaneval"]
    for loaded in load(names, shared_data() / "chat_eval", cache=cache):
        assert len(loaded.items) == loaded.task.rows
