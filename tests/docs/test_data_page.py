"""docs/data.md: each row of its tables is recognised as the table says."""

import json
import re
from pathlib import Path

import pytest

from pipeline.sources.recognition import CHAT_COLUMNS, PROMPTS, RESPONSES, TEXT_COLUMNS, recognise

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
ROWS = [(form, json.loads(row)) for form, row in re.findall(r"^\| ([^|]+) \| `(\{.+?\})` \|", PAGE, re.M)]
REFUSED = ("preference pairs", "answers judged good or bad", "one message of a tree a row")


@pytest.mark.parametrize(("form", "row"), ROWS, ids=[form for form, _ in ROWS])
def test_each_row_of_the_page_is_recognised_as_the_page_says(form, row):
    kind = "text" if form.startswith("text") else "chat"
    found = recognise([row], kind=kind)
    assert found.name.startswith(form.removesuffix(" under another usual name"))
    assert (found.format is None) == (form in REFUSED)
    if found.format:
        assert found.format.reader()(row)


def test_the_page_has_every_form_and_every_usual_name():
    assert len(ROWS) == 15
    words = set(re.findall(r"\w+", PAGE))
    assert {*TEXT_COLUMNS, *CHAT_COLUMNS, *PROMPTS, *RESPONSES} <= words
