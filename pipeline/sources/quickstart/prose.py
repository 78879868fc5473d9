"""English out of documentation: docstrings and Markdown without their code, tables, markup and line wrapping.

A paragraph, a list item or a parameter's description becomes one line. What is left out: doctests, fenced and literal
blocks, tables, directives that hold code or figures, references, licences, and lines that are mostly not words.
"""

import re
from functools import cache

from pipeline.sources.quickstart.paragraphs import paragraphs

WORD = re.compile(r"[(\"'`*]*[A-Za-z][A-Za-z'-]*[`*]*[.,;:!?)\"']*$")
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
    for paragraph in paragraphs(text):
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
