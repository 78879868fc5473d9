"""docs/hardware.md: its table is what its command prints today, and its commands plan."""

import runpy

from tests.docs.pages import ROOT, commands, page_text, run


def test_the_table_is_what_the_page_s_command_plans():
    of_command = runpy.run_path(str(ROOT / "benchmarks" / "what_fits.py"))
    assert of_command["BEGIN"] + of_command["table"]() + of_command["END"] in page_text("hardware.md")


def test_each_command_of_the_page_plans_for_the_card_that_it_names(tmp_path, cache):
    for words in commands("hardware.md"):
        card = "a card of 8 GB" if "--fit" in words else "RTX4090"
        assert card in run(words, folder=tmp_path, cache=cache)
