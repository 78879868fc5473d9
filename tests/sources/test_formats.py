"""Conversations: which can be trained on, which are named as bad rows, and the formats that they come in."""

import hashlib
import json
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.process.errors import DataError, RecipeError
from pipeline.process.user_code import CodeFolder
from pipeline.recipe.schema import FORMATS, Recipe, Source
from pipeline.sources.formats import WHOLE_ROW, format_of, messages_of, plain_messages
from pipeline.sources.open import open_sources

USER = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": "1+2"}}}]}
TOOL = {"role": "tool", "content": "3"}
SYSTEM = {"role": "system", "content": "Be brief."}

GOOD = {
    "one turn": [USER, ANSWER],
    "with a system message": [SYSTEM, USER, ANSWER],
    "several turns": [USER, ANSWER, USER, ANSWER],
    "ends with a question": [USER, ANSWER, USER],
    "uses a tool": [USER, CALL, TOOL, ANSWER],
    "uses a tool twice": [USER, CALL, TOOL, TOOL, CALL, TOOL, ANSWER],
    "parts of text": [
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]},
        ANSWER,
    ],
}
BAD = {
    "not a list": ("hello", "not a list"),
    "null": (None, "null"),
    "unknown role": ([{"role": "narrator", "content": "x"}, ANSWER], "role 'narrator'"),
    "no role": ([{"content": "x"}, ANSWER], "role None"),
    "content is a number": ([{"role": "user", "content": 3}, ANSWER], "not text"),
    "message is a number": ([1, 2], "not a mapping"),
    "call without a name": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
        "without a function name",
    ),
}
LEFT_OUT = {
    "no messages": ([], "no messages"),
    "two users in a row": ([USER, USER, ANSWER], "second user message in a row"),
    "two assistants in a row": ([USER, ANSWER, ANSWER], "second assistant message in a row"),
    "assistant first": ([ANSWER, USER], "before any user message"),
    "system later": ([USER, ANSWER, SYSTEM], "may only come first"),
    "no assistant": ([USER], "nothing to train on"),
    "empty assistant": ([USER, {"role": "assistant", "content": "  "}], "is empty"),
    "assistant without content": ([USER, {"role": "assistant", "content": None}], "is empty"),
    "tool without a call": ([USER, ANSWER, TOOL], "no tool call"),
    "user instead of an answer to the tool": ([USER, CALL, TOOL, USER], "should answer the tool"),
}


def sources(folder, *, split=True, max_bad_rows=0, **source):
    made = Recipe()
    made.path, made.code = str(folder / "recipe.yaml"), CodeFolder(str(folder))
    made.data.cache_dir = str(folder / "cache")
    made.data.sources = [Source(**source)]
    made.data.max_bad_rows = max_bad_rows
    return open_sources(replace(made.source_settings(), kind="chat"))


def conversations(pair):
    return [item.messages for part in pair for source in part for block in source.read() for item in block.items]


@pytest.mark.parametrize(
    "turns",
    [
        [{**USER, "input": None, "output": None}, {**ANSWER, "input": None, "output": "kept apart"}],
        [{"from": "human", "value": "How many?", "role": None}, {"from": "gpt", "value": "Three.", "role": None}],
        [{**USER, "from": None, "value": None}, {**ANSWER, "from": None, "value": None}],
    ],
)
def test_keys_that_a_column_gives_every_turn_do_not_change_its_form(turns):
    assert messages_of(turns) == [USER, ANSWER]


@pytest.mark.parametrize("name", GOOD)
def test_a_sound_conversation_is_taken(name):
    assert [message["role"] for message in plain_messages(GOOD[name])] == [message["role"] for message in GOOD[name]]


def test_text_parts_are_joined():
    assert plain_messages(GOOD["parts of text"])[0]["content"] == "How many?"


@pytest.mark.parametrize("name", BAD)
def test_a_conversation_that_cannot_be_trained_on_is_named_by_row(name, tmp_path):
    messages, reason = BAD[name]
    lines = [json.dumps({"messages": [USER, ANSWER]})] * 4
    lines[2] = json.dumps({"messages": messages})
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        sources(tmp_path, files="chat.jsonl")
    assert "chat.jsonl:3: " in str(caught.value)
    assert reason in str(caught.value)
    assert len(conversations(sources(tmp_path, files="chat.jsonl", max_bad_rows=1))) == 3


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_conversation_that_teaches_nothing_is_left_out_and_named(name, tmp_path, caplog):
    messages, reason = LEFT_OUT[name]
    lines = [json.dumps({"messages": [USER, ANSWER]})] * 4
    lines[2] = json.dumps({"messages": messages})
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    found = sources(tmp_path, files="chat.jsonl")
    blocks = [block for part in found for source in part for block in source.read()]
    assert sum(len(block.items) for block in blocks) == 3
    assert sum(block.empty_rows for block in blocks) == 1
    assert not any(block.bad_rows for block in blocks)
    assert "chat.jsonl:3: " in caplog.text
    assert reason in caplog.text


def test_conversations_most_of_which_cannot_be_trained_on_are_refused(tmp_path):
    lines = [json.dumps({"messages": [ANSWER, USER]})] * 3 + [json.dumps({"messages": [USER, ANSWER]})] * 2
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        sources(tmp_path, files="chat.jsonl")
    assert "most of which cannot be trained on: 3 rows: message 0 is an assistant message before any user" in str(
        caught.value
    )
    assert "(first: " in str(caught.value)


def test_one_mistake_in_many_rows_is_reported_once_with_count_and_place(tmp_path):
    good = json.dumps({"messages": [USER, ANSWER]})
    bad = [json.dumps({"messages": [USER] * n + [{"role": "assistant", "content": n}]}) for n in (1, 3, 5)]
    (tmp_path / "chat.jsonl").write_text("\n".join([good, *bad, "{", good]) + "\n")
    with pytest.raises(DataError) as caught:
        sources(tmp_path, files="chat.jsonl")
    message = str(caught.value)
    assert "  3 rows: the content of message 1 is a number, not text (first: " in message
    assert "chat.jsonl:2)" in message
    assert "chat.jsonl:5: is not JSON" in message
    assert "4 bad rows among" in message
    assert message.startswith("3 problems with the data:")


def test_parquet_messages_lose_the_keys_that_are_null(tmp_path):
    rows = [
        {"messages": [SYSTEM, USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": "3", "name": "tandem"}]},
    ] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    found = conversations(sources(tmp_path, files="chat.parquet"))
    assert [SYSTEM, USER, ANSWER] in found


def test_lines_that_are_lists_of_messages_are_conversations(tmp_path):
    (tmp_path / "chat.jsonl").write_text((json.dumps([USER, ANSWER]) + "\n") * 3)
    assert conversations(sources(tmp_path, files="chat.jsonl")) == [[USER, ANSWER]] * 3


def test_turns_from_human_and_gpt_become_messages(tmp_path):
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "How many?"},
            {"from": "gpt", "value": "Three."},
        ]
    }
    (tmp_path / "chat.jsonl").write_text((json.dumps(row) + "\n") * 2)
    assert conversations(sources(tmp_path, files="chat.jsonl", format="turns")) == [[SYSTEM, USER, ANSWER]] * 2


def test_turns_of_plain_texts_alternate(tmp_path):
    (tmp_path / "chat.jsonl").write_text((json.dumps({"dialog": ["How many?", "Three."]}) + "\n") * 2)
    assert (
        conversations(sources(tmp_path, files="chat.jsonl", format="turns", messages_column="dialog"))
        == [[USER, ANSWER]] * 2
    )


@pytest.mark.parametrize(
    ("prompt", "response"),
    [("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer")],
)
def test_prompt_and_response_columns_become_one_exchange(prompt, response, tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        (json.dumps({prompt: "How many?", response: "Three.", "input": ""}) + "\n") * 2
    )
    assert conversations(sources(tmp_path, files="chat.jsonl", format="prompt_response")) == [[USER, ANSWER]] * 2


def test_the_context_of_an_instruction_stands_below_it(tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        (json.dumps({"instruction": "Add.", "input": "1 and 2", "output": "3"}) + "\n") * 2
    )
    assert (
        conversations(sources(tmp_path, files="chat.jsonl", format="prompt_response"))[0][0]["content"]
        == "Add.\n\n1 and 2"
    )


def test_code_of_an_own_format_beside_the_recipe_is_in_the_fingerprint(tmp_path, monkeypatch):
    code = "def read(row):\n    if not row['ok']:\n        return None\n    return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
    (tmp_path / "own_format_a.py").write_text(code)
    (tmp_path / "own_format_b.py").write_text(code + "# changed\n")
    rows = [{"q": "How many?", "a": "Three.", "ok": n % 2 == 0} for n in range(6)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = sources(tmp_path, files="chat.jsonl", format="own_format_a:read")
    second = sources(tmp_path, files="chat.jsonl", format="own_format_b:read")
    assert conversations(first) == conversations(second) == [[USER, ANSWER]] * 3
    assert first[0][0].fingerprint != second[0][0].fingerprint
    assert sys.path[-1] == str(tmp_path)  # where it hides no library


def test_what_an_own_format_imports_from_its_folder_changes_its_key(tmp_path):
    code = "from own_parts_e import names\n\ndef read(row):\n    import own_late_e\n    return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
    write = {
        "own_format_e.py": code,
        "own_parts_e/__init__.py": "",
        "own_parts_e/names.py": "from . import more\n",
        "own_parts_e/more.py": "A = 1\n",
        "own_late_e.py": "import json\n",
        "own_beside_e.py": "B = 1\n",
        "json/readme.txt": "no module, though it is named like one\n",
    }
    for name, content in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    form = format_of(Source(format="own_format_e:read"), kind="chat", where="x", folder=CodeFolder(str(tmp_path)))
    found = [form.identity()]
    for name in ("own_parts_e/more.py", "own_late_e.py", "own_beside_e.py"):
        (tmp_path / name).write_text(write[name] + "# changed\n")
        found.append(form.identity())
    assert len(set(found[:3])) == 3
    assert found[3] == found[2]  # which nothing imports


def test_the_key_of_an_own_format_without_imports_is_its_files_hash(tmp_path):
    code = b"import json\n\ndef read(row):\n    return row['text']\n"
    (tmp_path / "own_format_f.py").write_bytes(code)
    (tmp_path / "own_beside_f.py").write_text("B = 1\n")
    form = format_of(Source(format="own_format_f:read"), kind="text", where="x", folder=CodeFolder(str(tmp_path)))
    assert form.identity() == f"own_format_f:read({hashlib.sha256(code).hexdigest()[:16]})"


def test_an_own_format_may_give_tools_with_its_messages(tmp_path):
    code = "def read(row):\n    return {'messages': [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': 'x'}], 'tools': row['apis']}\n"
    (tmp_path / "own_format_g.py").write_text(code)
    (tmp_path / "chat.jsonl").write_text((json.dumps({"q": "Hi", "apis": [{"name": "add"}]}) + "\n") * 2)
    train, _ = sources(tmp_path, files="chat.jsonl", format="own_format_g:read")
    (item,) = [item for block in train[0].read() for item in block.items]
    assert item.tools == [{"type": "function", "function": {"name": "add"}}]


def test_an_own_format_that_fails_names_the_row(tmp_path):
    (tmp_path / "own_format_c.py").write_text("def read(row):\n    return row['nothing']\n")
    (tmp_path / "chat.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    with pytest.raises(
        DataError, match=r"2 rows: own_format_c:read raised KeyError: 'nothing' \(first: .*chat.jsonl:1\)"
    ):
        sources(tmp_path, files="chat.jsonl", format="own_format_c:read")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mesages", "there is no format"),
        ("text", "gives documents"),
        ("no_such_module:read", "cannot be imported"),
        ("json:loads", "there is no module json in"),
        ("own_format_d:__name__", "is not the module's own"),
        ("own_format_d:KINDS", "is no function"),
    ],
)
def test_a_wrong_format_is_a_recipe_error(name, said, tmp_path):
    (tmp_path / "own_format_d.py").write_text("KINDS = 3\n")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    with pytest.raises(RecipeError, match=said):
        sources(tmp_path, files="chat.jsonl", format=name)


def test_each_format_of_a_recipe_has_a_reader():
    for name, kind in FORMATS.items():
        assert callable(format_of(Source(format=name), kind=kind, where="x", folder=None).reader()), name


def test_a_new_format_is_a_name_and_a_function_of_a_row(monkeypatch):
    def questions_answers(row):
        turns = zip(row["questions"], row["answers"], strict=True)
        return messages_of([message for q, a in turns for message in ({"role": "user", "content": q}, {"role": "assistant", "content": a})])  # fmt: skip

    monkeypatch.setitem(FORMATS, "questions_answers", "chat")
    monkeypatch.setitem(WHOLE_ROW, "questions_answers", questions_answers)
    form = format_of(Source(format="questions_answers"), kind="chat", where="x", folder=None)
    row = {"questions": ["How many?"] * 2, "answers": ["Three."] * 2}
    assert form.reader()(row) == [USER, ANSWER] * 2
    assert form.read_columns is None
    assert form.required_columns == []
    assert form.identity() == "questions_answers(None)"
