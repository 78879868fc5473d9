"""Rows as people publish them, written by pandas, datasets and json: each is read by looking, or refused by its name."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import datasets
import pandas as pd
import pytest
from dataset_hub import REPO, HubServer
from test_hub_files import environment_for

from pipeline.process.errors import DataError, RecipeError
from pipeline.recipe.identity import resume_keys
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.formats import format_of
from pipeline.sources.open import open_sources

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Three."}]


def opened(folder, *, kind, **source):
    made = Recipe()
    made.path = str(folder / "recipe.yaml")
    made.data.cache_dir = str(folder / "cache")
    made.data.sources = [Source(**source)]
    return open_sources(replace(made.source_settings(), kind=kind))


def items(pair):
    blocks = [block for part in pair for source in part for block in source.read()]
    return [item.messages if hasattr(item, "messages") else item.text for block in blocks for item in block.items]


# name: (a row with the true columns of the data set, what it becomes, what is printed)
CONVERSATIONS = {
    "UltraChat 200k": (
        {"prompt": "How many?", "prompt_id": "f0e3", "messages": [USER, ANSWER]},
        [USER, ANSWER],
        "",
    ),
    "smol-smoltalk": ({"messages": [SYSTEM, USER, ANSWER], "source": "smol-magpie"}, [SYSTEM, USER, ANSWER], ""),
    "OpenHermes 2.5": (
        {
            "custom_instruction": None,
            "topic": None,
            "model": None,
            "category": "orca",
            "conversations": [{**turn, "weight": None} for turn in TURNS],
            "system_prompt": None,
            "source": "airoboros2.2",
            "title": None,
        },
        [USER, ANSWER],
        "ShareGPT conversations (column conversations)",
    ),
    "ShareGPT with a system column": (
        {"system": "Be brief.", "conversations": TURNS},
        [SYSTEM, USER, ANSWER],
        "ShareGPT conversations (columns system, conversations)",
    ),
    "ShareGPT whose own system turn goes first": (
        {"system_prompt": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
        [SYSTEM, USER, ANSWER],
        "ShareGPT conversations (columns system_prompt, conversations)",
    ),
    "role and content in conversations": (
        {"conversations": [USER, ANSWER]},
        [USER, ANSWER],
        "chat messages (column conversations)",
    ),
    "LMSYS and WildChat": (
        {
            "conversation_id": "1",
            "model": "m",
            "conversation": [USER, ANSWER],
            "turn": 1,
            "moderation": [{"flag": True}],
        },
        [USER, ANSWER],
        "chat messages (column conversation)",
    ),
    "messages under a name of one's own": (
        {"id": 1, "talk": [USER, ANSWER]},
        [USER, ANSWER],
        "chat messages (column talk)",
    ),
    "Capybara": (
        {"source": "x", "conversation": [{"input": "How many?", "output": "Three."}]},
        [USER, ANSWER],
        "conversations of input and output (column conversation)",
    ),
    "texts in turns": (
        {"dialog": ["How many?", "Three."], "act": [1, 2]},
        [USER, ANSWER],
        "conversations of texts in turns (column dialog)",
    ),
    "Alpaca": (
        {"instruction": "Count.", "input": "a b c", "output": "Three.", "text": "Below is an instruction"},
        [{"role": "user", "content": "Count.\n\na b c"}, ANSWER],
        "Alpaca instructions (columns instruction, input, output)",
    ),
    "Alpaca of LLaMA-Factory": (
        {
            "instruction": "How many?",
            "input": "",
            "output": "Three.",
            "system": "Be brief.",
            "history": [["How many?", "Three."]],
        },
        [SYSTEM, USER, ANSWER, USER, ANSWER],
        "Alpaca instructions (columns instruction, input, output, system, history)",
    ),
    "Dolly": (
        {"instruction": "How many?", "context": "", "response": "Three.", "category": "open_qa"},
        [USER, ANSWER],
        "Dolly instructions (columns instruction, context, response)",
    ),
    "prompt and completion": (
        {"prompt": "How many?", "completion": "Three."},
        [USER, ANSWER],
        "prompts and responses (columns prompt, completion)",
    ),
    "TRL's conversational prompt and completion": (
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        [SYSTEM, USER, ANSWER],
        "prompts and responses as messages (columns prompt, completion)",
    ),
    "GSM8K": (
        {"question": "How many?", "answer": "Three."},
        [USER, ANSWER],
        "prompts and responses (columns question, answer)",
    ),
    "MetaMathQA": (
        {"type": "GSM_Rephrased", "query": "How many?", "original_question": "x", "response": "Three."},
        [USER, ANSWER],
        "prompts and responses (columns query, response)",
    ),
    "OpenOrca": (
        {"id": "niv.1", "system_prompt": "Be brief.", "question": "How many?", "response": "Three."},
        [SYSTEM, USER, ANSWER],
        "prompts and responses (columns system_prompt, question, response)",
    ),
    "columns in another case": (
        {"Question": "How many?", "Complex_CoT": "Well.", "Response": "Three."},
        [USER, ANSWER],
        "prompts and responses (columns Question, Response)",
    ),
}
WRITERS = {
    "pandas.jsonl": lambda rows, path: pd.DataFrame(rows).to_json(path, orient="records", lines=True),
    "datasets.jsonl": lambda rows, path: datasets.Dataset.from_list(rows).to_json(path),
    "datasets.parquet": lambda rows, path: datasets.Dataset.from_list(rows).to_parquet(path),
    "pandas.parquet": lambda rows, path: pd.DataFrame(rows).to_parquet(path),
    "json.jsonl": lambda rows, path: Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_train_as_they_are_published(name, writer, tmp_path):
    row, messages, announced = CONVERSATIONS[name]
    WRITERS[writer]([row] * 4, str(tmp_path / writer))
    found = opened(tmp_path, kind="chat", files=writer)
    assert items(found) == [messages] * 4
    assert found[0][0].recognised == found[1][0].recognised == announced
    assert announced in found[0][0].headline()


@pytest.mark.parametrize("column", ["content", "document", "body", "story", "Text"])
def test_text_under_a_usual_name_trains_without_a_key(column, tmp_path):
    pd.DataFrame({"id": range(4), column: ["a text"] * 4}).to_parquet(tmp_path / "a.parquet")
    found = opened(tmp_path, kind="text", files="a.parquet")
    assert items(found) == ["a text"] * 4
    assert found[0][0].recognised == f"text (column {column})"


REFUSED = {
    "preference pairs of texts": (
        "chat",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        ["holds preference pairs (columns chosen, rejected)", "columns: {prompt: prompt, response: chosen}", "DPO"],
    ),
    "preference pairs of messages": (
        "chat",
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "score_chosen": 3.0},
        ["holds preference pairs", "columns: {messages: chosen}"],
    ),
    "preference pairs of messages behind a prompt of messages": (
        "chat",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        ["holds preference pairs", "columns: {prompt: prompt, response: chosen}"],
    ),
    "preference pairs of whole conversations beside their prompt": (
        "chat",
        {"prompt": "How many?", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        ["holds preference pairs", "columns: {messages: chosen}"],
    ),
    "ShareGPT preferences, whose conversations have no answer": (
        "chat",
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]},
        ["holds preference pairs"],
    ),
    "answers judged good or bad": ("chat", {"prompt": "a", "completion": "b", "label": True}, ["as KTO takes them"]),
    "two columns that could be the answer": (
        "chat",
        {"problem": "a", "solution": "b", "answer": "c"},
        ["solution and answer, which could each be the response", "columns: {prompt: problem, response: solution}"],
    ),
    "plain text": ("chat", {"text": "a"}, ["no column 'messages'; found: text. It holds plain text", "pretrain"]),
    "columns of no known name": (
        "chat",
        {"ask": "a", "reply": "b"},
        ["no column 'messages'; found: ask, reply", "columns: {prompt: COLUMN, response: COLUMN}"],
    ),
    "conversations for pretraining": (
        "text",
        {"conversations": TURNS},
        ["holds ShareGPT conversations (column conversations), and pretraining reads plain text", "run_sft.sh"],
    ),
    "preferences for pretraining": (
        "text",
        {"chosen": "a", "rejected": "b"},
        ["holds preference pairs (columns chosen, rejected), and pretraining"],
    ),
    "text under a name of its own": (
        "text",
        {"title": "a", "essay": "a long text"},
        ["no column 'text'; found: title, essay. Set text_column: essay."],
    ),
    "two columns that could be the text": (
        "text",
        {"content": "a", "body": "b"},
        ["content and body could each be the text. Set text_column: content."],
    ),
    "no text at all": ("text", {"a": 1, "b": 2}, ["no column 'text'; found: a, b, and none of them holds text"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrainable_rows_are_named_once_with_what_to_use_instead(name, tmp_path):
    kind, row, said = REFUSED[name]
    for file in ("a.jsonl", "b.jsonl"):
        (tmp_path / file).write_text((json.dumps(row) + "\n") * 70)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, kind=kind, files="*.jsonl")
    for text in said:
        assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "chosen": "Three.", "rejected": "Four."},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]},
    ],
    ids=["texts", "messages"],
)
def test_the_cure_for_preference_pairs_trains_on_the_chosen_answers(row, tmp_path):
    WRITERS["datasets.parquet"]([row] * 4, str(tmp_path / "a.parquet"))
    found = opened(tmp_path, kind="chat", files="a.parquet", columns={"prompt": "prompt", "response": "chosen"})
    assert items(found) == [[USER, ANSWER]] * 4


@pytest.mark.parametrize(
    ("columns", "row", "item"),
    [
        ({"prompt": "Q", "response": "A"}, {"Q": "How many?", "A": "Three."}, [USER, ANSWER]),
        (
            {"prompt": "Q", "context": "C", "response": "A", "system": "S"},
            {"Q": "How", "C": "many?", "A": "Three.", "S": "Be brief."},
            [SYSTEM, {"role": "user", "content": "How\n\nmany?"}, ANSWER],
        ),
        ({"messages": "chat", "system": "persona"}, {"chat": TURNS, "persona": "Be brief."}, [SYSTEM, USER, ANSWER]),
        ({"text": "essay"}, {"essay": "a text", "text": "another"}, "a text"),
    ],
)
def test_columns_name_what_a_row_holds(columns, row, item, tmp_path):
    WRITERS["pandas.parquet"]([row] * 4, str(tmp_path / "a.parquet"))
    kind = "text" if "text" in columns else "chat"
    assert items(opened(tmp_path, kind=kind, files="a.parquet", columns=columns)) == [item] * 4


def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path):
    WRITERS["pandas.parquet"]([{"Question": "a", "Answer": "b"}] * 4, str(tmp_path / "a.parquet"))
    with pytest.raises(
        DataError, match=r"no column 'Quesion'; found: Question, Answer. Correct columns: did you mean Q"
    ):
        opened(tmp_path, kind="chat", files="a.parquet", columns={"prompt": "Quesion", "response": "Answer"})


def test_columns_of_the_other_kind_are_a_recipe_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "b"}\n' * 4)
    with pytest.raises(RecipeError, match=r"columns: \{text\} gives documents"):
        opened(tmp_path, kind="chat", files="a.jsonl", columns={"text": "a"})


def test_a_file_of_another_form_among_a_sources_files_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"conversations": TURNS}) + "\n") * 4)
    (tmp_path / "b.jsonl").write_text((json.dumps({"prompt": "a", "completion": "b"}) + "\n") * 4)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, kind="chat", files=["a.jsonl", "b.jsonl"])
    assert "The files of a source are read alike" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_calls_and_outputs_of_tools_in_sharegpt_are_kept(tmp_path):
    turns = [
        {"from": "human", "value": "How many?"},
        {"from": "function_call", "value": '{"name": "count", "arguments": {"of": "a b c"}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "Three."},
    ]
    (tmp_path / "a.jsonl").write_text((json.dumps({"conversations": turns}) + "\n") * 4)
    messages = items(opened(tmp_path, kind="chat", files="a.jsonl"))[0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "count", "arguments": {"of": "a b c"}}


def test_an_optional_column_that_only_later_rows_have_is_read(tmp_path):
    rows = [{"conversations": TURNS}] * 200 + [{"system": "Be brief.", "conversations": TURNS}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert items(opened(tmp_path, kind="chat", files="a.jsonl")).count([SYSTEM, USER, ANSWER]) == 3


def test_real_sets_with_a_few_untrainable_rows_train_and_count_them(tmp_path):
    rows = [{"conversations": TURNS}] * 20 + [
        {"conversations": [{"from": "gpt", "value": "Hello."}, *TURNS]},
        {"conversations": [TURNS[0], TURNS[0], TURNS[1]]},
        {"conversations": [TURNS[0], {"from": "gpt", "value": None}]},
        {"conversations": TURNS[:1]},
    ]
    WRITERS["datasets.parquet"](rows, str(tmp_path / "a.parquet"))
    found = opened(tmp_path, kind="chat", files="a.parquet")
    blocks = [block for part in found for source in part for block in source.read()]
    assert sum(len(block.items) for block in blocks) == 20
    assert sum(block.empty_rows for block in blocks) == 4
    assert not any(block.bad_rows for block in blocks)


@pytest.mark.parametrize(
    ("source", "kind", "identity"),
    [
        ({}, "text", "text(text)"),
        ({"text_column": "body"}, "text", "text(body)"),
        ({"columns": {"text": "body"}}, "text", "text(body)"),
        ({}, "chat", "messages(messages)"),
        ({"messages_column": "m"}, "chat", "messages(m)"),
        ({"format": "turns"}, "chat", "turns(conversations)"),
        ({"format": "prompt_response"}, "chat", "prompt_response(None)"),
    ],
)
def test_older_sources_keep_the_identity_that_finds_their_prepared_shards(source, kind, identity):
    assert format_of(Source(**source), kind=kind, where="x", folder=None).identity() == identity


def test_files_that_were_read_before_keep_being_read_by_the_same_column(tmp_path):
    pd.DataFrame({"content": ["x"] * 4, "text": ["y"] * 4}).to_parquet(tmp_path / "a.parquet")
    assert opened(tmp_path, kind="text", files="a.parquet")[0][0].format.identity() == "text(text)"
    WRITERS["json.jsonl"](
        [{"conversations": TURNS, "messages": [USER, ANSWER], "system": "x"}] * 4, tmp_path / "b.jsonl"
    )
    found = opened(tmp_path, kind="chat", files="b.jsonl")
    assert found[0][0].format.identity() == "messages(messages)"
    assert items(found) == [[USER, ANSWER]] * 4


HUB = """
import json, sys
import pipeline.sources.hub_files as hub_files
hub_files.FIRST_WAIT_S = 0.02
from pipeline.recipe.identity import resume_keys
from pipeline.recipe.schema import Recipe, Source
import pipeline.sources.holdout as holdout
from pipeline.sources.open import open_sources
holdout.COUNTED_BYTES = 0  # as if the files were large
recipe = Recipe(stage="sft")
recipe.data.cache_dir = sys.argv[1]
recipe.data.sources = [Source(id=sys.argv[2])]
train, validation = open_sources(recipe.source_settings())
reads = sys.argv[3] == "read"
messages = [i.messages for s in train + validation for b in s.read() for i in b.items] if reads else []
print(json.dumps({"recognised": train[0].recognised, "first": train[0].files[0].label, "messages": messages}))
"""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_hub_conversations_are_recognised_by_the_file_that_is_read_first(ending, tmp_path):
    server = HubServer()
    for number in range(3):
        rows = [{"id": f"{number} {row}", "conversations": TURNS} for row in range(4)]
        WRITERS[f"datasets.{ending}"](rows, str(tmp_path / "made"))
        server.files[f"data/train-0000{number}-of-00003.{ending}"] = (tmp_path / "made").read_bytes()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def run(what):
        command = [sys.executable, "-c", HUB, str(tmp_path / "cache"), REPO, what]
        environment = environment_for(server, tmp_path)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    opened = run("open")
    assert opened["recognised"] == "ShareGPT conversations (column conversations)"
    assert server.asked == [opened["first"]]
    assert run("read")["messages"] == [[USER, ANSWER]] * 12
    assert sorted(server.asked) == sorted(server.files)  # each once
    server.shutdown()
    server.server_close()


def test_a_source_without_columns_keeps_the_run_name_and_matching_keys():
    made = Recipe()
    made.data.sources = [Source(files="a.jsonl")]
    assert "columns" not in resume_keys(made)["data.sources"][0]
    made.data.sources[0].columns = {"text": "body"}
    assert resume_keys(made)["data.sources"][0]["columns"] == {"text": "body"}
