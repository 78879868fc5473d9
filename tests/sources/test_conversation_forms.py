"""Tools, calls, reasoning, weights and parts of conversations, as other programs write them."""

import json
from dataclasses import replace

import datasets
import polars
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from pipeline.process.errors import DataError
from pipeline.recipe.schema import Recipe, Source, with_values
from pipeline.sources.formats import messages_of, tools_of
from pipeline.sources.open import open_sources, with_recorded_inputs

USER, ANSWER = {"role": "user", "content": "Is it cold?"}, {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "content": "-3"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": ["string", "null"]}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def call(arguments, name="weather"):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def arguments_of(message):
    return message["tool_calls"][0]["function"]["arguments"]


def recipe(folder, **source):
    made = Recipe()
    made.data.cache_dir = str(folder / "cache")
    made.data.sources = [Source(**{**source, "files": str(folder / source["files"])})]
    made.data.validation = []
    return made


def with_inputs(made: Recipe, inputs: dict) -> Recipe:
    return with_values(made, {"data": with_recorded_inputs(made.data, inputs)})


def write(folder, rows, name="a.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def talks(folder, files, **source):
    (opened,), _ = open_sources(replace(recipe(folder, files=files, **source).source_settings(), kind="chat"))
    return [item for block in opened.read() for item in block.items]


@pytest.mark.parametrize("name", ["tools", "functions"])
@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), json.dumps([WEATHER["function"]])])
def test_a_column_of_tools_is_read_as_definitions(tools, name, tmp_path):
    write(tmp_path, [{"messages": [USER, call({"city": "Oslo"}), RESULT, ANSWER], name: tools}] * 4)
    assert talks(tmp_path, "a.jsonl")[0].tools == [WEATHER]


def test_llama_factorys_form_of_tools_and_calls_is_read(tmp_path):
    turns = [
        {"from": "human", "value": "Is it cold?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "-3"},
        {"from": "gpt", "value": "Yes."},
    ]
    rows = [{"conversations": turns, "system": "Be brief.", "tools": json.dumps([WEATHER["function"]])}]
    write(tmp_path, [*rows, {"conversations": turns, "system": "", "tools": "[]"}] * 2)
    first, second, *_ = talks(tmp_path, "a.jsonl")
    assert first.tools == [WEATHER]
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert arguments_of(first.messages[2]) == {"city": "Oslo"}
    assert second.tools is None


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "Is it cold?", "completion": "Yes.", "tools": [WEATHER]}, None),
        ({"prompt": [USER], "completion": [ANSWER], "tools": json.dumps([WEATHER])}, None),
        ({"talk": [USER, ANSWER], "apis": [WEATHER]}, {"messages": "talk", "tools": "apis"}),
        ({"q": "Is it cold?", "a": "Yes.", "apis": [WEATHER]}, {"prompt": "q", "response": "a", "tools": "apis"}),
    ],
)
def test_tools_are_read_with_every_form_of_conversation(row, columns, tmp_path):
    write(tmp_path, [row] * 4)
    assert talks(tmp_path, "a.jsonl", columns=columns)[0].tools == [WEATHER]


def test_a_named_column_without_definitions_makes_a_bad_row(tmp_path):
    write(tmp_path, [{"talk": [USER, ANSWER], "apis": "a calculator"}] * 4)
    with pytest.raises(DataError, match="the column 'apis': the tools are text that is not JSON"):
        talks(tmp_path, "a.jsonl", columns={"messages": "talk", "tools": "apis"})


def test_a_column_tools_of_other_things_is_not_read(tmp_path):
    write(tmp_path, [{"messages": [USER, ANSWER], "tools": ["search", "python"]}] * 4)
    assert talks(tmp_path, "a.jsonl")[0].tools is None


def test_tools_of_anthropic_and_of_openais_responses_become_the_usual_ones():
    bare = {"name": "weather", "input_schema": CITY}
    text = {"name": "weather", "parameters": json.dumps(CITY)}
    assert tools_of([bare, {"type": "function", **WEATHER["function"]}, text]) == [WEATHER] * 3


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}),
        ({"city": "Oslo", "unit": None}, {"city": "Oslo", "unit": None}),
        ("", {}),
        (None, {}),
        ("city=Oslo", "city=Oslo"),
        ('["Oslo"]', '["Oslo"]'),
    ],
)
def test_arguments_become_a_mapping_where_they_are_one(given, read):
    assert arguments_of(messages_of([USER, call(given)])[1]) == read


def test_code_of_the_built_in_tool_stays_text():
    assert arguments_of(messages_of([USER, call('{"a": 1}', "python")])[1]) == '{"a": 1}'


def test_openais_former_function_calls_are_calls():
    old = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = messages_of([USER, old, {"role": "function", "name": "weather", "content": "-3"}, ANSWER])
    assert arguments_of(messages[1]) == {"city": "Oslo"}
    assert messages[2] == {"role": "tool", "content": "-3", "name": "weather"}


def test_turns_of_calls_join_what_the_assistant_said_before_them():
    turn = {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'}
    said = {"role": "assistant", "content": "I look."}
    messages = messages_of([USER, said, turn, turn, {"role": "tool_response", "content": "-3"}, ANSWER])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "I look."
    assert len(messages[1]["tool_calls"]) == 2


def test_calls_that_stand_in_the_text_are_calls_where_there_are_tools(tmp_path):
    turns = [USER, {"role": "assistant", "content": '<tool_call>{"name": "weather"}</tool_call>'}, RESULT, ANSWER]
    write(tmp_path, [{"messages": turns, "tools": [WEATHER]}] * 4)
    assert talks(tmp_path, "a.jsonl")[0].messages == turns


COLUMNAR = {
    "a.parquet": pq.write_table,
    "a.feather": feather.write_feather,
    "a.arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
}


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", COLUMNAR)
def test_nulls_that_a_struct_gives_to_arguments_are_dropped(name, with_tools, tmp_path):
    rows = [
        {"messages": [USER, call({"city": "Oslo", "unit": None}), RESULT, ANSWER], "tools": [WEATHER]},
        {"messages": [USER, call({"x": 1}, "add"), RESULT, ANSWER], "tools": [ADD]},
    ] * 3
    if not with_tools:
        rows = [{"messages": row["messages"]} for row in rows]
    COLUMNAR[name](pa.Table.from_pylist(rows), str(tmp_path / name))
    found = talks(tmp_path, name)
    unit = {"unit": None} if with_tools else {}  # which the tool's schema allows
    assert arguments_of(found[0].messages[1]) == {"city": "Oslo", **unit}
    assert arguments_of(found[1].messages[1]) == {"x": 1}
    assert [talk.tools for talk in found[:2]] == ([[WEATHER], [ADD]] if with_tools else [None, None])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_its_own_key(key):
    messages = messages_of([USER, {**ANSWER, key: "It snows."}, {**USER, key: "no answer"}])
    assert messages == [USER, {**ANSWER, key: "It snows."}, USER]


def test_an_answer_that_only_reasons_is_not_empty():
    assert messages_of([USER, {"role": "assistant", "content": None, "thinking": "It snows."}])[1]["thinking"]


def test_parts_of_reasoning_and_of_text_are_told_apart():
    parts = [{"type": "thinking", "thinking": "It snows."}, None, {"type": "text", "text": None}, "Yes."]
    messages = messages_of([USER, {"role": "assistant", "content": parts}])
    assert messages[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "It snows."}


@pytest.mark.parametrize(
    ("part", "said"), [("image_url", "an image"), ("input_audio", "an audio"), ("video", "a video")]
)
def test_a_part_that_is_no_text_is_named(part, said):
    message = {"role": "user", "content": [{"type": part}, {"type": "text", "text": "What is it?"}]}
    with pytest.raises(ValueError, match=f"message 0 holds {said}; only text can be trained"):
        messages_of([message, ANSWER])


def test_empty_lists_of_calls_are_absent():
    assert messages_of([USER, {**ANSWER, "tool_calls": []}]) == [USER, ANSWER]


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss_weight": 0.0}],
)
@pytest.mark.parametrize("form", ["role", "from"])
def test_an_answer_that_is_marked_as_not_trained_keeps_weight_0(form, mark):
    turns = [USER, {**ANSWER, **mark}, USER, {**ANSWER, "weight": 1, "train": True}]
    if form == "from":
        keys = {"role": "from", "content": "value"}
        turns = [{keys.get(key, key): value for key, value in turn.items()} for turn in turns]
        turns[1]["from"] = turns[3]["from"] = "gpt"
        turns[0]["from"] = turns[2]["from"] = "human"
    assert messages_of(turns) == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]


def test_a_weight_that_is_a_fraction_makes_a_bad_row():
    with pytest.raises(ValueError, match=r"message 1 has weight 0\.5; a message is trained or it is not"):
        messages_of([USER, {**ANSWER, "weight": 0.5}])


def test_an_answer_of_which_parts_are_trained_makes_a_bad_row():
    with pytest.raises(ValueError, match="message 1 marks parts of its text"):
        messages_of([USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}])


def test_parts_that_are_not_trained_make_a_bad_row():
    parts = [{"type": "text", "text": "No.", "train": False}, {"type": "text", "text": "Yes."}]
    with pytest.raises(ValueError, match="message 1 marks parts of its text"):
        messages_of([USER, {"role": "assistant", "content": parts}])


def test_a_conversation_of_weight_0_alone_is_left_out_and_counted(tmp_path, caplog):
    write(tmp_path, [{"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "weight": 0}]}] * 2)
    assert len(talks(tmp_path, "a.jsonl")) == 2
    assert "every answer has weight 0" in caplog.text


# JSON by its Arrow type, as `datasets` writes columns whose rows differ in their keys.

ROWS = [
    {"messages": [USER, call({"city": "Oslo", "unit": None}), RESULT, ANSWER], "tools": [WEATHER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}], "tools": []},
] * 3


def json_file(folder, ending):
    write(folder, ROWS, "rows.jsonl")
    made = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), cache_dir=str(folder / "hf"))["train"]
    assert "Json" in str(made.features)
    if ending == "saved":
        made.save_to_disk(folder / "saved")
        return "saved"
    table = made.with_format("arrow")[:]
    if ending == "parquet":
        made.to_parquet(folder / "a.parquet")
    elif ending == "feather":
        feather.write_feather(table, str(folder / "a.feather"))
    else:
        with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return f"a.{ending}"


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather", "saved"])
def test_columns_of_json_are_read_as_what_they_hold(ending, tmp_path):
    found = talks(tmp_path, json_file(tmp_path, ending))
    write(tmp_path, ROWS, "same.jsonl")
    assert [(talk.messages, talk.tools) for talk in found] == [
        (talk.messages, talk.tools) for talk in talks(tmp_path, "same.jsonl")
    ]
    assert arguments_of(found[0].messages[1]) == {"city": "Oslo", "unit": None}


def test_json_within_structs_and_at_the_top_is_read(tmp_path):
    json_type, messages = datasets.Json(), [USER, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]
    inner = {"messages": datasets.List({"role": datasets.Value("string"), "content": json_type})}
    datasets.Dataset.from_list([{"messages": messages}] * 4, features=datasets.Features(inner)).to_parquet(
        tmp_path / "a.parquet"
    )
    top = datasets.Features({"messages": json_type})
    datasets.Dataset.from_dict({"messages": [messages] * 4}, features=top).to_parquet(tmp_path / "b.parquet")
    for name in ("a.parquet", "b.parquet"):
        assert talks(tmp_path, name)[0].messages == [USER, ANSWER]


def test_a_text_column_of_json_is_the_text_without_quotes(tmp_path):
    features = datasets.Features({"text": datasets.Json()})
    datasets.Dataset.from_dict({"text": ["A text."] * 4}, features=features).to_parquet(tmp_path / "a.parquet")
    (opened,), _ = open_sources(recipe(tmp_path, files="a.parquet").source_settings())
    assert next(iter(opened.read())).items[0].text == "A text."


def test_json_that_is_none_makes_a_bad_row(tmp_path):
    texts = pa.array([json.dumps([USER, ANSWER])] * 3 + ["[{"])
    column = pa.ExtensionArray.from_storage(pa.json_(), texts)
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet row 3: is no JSON in the column 'messages'"):
        talks(tmp_path, "a.parquet")


def test_messages_in_arrays_of_polars_are_read(tmp_path):
    message = polars.Struct({"role": polars.String, "content": polars.String})
    made = polars.DataFrame({"messages": [[USER, ANSWER]] * 4}, schema={"messages": polars.Array(message, 2)})
    made.write_parquet(tmp_path / "a.parquet")
    made.write_ipc(tmp_path / "b.arrow")
    for name in ("a.parquet", "b.arrow"):
        assert talks(tmp_path, name)[0].messages == [USER, ANSWER]


# What older versions prepared, and runs that they began.


def reading(made):
    (opened,), _ = open_sources(replace(made.source_settings(), kind="chat"))
    return opened.format.identity()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "It snows."}]},
        {"messages": [USER, {**ANSWER, "tool_calls": []}]},
        {"messages": [USER, ANSWER], "tools": [WEATHER]},
    ],
)
def test_newly_read_rows_have_their_own_key_but_in_runs_begun(row, tmp_path):
    write(tmp_path, [row] * 4)
    made = recipe(tmp_path, files="a.jsonl")
    assert reading(made) != "messages(messages)"
    begun = {"sources": [{"name": "a", "id": None, "revision": None, "format": "messages(messages)", "files": []}]}
    assert reading(with_inputs(made, begun)) == "messages(messages)"
    begun["sources"][0]["format"] = reading(made)
    assert reading(with_inputs(made, begun)) == reading(made)


def test_plain_conversations_keep_their_key(tmp_path):
    write(tmp_path, [{"messages": [USER, ANSWER], "tools": []}] * 4)
    assert reading(recipe(tmp_path, files="a.jsonl")) == "messages(messages)"


def test_a_part_without_text_is_no_empty_text():
    asked = {"role": "user", "content": [{"type": "text", "content": "hello"}]}
    assert messages_of([asked, {"role": "assistant", "content": "hi"}])[0]["content"] == "hello"
    with pytest.raises(ValueError, match="which is no text"):
        messages_of([{"role": "user", "content": [{"type": "text", "words": "hello"}]}])


def test_a_tool_that_gives_a_list_is_its_json():
    talk = [{"role": "user", "content": "?"}, call({"city": "Oslo"})]
    talk += [{"role": "tool", "content": [{"temp": 3}, {"temp": 4}]}, {"role": "assistant", "content": "Cold."}]
    assert messages_of(talk)[2]["content"] == '[{"temp": 3}, {"temp": 4}]'


def test_a_switch_of_thinking_is_no_reasoning():
    answer = {"role": "assistant", "content": "hi", "thinking": True}
    assert "thinking" not in messages_of([{"role": "user", "content": "?"}, answer])[1]


def test_a_turn_of_calls_with_another_mark_is_refused():
    said = {"from": "gpt", "value": "I look.", "weight": 1}
    turn = {"from": "function_call", "value": '{"name": "a", "arguments": {}}', "weight": 0}
    with pytest.raises(ValueError, match="only whole messages"):
        messages_of([{"from": "human", "value": "?"}, said, turn])


def test_tools_as_text_make_another_reading(tmp_path):
    plain = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hi"}]}
    keys = []
    for name, rows in (("plain", [plain] * 3), ("tools", [plain | {"tools": json.dumps([{"name": "a"}])}] * 3)):
        write(tmp_path, rows, name=f"{name}.jsonl")
        given = recipe(tmp_path, files=str(tmp_path / f"{name}.jsonl"), messages_column="messages")
        keys.append(open_sources(replace(given.source_settings(), kind="chat"))[0][0].once.format.identity())
    assert keys[0] != keys[1]
