"""English out of documentation: docstrings and Markdown without their code, tables, markup and line wrapping.

A paragraph, a list item or a parameter's description becomes one line. What is left out: doctests, fenced and literal
blocks, tables, directives that hold code or figures, references, licences, and lines that are mostly not words.
"""

import re
from functools import cache

WORD = re.compile(r"[(\"'`*]*[A-Za-z][A-Za-z'-]*[`*]*[.,;:!?)\"']*$")
UNDERLINE = re.compile(r"\s*([=\-~^*+#.`\"])\1{2,}\s*$")
TABLE = re.compile(
    r"\s*(\||\+[-=+]{3,}|={2,}\s+=|-{2,}\s+-|[\u250c\u251c\u2514\u2502\u252c\u2534\u253c\u2552\u255e\u2558])"
)
LIST_ITEM = re.compile(r"\s*([-*+\u2022]|\(?\d{1,2}[.)]|#\.)\s+(?=\S)")
FIELD = re.compile(
    r"\s*:(param|parameter|arg|argument|keyword|raises?|returns?|return|rtype|type|yields?|ivar|vartype|cvar|var)\b\s*([^:]*):\s*"
)
NUMPY_ENTRY = re.compile(r"\s*[`*]*[A-Za-z_*][\w.*]*[`*]*(?:, [`*]*[\w.*]+[`*]*){0,4}\s+:\s*\S.{0,160}$")
GOOGLE_ENTRY = re.compile(
    r"\s*[`*]{0,2}([A-Za-z_][\w.]*)[`*]{0,2}\s*(\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\))?(?:,? \*optional\*[^:]*|,? defaults? [^:]{0,60})?\s*:(?:\s+|$)"
)
DIRECTIVE = re.compile(r"\s*\.\.\s+([\w:-]+?)::\s*(.*)$")
SPOKEN_DIRECTIVES = {"note", "warning", "tip", "important", "caution", "hint", "attention", "seealso", "admonition"}
SILENT_SECTIONS = {
    "see also",
    "references",
    "reference",
    "bibliography",
    "license",
    "licence",
    "copyright",
    "changelog",
    "citation",
    "authors",
    "credits",
}
SECTION = re.compile(
    r"\s*(args|arguments|parameters|params|returns?|yields?|raises|attributes|examples?|notes?|warnings?|warns|usage|see also|references?|other parameters|keyword args|kwargs|methods|todo|inputs?|outputs?|usage examples?|properties)\s*:{0,2}\s*$",
    re.IGNORECASE,
)
LEGAL = re.compile(r"licen[sc]e|copyright|warrant|all rights reserved|redistribut|spdx", re.IGNORECASE)
URL = re.compile(r"\s*<?\(?\b(?:https?|ftp)://[^\s>)]+[>)]?")
FORMULA = re.compile(r"\$|\\[A-Za-z]|:math:|[{}]{2}")
SENTENCE_END = re.compile(r"(?<=[a-z)`\"'\]][.!?])\s+(?=[A-Z`\"])")
SENTENCE_START = re.compile(r"(?:- )?[`\"'(*]*[A-Za-z]")
MIN_WORDS = 4
MIN_PROSE_SHARE = 0.6


def prose_share(line: str) -> float:
    """Share of the line's characters, spaces apart, that belong to words of letters with ordinary punctuation."""
    tokens = line.split()
    total = sum(map(len, tokens))
    return sum(len(token) for token in tokens if WORD.match(token)) / total if total else 0.0


@cache
def prose_lines(text: str) -> tuple[str, ...]:
    """The prose of one docstring or Markdown text, one paragraph a line; nothing when there is none.

    Cached: a third of all docstrings are copies of another one.
    """
    lines: list[str] = []
    for paragraph in _paragraphs(text):
        if lines and lines[-1].endswith(":") and not paragraph.startswith("- "):
            lines.pop()  # What it announced was code or a table and is gone.
        if FORMULA.search(paragraph):
            continue
        line = _without_markup(paragraph).lstrip("> ")
        if "://" in line:
            line = " ".join(sentence for sentence in SENTENCE_END.split(line) if "://" not in sentence)
        if (
            line.count(" ") + 1 < MIN_WORDS
            or not SENTENCE_START.match(line)
            or "\ufffd" in line
            or LEGAL.search(line)
            or prose_share(line) < MIN_PROSE_SHARE
        ):
            continue
        lines.append(line[0].upper() + line[1:] if line.split(" ", 1)[0].isalpha() else line)
    if lines and lines[-1].endswith(":"):
        lines.pop()
    return tuple(lines)


def _paragraphs(text: str) -> list[str]:
    """Unwrapped paragraphs, list items and entries, without the blocks that are no prose."""
    lines = text.expandtabs(4).splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    lines = [lines[0].strip(), *(line[margin:].rstrip() for line in lines[1:])] if lines else []
    found: list[str] = []
    current: list[str] = []
    indent, entry_depth, silent, skip_below, fence, doctest = 0, -1, False, -1, "", False

    def close() -> None:
        nonlocal entry_depth
        entry_depth = -1
        if current:
            found.append(" ".join(current))
            current.clear()

    for place, line in enumerate(lines):
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if fence:
            if stripped.startswith(fence):
                fence = ""
            continue
        if stripped.startswith(("```", "~~~")) and not UNDERLINE.match(line):
            close()
            if stripped.count("```") < 2:
                fence = stripped[:3]
            continue
        if not stripped:
            ends_literal = bool(current) and current[-1].endswith("::")
            if ends_literal:
                current[-1] = current[-1][:-1]
                skip_below = indent
            close()
            doctest = False
            continue
        if skip_below >= 0:
            if depth > skip_below:
                continue
            skip_below = -1
        if doctest:
            continue
        if stripped.startswith((">>>", "In [", "$ ", "... ", "%%", "@")):
            close()
            doctest = True
            continue
        if UNDERLINE.match(line):
            if current:  # The line above was a heading: it opens a section and is itself no prose.
                heading = current.pop().lower().strip(" :")
                close()
                silent = heading in SILENT_SECTIONS
            continue
        following = lines[place + 1] if place + 1 < len(lines) else ""
        if stripped.startswith("#"):  # A heading of Markdown, or a comment in code.
            close()
            silent = stripped.lstrip("# ").lower() in SILENT_SECTIONS
            continue
        if SECTION.match(line) and not UNDERLINE.match(following):
            close()
            silent = stripped.lower().strip(" :") in SILENT_SECTIONS
            continue
        if silent and not UNDERLINE.match(following):
            continue
        directive = DIRECTIVE.match(line)
        if directive or stripped.startswith(".. "):
            close()
            if directive is None or directive.group(1).lower() not in SPOKEN_DIRECTIVES:
                skip_below = depth
            elif directive.group(2):
                current.append(directive.group(2))
                indent = depth
            continue
        if TABLE.match(line):
            close()
            continue
        field = FIELD.match(line)
        if field:
            close()
            name = field.group(2).split()
            rest = line[field.end() :].strip()
            if field.group(1) in ("type", "rtype", "vartype") or not rest:
                continue
            current.append(f"{name[-1]}: {rest}" if name and field.group(1) not in ("return", "returns") else rest)
            indent = depth
            continue
        deeper = len(following) - len(following.lstrip()) if following.strip() else 0
        if NUMPY_ENTRY.match(line) and deeper <= depth:
            close()
            continue  # A name and a type that nobody described.
        if NUMPY_ENTRY.match(line):
            close()
            current.append(f"{stripped.split(' :', 1)[0].strip('`* ')}:")
            indent = deeper
            continue
        entry = GOOGLE_ENTRY.match(line)
        if (
            entry
            and (not current or depth < indent or depth == entry_depth or (depth == indent and entry.group(2)))
            and (depth > 0 or deeper > depth or entry.group(2))
        ):
            close()
            rest = line[entry.end() :].strip()
            current.append(f"{entry.group(1)}: {rest}" if rest else f"{entry.group(1)}:")
            indent, entry_depth = (deeper if deeper > depth else depth), depth
            continue
        item = LIST_ITEM.match(line)
        if item:
            close()
            current.append("- " + line[item.end() :].strip())
            indent = depth + 2
            continue
        if current and depth < indent and current[0].startswith("- "):
            close()
        if not current:
            indent = depth
        current.append(stripped)
    close()
    return found


ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")
RST_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{0,2}")
MD_IMAGE = re.compile(r"\[?!\[[^\]]*\]\([^)]*\)(?:\]\([^)]*\))?")
MD_LINK = re.compile(r"\[([^\]]+)\]\((?:[^()]|\([^)]*\))*\)")
HF_REF = re.compile(r"\[`~?([^`]+)`\]")
CITATION = re.compile(r"\s*\[(?:\d+|[A-Z]\w{0,12}\d{2,4}\w?)\]_?")
HTML_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")


def _without_markup(line: str) -> str:
    line = MD_IMAGE.sub("", line)
    line = MD_LINK.sub(r"\1", line)
    line = ROLE.sub(r"`\1`", line)
    line = RST_LINK.sub(r"\1", line)
    line = HF_REF.sub(r"`\1`", line)
    line = CITATION.sub("", line)
    line = HTML_TAG.sub("", line)
    line = re.sub(r"`_{1,2}(?=\W|$)", "`", line.replace("``", "`").replace("**", ""))
    line = re.sub(r"`(?:[\w]+\.)+(\w+)(\(\))?`", r"`\1`", line)
    line = URL.sub("", line) if "(http" in line or "<http" in line else line
    return " ".join(line.split())
