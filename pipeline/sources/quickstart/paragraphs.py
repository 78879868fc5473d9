"""Paragraphs of docstrings and Markdown: unwrapped, and without the blocks that are no prose.

Understands numpy's, Google's and Sphinx's ways to write a docstring, and Markdown, as far as they tell prose from the rest.
"""

import re

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
CODE_STARTS = (">>>", "In [", "$ ", "... ", "%%", "@")


def paragraphs(text: str) -> list[str]:
    """One string for each paragraph, list item, and parameter with its description."""
    lines = text.expandtabs(4).splitlines()
    margin = min((_depth(line) for line in lines[1:] if line.strip()), default=0)
    lines = [lines[0].strip(), *(line[margin:].rstrip() for line in lines[1:])] if lines else []
    reader = _Reader()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        reader.read(line, following)
    reader.close()
    return reader.found


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


class _Reader:
    """Line by line. Of the methods tried in turn, the first that answers True has dealt with the line."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.current: list[str] = []  # The lines of the paragraph that is open.
        self.indent = 0  # Where that paragraph's lines begin.
        self.entry_depth = -1  # Where its name begins when it describes a parameter.
        self.fence = ""
        self.skip_below = -1  # Leave out what is indented deeper than this.
        self.doctest = False
        self.silent = False  # Inside a section that is left out.

    def read(self, line: str, following: str) -> None:
        stripped, depth = line.strip(), _depth(line)
        _ = (
            self._code(line, stripped, depth)
            or self._heading(line, stripped, following)
            or self._markup(line, stripped, depth)
            or self._entry(line, stripped, depth, following)
            or self._prose(line, stripped, depth)
        )

    def close(self) -> None:
        """End the open paragraph."""
        self.entry_depth = -1
        if self.current:
            self.found.append(" ".join(self.current))
            self.current = []

    def _open(self, text: str, indent: int) -> bool:
        self.close()
        self.current.append(text)
        self.indent = indent
        return True

    def _code(self, line: str, stripped: str, depth: int) -> bool:
        """Fences, doctests and their output, literal blocks; and the blank lines that end them."""
        if self.fence:
            if stripped.startswith(self.fence):
                self.fence = ""
            return True
        if stripped.startswith(("```", "~~~")) and not UNDERLINE.match(line):
            self.close()
            if stripped.count("```") < 2:
                self.fence = stripped[:3]
            return True
        if not stripped:
            if self.current and self.current[-1].endswith("::"):
                self.current[-1] = self.current[-1][:-1]
                self.skip_below = self.indent
            self.close()
            self.doctest = False
            return True
        if depth <= self.skip_below:
            self.skip_below = -1
        if self.skip_below >= 0 or self.doctest:
            return True
        if stripped.startswith(CODE_STARTS):
            self.close()
            self.doctest = True
        return self.doctest

    def _heading(self, line: str, stripped: str, following: str) -> bool:
        """Headings, which are no prose, and everything in the sections that are left out."""
        if UNDERLINE.match(line):
            if self.current:  # The line above was the heading.
                heading = self.current.pop()
                self.close()
                self.silent = heading.lower().strip(" :") in SILENT_SECTIONS
            return True
        if stripped.startswith("#"):  # A heading of Markdown, or a comment in code.
            self.close()
            self.silent = stripped.lstrip("# ").lower() in SILENT_SECTIONS
            return True
        underlined = UNDERLINE.match(following)
        if SECTION.match(line) and not underlined:
            self.close()
            self.silent = stripped.lower().strip(" :") in SILENT_SECTIONS
            return True
        return self.silent and not underlined

    def _markup(self, line: str, stripped: str, depth: int) -> bool:
        """Directives, of which notes and the like are spoken, and tables."""
        directive = DIRECTIVE.match(line)
        if directive is None and not stripped.startswith(".. "):
            table = bool(TABLE.match(line))
            if table:
                self.close()
            return table
        self.close()
        if directive is None or directive.group(1).lower() not in SPOKEN_DIRECTIVES:
            self.skip_below = depth
        elif directive.group(2):
            self._open(directive.group(2), depth)
        return True

    def _entry(self, line: str, stripped: str, depth: int, following: str) -> bool:
        """A parameter and its description, as `name: description`."""
        field = FIELD.match(line)
        if field:
            self.close()
            name, rest = field.group(2).split(), line[field.end() :].strip()
            if field.group(1) not in ("type", "rtype", "vartype") and rest:
                self._open(
                    f"{name[-1]}: {rest}" if name and field.group(1) not in ("return", "returns") else rest, depth
                )
            return True
        deeper = _depth(following) if following.strip() else 0
        if NUMPY_ENTRY.match(line):
            self.close()  # Without a description, a name and a type are no prose.
            return deeper <= depth or self._open(f"{stripped.split(' :', 1)[0].strip('`* ')}:", deeper)
        entry = GOOGLE_ENTRY.match(line)
        if entry is None:
            return False
        name_and_type, rest = bool(entry.group(2)), line[entry.end() :].strip()
        begins = (
            not self.current
            or depth < self.indent
            or depth == self.entry_depth
            or (depth == self.indent and name_and_type)
        )
        if not begins or not (depth > 0 or deeper > depth or name_and_type):
            return False
        self._open(f"{entry.group(1)}: {rest}" if rest else f"{entry.group(1)}:", max(deeper, depth))
        self.entry_depth = depth
        return True

    def _prose(self, line: str, stripped: str, depth: int) -> bool:
        item = LIST_ITEM.match(line)
        if item:
            return self._open("- " + line[item.end() :].strip(), depth + 2)
        if self.current and depth < self.indent and self.current[0].startswith("- "):
            self.close()
        if not self.current:
            return self._open(stripped, depth)
        self.current.append(stripped)
        return True
