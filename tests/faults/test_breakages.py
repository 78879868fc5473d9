"""The table of breakages stays one that can be tried, and the runner tells a caught breakage from one that nothing notices."""

import ast

import pytest

from faults.breakages import BREAKAGES, ROOT, Breakage, node_of, places_of, try_breakage


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_a_breakage_has_its_one_line_in_the_program_and_its_test(breakage):
    places = places_of(breakage.code, ROOT)
    assert len(places) == 1, f"the line stands in {len(places)} places: {places}"
    text = places[0].read_text()
    assert ast.dump(ast.parse(text.replace(breakage.code, breakage.instead))) != ast.dump(ast.parse(text))
    assert node_of(breakage.test, ROOT)


def test_no_two_breakages_have_one_name_or_one_line():
    for values in ([b.name for b in BREAKAGES], [b.code for b in BREAKAGES]):
        assert len(set(values)) == len(values)


@pytest.fixture
def program(tmp_path):
    """A program of one line beside another, with tests of the first one."""
    for name, text in {
        "pipeline/sums.py": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n",
        "tests/test_sums.py": ("from pipeline.sums import add\n\n\ndef test_sums():\n    assert add(1, 2) == 3\n"),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "instead", "outcome"),
    [
        ("return a + b", "return a * b", "caught"),
        ("return a - b", "return a * b", "NOT CAUGHT"),
        ("return a + b", "return a +* b", "NOT CAUGHT"),  # a program that cannot be imported proves no test
        ("return a / b", "return a * b", "did not apply"),
        ("def ", "def _", "did not apply"),
    ],
)
def test_a_breakage_is_caught_when_its_test_fails_and_then_undone(program, code, instead, outcome):
    sound = (program / "pipeline" / "sums.py").read_text()
    assert try_breakage(Breakage("sums are products", code, instead, "test_sums"), program)[0] == outcome
    assert (program / "pipeline" / "sums.py").read_text() == sound
