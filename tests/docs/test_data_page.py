"""docs/data.md: each row of its tables is recognised as the table says."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from pipeline.data.preview import preview
from pipeline.sources.formats import CHAT_COLUMNS, TEXT_COLUMNS
from pipeline.sources.recognition import PROMPTS, RESPONSES, recognise

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
ROWS = [(form, json.loads(row)) for form, row in re.findall(r"^\| ([^|]+) \| `(\{.+?\})` \|", PAGE, re.M)]
REFUSED = ("preference pairs", "answers judged good or bad")

FILES = re.findall(r"^\| `files: (\S+)` \| (\d+) \|$", PAGE, re.M)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder in which the page's block has written a file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    with contextlib.chdir(folder):
        exec(compile(block, "docs/data.md", "exec"), {})
    return folder


@pytest.mark.parametrize(("name", "rows"), FILES)
def test_each_file_that_the_page_writes_is_read_as_one_source(written, name, rows):
    (size,) = (
        line
        for line in preview(str(written / name), [], tokenizer=None, rows=2, colour=False)
        if " rows, " in line or " row, " in line
    )
    assert size.startswith(f"{rows} row")


def test_the_page_writes_a_file_of_each_kind():
    assert len(FILES) == 7


@pytest.mark.parametrize(("form", "row"), ROWS, ids=[form for form, _ in ROWS])
def test_each_row_of_the_page_is_recognised_as_the_page_says(form, row):
    kind = "text" if form.startswith("text") else "chat"
    found = recognise([row], kind=kind)
    assert found.name.startswith(form.removesuffix(" under another usual name"))
    assert (found.format is None) == (form in REFUSED)
    if found.format:
        assert found.format.reader()(row)


def test_the_page_has_every_form_and_every_usual_name():
    assert len(ROWS) == 13
    words = set(re.findall(r"\w+", PAGE))
    assert {*TEXT_COLUMNS, *CHAT_COLUMNS, *PROMPTS, *RESPONSES} <= words


def test_the_page_makes_conversations_of_an_export_of_chats(tmp_path):
    lines = [
        ("2025-05-01T09:00", "Anna", "Hi"),
        ("2025-05-01T09:01", "Ben", "Hello."),
        ("2025-05-01T09:02", "Ben", "You?"),
    ]
    lines += [("2025-05-03T09:00", "Anna", "Bye"), ("2025-05-03T09:05", "Ben", "Bye.")]
    messages = [{"date": date, "from": name, "text": text} for date, name, text in lines]
    (tmp_path / "chat_export.json").write_text(json.dumps({"messages": messages}))
    (block,) = re.findall(r"^```py\n(.*?)^```$", PAGE, re.S | re.M)
    with contextlib.chdir(tmp_path):
        exec(compile(block, "docs/data.md", "exec"), {})
    first, second = (json.loads(line)["messages"] for line in (tmp_path / "my_chats.jsonl").read_text().splitlines())
    assert first[1] == {"role": "assistant", "content": "Hello.\nYou?"}
    assert second[0] == {"role": "user", "content": "Bye"}
