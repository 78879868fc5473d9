"""The campaign of hostile things: its fast part, and that each of its checks can fail."""

import pytest

from faults import results
from tests.hostile.__main__ import WHAT, campaign, figure, table, trial
from tests.hostile.case import MARKING, Case, lay_whole
from tests.hostile.things import FAST, KINDS, all_things
from tests.hostile.trial import STATUSES, Thing
from tests.hub.hub_stand_in import hub_stand_in
from tests.warm_commands import WarmCommands


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Makes a trial of a thing; gives its row."""
    folder = tmp_path_factory.mktemp("hostile")
    whole, warm = lay_whole(folder / "whole"), WarmCommands(folder)
    with hub_stand_in() as hub:
        yield lambda thing: trial("made: here", thing, folder=folder / "thing", whole=whole, warm=warm, hub=hub)
    warm.close()


@pytest.mark.full
def test_hostile_things_of_each_kind_are_refused_or_harmless(tmp_path):
    things = all_things()
    rows = campaign({name: things[name] for name in FAST}, folder=tmp_path)
    assert {row["trial"].partition(":")[0] for row in rows} == set(KINDS)
    assert [line for row in rows for line in row["wrong"]] == []
    assert "0 executed, 0 written or reached outside, 0 tracebacks" in figure(rows)
    assert campaign({FAST[0]: things[FAST[0]]}, folder=tmp_path) == rows[:1]  # what was made is not made again


@pytest.mark.full
def test_there_are_at_least_sixty_things_with_names_distinct_without_case():
    names = list(all_things())
    assert len({name.lower() for name in names}) == len(names) >= 60


def beside_the_recipe(source: str):
    """The user's own code, which runs: it does what a hostile thing would like to."""

    def lay(case: Case) -> str:
        case.put("in/own.py", source)
        return case.recipe(form="own:f")

    return lay


DOES = {
    "executed": "import os\ndef f(row):\n    os.system('true')\n    return str(row)\n",
    "outside": "def f(row):\n    open('elsewhere/pwned', 'w').close()\n    return str(row)\n",
    "traces": "print('Traceback (most recent call last)')\ndef f(row):\n    return str(row)\n",
}


@pytest.mark.full
@pytest.mark.parametrize("what", DOES)
def test_code_that_runs_writes_elsewhere_or_prints_a_traceback_is_counted(tried, what):
    row = tried(Thing(lay=beside_the_recipe(DOES[what]), commands=("data {}",)))
    (command,) = row["commands"]
    assert command["status"] == 0
    assert not row["ok"]
    assert command[what] >= 1
    assert all(command[other] == 0 for other in set(DOES) - {what, "executed"})  # its own code is in the case's folder


@pytest.mark.full
def test_a_payload_that_trust_code_lets_run_is_counted_as_executed(tried):
    def lay(case: Case) -> str:
        return case.auto_map()

    thing = Thing(
        lay=lay, commands=("chat {} -p hello --max-new-tokens 2", "chat {} -p hello --max-new-tokens 2 --trust-code")
    )
    refused, trusted = tried(thing)["commands"]
    assert (refused["status"], refused["executed"]) == (64, 0)
    assert trusted["executed"] >= 1  # by the mark that it left


@pytest.mark.full
def test_a_native_library_that_writes_elsewhere_is_seen_in_the_folders(tried):
    source = (
        "def f(row):\n    import ctypes\n    ctypes.CDLL(None).creat(b'elsewhere/pwned', 0o600)\n    return str(row)\n"
    )
    (command,) = tried(Thing(lay=beside_the_recipe(source), commands=("data {}",)))["commands"]
    assert command["outside"] == 1


@pytest.mark.full
def test_a_command_that_takes_too_long_or_dies_is_reported(tried):
    endless = Thing(lay=beside_the_recipe("import time\ntime.sleep(60)\n"), commands=("data {}",), limit_s=1)
    assert any("took too much time" in line for line in tried(endless)["wrong"])
    dies = Thing(
        lay=beside_the_recipe("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"), commands=("data {}",)
    )
    row = tried(dies)
    assert row["commands"][0]["status"] not in STATUSES
    assert any("ended with -11" in line for line in row["wrong"])


@pytest.mark.full
def test_a_command_that_takes_too_much_memory_is_killed_and_told(tried):
    row = tried(Thing(lay=beside_the_recipe("held = b'a' * (4 << 30)\n"), commands=("data {}",)))
    assert any("took too much memory" in line for line in row["wrong"])


@pytest.mark.full
def test_control_characters_and_scripts_are_reported(tried):
    raw = "import os\nos.write(1, b'\\x1b]52;c;aGk=\\x07')\ndef f(row):\n    return str(row)\n"
    assert any(
        "control characters" in line
        for line in tried(Thing(lay=beside_the_recipe(raw), commands=("data {}",)))["wrong"]
    )

    def page(case: Case) -> str:
        case.put("runs/x/report/report.html", "<script>hostile-script()</script>")
        return case.recipe()

    assert any("a script on the page" in line for line in tried(Thing(lay=page, commands=("data {}",)))["wrong"])


@pytest.mark.full
def test_figures_and_table_come_between_the_markers_of_the_page(tmp_path):
    command = {
        "command": "data x",
        "status": 65,
        "executed": 1,
        "outside": 0,
        "traces": 2,
        "seconds": 1.5,
        "peak_mib": 700,
    }
    rows = [{"trial": "rows: odd", "ok": False, "wrong": ["x"], "commands": [command], "date": "2026-11-23"}]
    page = tmp_path / "page.md"
    page.write_text("<!-- hostile: begin -->\nold\n<!-- hostile: end -->\n")
    results.write_to_page("hostile", results.summary(WHAT, figure(rows), rows, "command") + "\n\n" + table(rows), page)
    text = page.read_text()
    assert (
        "0 of 1 things through 1 commands: 1 executed, 0 written or reached outside, 2 tracebacks; statuses 1 x 65"
        in text
    )
    assert "| rows | 1 | 1 (data) | 1 | 0 | 2 | 1 x 65 | 2 s | 700 MiB |" in text
    assert "old" not in text


def test_marking_leaves_its_mark(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "MARK"))
    exec(compile(MARKING, "marking", "exec"), {"__name__": "marking"})
    assert (tmp_path / "MARK").read_text() == "marking\n"
