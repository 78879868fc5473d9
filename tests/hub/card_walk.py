"""A model card as a reader meets it: rendered to HTML and walked, every emptiness and every way out of it named."""

import re
from html.parser import HTMLParser

from markdown_it import MarkdownIt

ALLOWED = {"h1", "h2", "h3", "p", "a", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "img", "br"}  # fmt: skip
VOID = {"img", "br"}
MARKUP_LEFT = re.compile(r"\*\*|\]\(|\| ?-{3}|^#+ |```|\[\]|\bNone\b|\bnan\b|\{\}|\(\)", re.MULTILINE)


class Walk(HTMLParser):
    """Blocks of text by the tags around them, in order; links, pictures and the tags that were met."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.blocks: list[tuple[str, str]] = []  # tag, text
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attributes}
        self.links += [value for name, value in attributes if name in ("href", "src")]
        if tag in VOID:
            self.handle_data(" (picture) " if tag == "img" else " ")
            return
        self.open.append(tag)
        if tag in ("h1", "h2", "h3", "p", "pre", "th", "td", "li"):
            self.blocks.append((tag, ""))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.blocks and self.open:
            tag, text = self.blocks[-1]
            self.blocks[-1] = (tag, text + data)

    def texts(self, *tags: str) -> list[str]:
        return [text if tag == "pre" else " ".join(text.split()) for tag, text in self.blocks if tag in tags]


def body_of(card: str) -> str:
    """The card without its metadata, which ends at the first line of three dashes."""
    assert card.startswith("---\n")
    return card[4:].split("\n---\n", 1)[1]


def walk(card: str) -> Walk:
    found = Walk()
    found.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(body_of(card)))
    found.close()
    return found


def problems_of(card: str, files: set[str]) -> list[str]:
    """What a reader would stumble over. files: those that stand beside the card."""
    found = walk(card)
    problems = [f"a tag {tag}" for tag in sorted(found.tags - ALLOWED)]
    problems += [f"{tag} {name}" for tag, name in found.attributes - {("a", "href"), ("img", "src"), ("img", "alt"), ("code", "class")}]  # fmt: skip
    for (tag, text), (following, _) in zip(found.blocks, [*found.blocks[1:], ("h1", "")], strict=True):
        if not text.strip():
            problems.append(f"an empty {tag}")
        if tag.startswith("h") and tag != "h1" and following.startswith("h") and following <= tag:
            problems.append(f"nothing under {text!r}")
        if tag != "pre" and (left := MARKUP_LEFT.search(text)):
            problems.append(f"{left[0]!r} in {text!r}")
    headings = found.texts("h2")
    problems += [f"two sections {title!r}" for title in set(headings) if headings.count(title) > 1]
    for link in found.links:
        if not link.startswith("https://huggingface.co/") and link not in files:
            problems.append(f"a link to {link}")
    return problems
