"""docs/troubleshooting.md: each message that it quotes is one that the program has, each status one of its classes."""

import ast
import re

import pytest

from pipeline.process import errors
from tests.docs.pages import ROOT, page_text

PAGE = page_text("troubleshooting.md")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
GAP = "\0"  # what a message puts in


def texts_of(node: ast.AST):
    """Yield each text of a module, its pieces joined, and what is put in as a gap."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
        elif isinstance(inner, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in inner.values)


MESSAGES = {text for path in (ROOT / "pipeline").rglob("*.py") for text in texts_of(ast.parse(path.read_text()))}


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_that_the_page_quotes_is_in_the_program(quoted):
    pattern = re.compile(".*?".join(map(re.escape, quoted.split("..."))), re.S)
    assert any(pattern.search(message) for message in MESSAGES)


def test_the_page_quotes_some_twenty_messages_and_every_exit_status():
    assert len(QUOTED) >= 20
    classes = [value for value in vars(errors).values() if isinstance(value, type) and value is not errors.TandemError]
    statuses = {str(one.status) for one in classes if issubclass(one, errors.TandemError)} - {"1"}
    table = PAGE.split("## The exit status")[1]
    assert statuses <= set(re.findall(r"\b\d+\b", table))
