"""What conversations are about: documented functions and classes, reduced to what can be said in a sentence."""

import re
from dataclasses import dataclass

from pipeline.sources.quickstart.corpus import WORDS
from pipeline.sources.quickstart.harvest import Described, SourceDocument
from pipeline.sources.quickstart.prose import SENTENCE_END, prose_share

MAX_WORDS = 36
MIN_PROSE = 0.75
ENTRY = re.compile(r"([A-Za-z_]\w*): (?=[A-Z])")
UNWANTED = re.compile(
    r"!!!|\bTODO\b|\bFIXME\b|[Dd]eprecat|www\.|\bpaper\b|[|{}$<>#=]|\.\.\.|\bsee\b|\bbelow\b|\bfollowing\b|:$|e\.g\.$|i\.e\.$|\["
)


@dataclass(frozen=True)
class Subject:
    """name: as a question says it, `Class.method` for methods. summary and descriptions are whole sentences."""

    name: str
    kind: str
    module: str
    package: str
    summary: str
    parameters: tuple[str, ...]
    descriptions: tuple[tuple[str, str], ...]
    returns: str

    @property
    def parameter_names(self) -> list[str]:
        return [parameter.lstrip("*").split("=")[0] for parameter in self.parameters]


def subjects_of(document: SourceDocument) -> list[Subject]:
    """Every public function and class of the document that has a sentence to say about itself."""
    package = document.path.split("/")[0]
    found = [_subject(thing, package) for thing in document.things if thing.kind in ("function", "class")]
    return [subject for subject in found if subject]


def _subject(thing: Described, package: str) -> Subject | None:
    parts = thing.name.split(".")
    if any(part.startswith("_") for part in parts):
        return None
    inside = parts[thing.module.count(".") + 1 :]
    summary = sentences(thing.lines[0]) if thing.lines and not ENTRY.match(thing.lines[0]) else ""
    if not summary or len(inside) > 2:
        return None
    described = dict(_descriptions(thing))
    return Subject(
        ".".join(inside),
        thing.kind,
        thing.module,
        package,
        summary,
        tuple(thing.parameters),
        tuple(described.items()),
        thing.returns,
    )


def _descriptions(thing: Described):
    names = {parameter.lstrip("*").split("=")[0] for parameter in thing.parameters}
    for line in thing.lines:
        entry = ENTRY.match(line)
        if entry and entry.group(1) in names:
            said = sentences(line[entry.end() :])
            if said:
                yield entry.group(1), said


def sentences(line: str) -> str:
    """The first sentence of a line, and the second if both are short; nothing when it is no plain English sentence."""
    said = ""
    for sentence in SENTENCE_END.split(line)[:2]:
        sentence = sentence.strip()
        if sentence and (sentence[-1].isalnum() or sentence[-1] in "`)'\""):
            sentence += "."
        if not _is_plain(sentence) or len((said + sentence).split()) > MAX_WORDS:
            break
        said = f"{said} {sentence}".strip()
    return said


def _is_plain(sentence: str) -> bool:
    return (
        sentence[:1].isupper()
        and sentence.endswith((".", "?", "!"))
        and sentence.isascii()
        and len(sentence.split()) >= 4
        and sentence.count("`") % 2 == 0
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
        and not UNWANTED.search(sentence)
        and prose_share(sentence) >= MIN_PROSE
    )


def key_of(sentence: str) -> str:
    """What two sentences share when they say the same."""
    return "".join(WORDS.findall(sentence.lower()))
