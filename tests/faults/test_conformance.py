"""The conformance program names what a trainer does wrong on purpose, and nothing of one that resumes rightly."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from faults.conformance import page
from faults.conformance.__main__ import main
from faults.conformance.adapters import FOLDER, names, subject
from faults.conformance.cuts import BY_NAME
from faults.conformance.driver import Trainings
from faults.conformance.verdict import Attempt, compare

TRAINER = Path(__file__).with_name("counted_trainer.py")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return {cut: word} of the trainer that is wrong in the given way."""

    def judged(wrong: str, *cuts: str) -> dict[str, str]:
        monkeypatch.setenv("WRONG", wrong)
        trainings = Trainings(subject(str(TRAINER)), tmp_path)
        try:
            return {name: trainings.verdict(BY_NAME[name]).word for name in cuts}
        finally:
            trainings.close()

    return judged


def test_a_trainer_that_continues_where_it_stopped_is_exact_in_every_cut(words):
    assert words("", *BY_NAME) == {**dict.fromkeys(BY_NAME, "exact"), "other_ranks": "rows exact"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "cut", "word"),
    [
        ("repeats the epoch's first rows", "once", "rows +20 -20"),  # the 5 batches of the checkpoint
        ("repeats the epoch's first rows", "second_epoch", "rows +16 -16"),
        ("repeats the epoch's first rows", "epoch_end", "exact"),
        ("skips a batch", "once", "rows +4 -4"),
        ("another order of the remaining rows", "once", "order"),
        ("optimizer", "across_epochs", "losses from step 7"),  # step 6 has its loss before the update
        ("takes a half-written checkpoint", "in_a_save", "restarted"),
        ("takes a half-written checkpoint", "twice", "exact"),
        ("reads a half-written checkpoint", "in_a_save", "error"),
        ("a step too many after the end", "after_the_end", "steps +1"),
        ("other weights at the end", "once", "weights"),
        ("refuses another number of workers", "other_workers", "refused"),
        ("refuses another number of workers", "workers", "exact"),
        (
            "other losses in each training",
            "once",
            "rows exact",
        ),  # no two uncut trainings agree: only rows can be judged
    ],
)
def test_what_a_trainer_does_wrong_is_named(words, wrong, cut, word):
    assert words(wrong, cut) == {cut: word}


@pytest.mark.full
def test_steps_behind_the_checkpoint_count_only_when_they_are_made_again():
    def attempt(start: int, end: int) -> Attempt:
        steps = [{"step": step, "rows": [step], "loss": 1.0} for step in range(start + 1, end + 1)]
        return Attempt([[{"start": start}, *steps, {"end": end, "weights": "w"}]])

    verdict = compare([attempt(0, 8), attempt(5, 7)], attempt(0, 8), rows=4)
    assert (verdict.word, verdict.rows_missing, verdict.starts) == ("rows +0 -1, steps -1", [8], [0, 5])


@pytest.mark.full
def test_rows_of_a_lost_epoch_are_missing_in_the_whole_training():
    steps = [{"step": number, "rows": [number], "loss": 1.0} for number in (1, 2, 3, 4)]
    uncut = Attempt([[*steps, {"end": 4, "weights": "w"}]])
    half = Attempt([[{"start": 2}, {"end": 2, "weights": "w"}]])
    verdict = compare([Attempt([steps[:2]], killed=True), half], uncut, rows=2)
    assert verdict.word == "rows +0 -2, steps -2"
    cell = json.loads(json.dumps(verdict.as_json()))
    assert "the whole training: 0 repeated, 2 missing" in page.sentence(cell)


@pytest.mark.full
def test_a_program_of_its_own_is_judged_as_a_fork_is(tmp_path, capsys):
    command = f"{sys.executable} {TRAINER}"
    assert main(["--command", command, "--cut", "twice", "--cut", "ranks", "--folder", str(tmp_path)]) == 0
    assert "command twice: exact (started from steps 0, 5, 10)" in capsys.readouterr().out
    assert main([str(TRAINER), "--cold", "--cut", "in_a_save", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "counted_trainer in_a_save: exact (killed in checkpoint-10.part; started from steps 0, 5)" in said


@pytest.mark.full
def test_what_a_version_changes_is_named_by_compare(tmp_path, capsys, monkeypatch):
    how = [str(TRAINER), "--cut", "once", "--folder", str(tmp_path)]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert main([*how, "--json", str(before)]) == 0
    assert main([*how, "--json", str(after), "--compare", str(before)]) == 0
    monkeypatch.setenv("WRONG", "skips a batch")
    assert main([*how, "--json", str(after), "--compare", str(before)]) == 1
    said = capsys.readouterr().out
    assert (
        "counted_trainer once: was exact (started from steps 0, 5); is rows +4 -4 (epoch 1: 4 repeated, 4 missing;"
        in said
    )
    cell = json.loads(after.read_text())["counted_trainer"]["cells"]["once"]
    assert (len(cell["rows_repeated"]), len(cell["rows_missing"]), cell["first_other_order"]) == (4, 4, 6)


@pytest.mark.full
def test_a_start_that_never_ends_is_given_up_for_the_next_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WRONG", "never ends after a resume")
    how = [str(TRAINER), "--cut", "once", "--cut", "ranks", "--cut", "after_the_end", "--folder", str(tmp_path)]
    assert main([*how, "--limit", "8"]) == 0
    said = capsys.readouterr().out
    assert "counted_trainer once: error (no end after 8.0 s; started from steps 0, 5)" in said
    assert "counted_trainer ranks: error (no end after 8.0 s; started from steps 0, 5)" in said
    assert "counted_trainer after_the_end: exact" in said


@pytest.mark.full
def test_an_adapter_whose_packages_or_imports_are_missing_is_named(tmp_path, capsys):
    adapter = tmp_path / "absent.py"
    adapter.write_text('"""A trainer.\n\npackages: no-such-package==1.0\n"""\n')
    kept = tmp_path / "results.json"
    kept.write_text('{"absent": {"cells": {"once": {"word": "exact"}}}}')
    assert main([str(adapter), "--cut", "once", "--json", str(kept)]) == 0
    said = capsys.readouterr().out
    assert "absent: not installed: no-such-package" in said
    assert "| absent | exact |" in said  # what an earlier call found, where it was installed
    adapter.write_text('"""A trainer."""\nimport no_such_module\n')
    assert main([str(adapter), "--cut", "once"]) == 0
    assert "absent: error: ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", names())
def test_an_adapter_tells_its_name_versions_and_the_pages_it_follows(name):
    one = subject(name)
    assert one.what.endswith(".")
    assert one.packages
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+|[\w.-]+@file://\S+", package) for package in one.packages), one.packages
    assert name == "tandem" or (all(link.startswith("https://") for link in one.docs) and one.docs)
    assert one.offers <= {"workers", "ranks"}
    assert "def main() -> None:" in (FOLDER / f"{name}.py").read_text()


@pytest.mark.full
def test_the_page_is_the_one_of_its_results(tmp_path):
    assert main(["--show", "--json", str(DOCS / "conformance.json"), "--page", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == (DOCS / "conformance.md").read_text()


@pytest.mark.full
def test_the_page_shows_an_adapter_that_is_python():
    [code] = re.findall(r"```python\n(.*?)```", page.ADAPTER.format(), re.DOTALL)
    assert "journal.step" in ast.unparse(ast.parse(code))
