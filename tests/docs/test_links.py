"""The pages' links lead to files and headings that are there; the glossary's keys are keys of a recipe."""

import re
from pathlib import Path

import pytest

from pipeline.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(page):
    """As GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_key_that_the_glossary_names_is_a_key_of_a_recipe():
    sections = Recipe.__dataclass_fields__.keys()
    named = re.findall(r"`(\w+)\.(\w+)`", (ROOT / "docs" / "glossary.md").read_text())
    keys = [(section, key) for section, key in named if section in sections]
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    assert len(keys) > 5
    for section, key in keys:
        rows = recipes.split(f"\n## {section}\n")[1].split("\n## ")[0]
        assert re.search(rf"^\| {key}( =)? \|", rows, re.M), f"{section}.{key}"


def test_every_docs_page_is_linked_from_the_readme_and_the_navigation():
    reached, waiting = set(), {ROOT / "README.md"}
    while waiting:
        page = waiting.pop()
        reached.add(page)
        links = re.findall(r"\]\(([\w./]+\.md)", page.read_text())
        waiting |= {target for link in links if (target := (page.parent / link).resolve()).exists()} - reached
    in_navigation = set(re.findall(r"[\w./]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = set((ROOT / "docs").glob("*.md"))
    assert pages <= reached
    assert {page.name for page in pages} <= in_navigation
