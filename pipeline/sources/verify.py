"""Checks of a dataset's files before training: signatures, columns, rows that are no text or conversation."""

import json
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pipeline.process.errors import DataError, readable
from pipeline.process.network import read_again
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import CHAT_COLUMNS, TEXT_COLUMNS, Format, UntrainableConversation
from pipeline.sources.raw_rows import (
    COMPRESSIONS,
    BadRow,
    DamagedRow,
    RawRow,
    check_content,
    check_magic_bytes,
    count_rows,
    csv_records,
    holds_json,
    is_array,
    kind_of,
    open_bytes,
    open_text,
    parse_json_line,
    read_rows,
    table_schema,
)

MOST_OF_REASON = 1_000  # characters: a reason lists the row's columns, whose names may be of any length


def row_name(path: Path | str, row: int) -> str:
    """Return `file:line` for files of lines, one-based as editors count; else `file row n`, zero-based as tables
    count."""
    kind = kind_of(Path(path).name)
    if kind == "jsonl" and not (isinstance(path, Path) and is_array(path)):
        return f"{path}:{row + 1}"
    what = "piece" if kind == "txt" else "row"
    return f"{path} {what} {row}"


def read_item(value: Any, form: Format, read: Callable[[Any], Any]) -> tuple[Any, str | None]:
    """Return a row's item, and the reason where the format cannot read it. Raises UntrainableConversation as the
    format does."""
    if isinstance(value, BadRow):
        return None, value.reason
    try:
        return read(value), None
    except UntrainableConversation:
        raise
    except Exception as error:  # An own format may raise anything; whatever it is, the row is named.
        if isinstance(error, ValueError):
            return None, str(error)
        return None, f"{form.name} raised {type(error).__name__}: {error}"


def is_blank(item: Any) -> bool:
    return isinstance(item, str) and not item.strip()


def read_through(path: Path, rows: list[RawRow], form: Format) -> tuple[list[str], list[str], bool]:
    """Return the rows that the format cannot read, the conversations that nothing can be learned from, both as
    `file:row: reason`, and whether every row is a text of white space alone."""
    read = form.reader()
    bad, left_out, empty = [], [], True
    for _, row, value in rows:
        try:
            item, reason = read_item(value, form, read)
        except UntrainableConversation as error:
            item = None
            left_out.append(f"{row_name(path, row)}: {readable(str(error), most=MOST_OF_REASON)}")
        else:
            if reason:
                bad.append(f"{row_name(path, row)}: {readable(reason, most=MOST_OF_REASON)}")
        empty = empty and is_blank(item)
    return bad, left_out, empty


def untrainable(path: Path, rows: list[RawRow], form: Format) -> list[str]:
    """Return `file:row: reason` for each conversation that is in good form and that nothing can be learned from."""
    return read_through(path, rows, form)[1]


def grouped(lines: list[str]) -> list[str]:
    """Return lines `file:row: reason` by their reason, each reason once: `66 rows: reason (first: file:row)`.

    Reasons that differ in numbers alone are one: the place in a row says nothing where hundreds have the mistake.
    """
    groups: dict[str, list[tuple[str, str]]] = {}  # place and reason, by the reason without its numbers
    for line in lines:
        found = re.match(r"(.*?(?::\d+| (?:row|piece) \d+)): (.*)", line, re.DOTALL)
        place, reason = found.groups() if found else ("", line)
        groups.setdefault(re.sub(r"\d+", "#", reason), []).append((place, reason))
    found_lines = []
    for group in groups.values():
        place, reason = group[0]
        if len(group) > 1:
            reason = f"{len(group):,} rows: {reason}"
            if place:
                reason += f" (first: {place})"
        elif place:
            reason = f"{place}: {reason}"
        found_lines.append(reason)
    return found_lines


HEAD_BYTES = 4096
SAMPLED_ROWS = 64  # Read at the file's beginning; of its end as many from parquet, the last line from jsonl.
MOST_OF_AN_OBJECT = 2**28  # bytes of a file that is read whole to say what it is
MOST_ROWS = 1024  # Of a file that is read wholly, so many with the bad ones in its middle.
TAIL_BYTES = 2**20
NO_TEXT = "is no text: it has zero bytes in it. Convert it to UTF-8 text or leave it out."
NO_ROWS = "has no rows. Leave it out or write it again."
NO_BYTES = "is empty (0 bytes). Write or download it again."
NOTHING_INSIDE = "holds nothing once decompressed. Write or download it again."
BLANK_LINES = "holds blank lines only. Write or download it again."
WHITE_SPACE = "holds white space only. Write or download it again."
NOTHING = (NO_ROWS, NO_BYTES, NOTHING_INSIDE, BLANK_LINES, WHITE_SPACE)
ONE_OBJECT = (
    "is one JSON object of columns, as to_json of pandas writes it by default. Write it again with to_json(PATH, "
    "orient='records', lines=True)."
)
EMPTY = "has no text: all rows that were looked at are empty. Name the column that has it, or leave the file out."


@dataclass
class Findings:
    """problems: what makes the file useless. bad_rows: single rows, `file:row: reason`, that a recipe may tolerate.
    untrainable: conversations in good form that are left out and counted, named in the same way. is_empty: there is
    nothing in the file, which is no matter where others have something."""

    problems: list[str] = field(default_factory=list)
    bad_rows: list[str] = field(default_factory=list)
    untrainable: list[str] = field(default_factory=list)
    is_empty: bool = False


def check_file(path: Path, form: Format, *, column_key: str) -> Findings:
    """Look at the file's first bytes, its footer or last line, and its first and last rows through the format.

    column_key: the recipe's key that names the column, for the cure.
    """
    findings = Findings()
    try:
        reason = _check(path, form, column_key, findings)
    except DataError as error:
        findings.problems.append(str(error))
        return findings
    except PermissionError:
        reason = "may not be read by this user. Change its permissions (chmod u+r)."
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}. Copy or download it again."
    if reason:
        findings.problems.append(f"{path} {reason}")
        findings.is_empty = reason in NOTHING
    return findings


def verify_file(file: SourceFile, form: Format, file_facts: FileFacts, *, column_key: str) -> Findings:
    """Look into one local file and note its size and sha256; skipped when this very content was found sound before.
    Of one that is not fetched yet the two ends are looked at."""
    if file.path is None:
        reason = file.check_ends() if file.check_ends else None
        return Findings([reason]) if reason else Findings()
    path = file.path
    try:
        facts = read_again(lambda: file_facts.of(path), path=path)
    except PermissionError:
        return Findings([f"{path} may not be read by this user. Change its permissions (chmod u+r)."])
    # The Hub knows the sha256 of large files; small ones have the id of a git object, which is another hash.
    if file.sha256 and not file.sha256.startswith("git:") and file.sha256 != facts.sha256:
        problem = (
            f"{path} has the sha256 {facts.sha256[:12]}, and the Hub lists {file.sha256[:12]}: it is damaged. Delete "
            "it and run the same command again."
        )
        return Findings([problem])
    file.sha256, file.bytes = file.sha256 or facts.sha256, facts.size
    file.mtime_ns, file.ctime_ns = facts.mtime_ns, facts.ctime_ns
    identity = form.identity()
    if identity in facts.checked:
        return Findings()
    findings = check_file(path, form, column_key=column_key)
    # Kept of sound files alone: what is wrong with one is to be said at every start.
    if not findings.problems and not findings.bad_rows:
        facts.checked.append(identity)
        file_facts.keep(facts)
    return findings


def _check(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    """Return why the file is useless, noting single bad rows in findings."""
    kind = kind_of(path.name)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        return NO_BYTES
    reason = check_magic_bytes(path.name, head)
    if reason is None and path.suffix.lower() in COMPRESSIONS:
        reason = _check_compressed(path)
    if reason:
        return reason
    if kind in ("parquet", "arrow"):
        return _check_table(path, form, column_key, findings)
    # A line of jsonl with a zero byte in it is a bad row.
    with open_bytes(path) as file:
        if kind != "jsonl" and b"\0" in file.read(2**16):
            return NO_TEXT
    if kind == "txt":
        return _check_text(path, form, findings)
    if kind == "jsonl" and not is_array(path):
        return _check_lines(path, form, column_key, findings)
    return _check_whole(path, form, column_key, findings)


def _check_compressed(path: Path) -> str | None:
    """Decompress to the end: only that shows whether the end is there."""
    import zlib

    try:
        with open_bytes(path) as file:
            first = file.read(HEAD_BYTES)
            if not first:
                return NOTHING_INSIDE
            reason = check_content(first)
            if reason:
                return f"holds something else once decompressed: it {reason}"
            while file.read(TAIL_BYTES):
                pass
    except (EOFError, zlib.error, OSError) as error:
        if "too much memory" in str(error):  # as the zstd library says it
            return "is compressed with a window above 128 MiB. Decompress it: zstd -d --long=31."
        return f"is truncated or damaged: {error}. Download it again."
    return None


def _check_table(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    """Check a file of columns: schema, footer, first and last rows."""
    import pyarrow

    try:
        schema = table_schema(path)
        count = count_rows(path)  # reads every batch of an arrow file: nothing else shows that all are there
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        return f"is truncated or damaged: {error}. Download it again."
    if not count:
        return NO_ROWS
    reason = column_problem(form, schema.names, column_key)
    if reason:
        return reason
    for column in form.required_columns:
        reason = _type_problem(form, column, schema.field(column).type)
        if reason:
            return reason
    columns = form.read_columns
    first = islice(read_rows(path, columns=columns), SAMPLED_ROWS)
    last = read_rows(path, first_row=max(SAMPLED_ROWS, count - SAMPLED_ROWS), columns=columns)
    rows = [*first, *last]
    # Each reason once: every row of a damaged group has the same.
    damaged = dict.fromkeys(value.reason for _, _, value in rows if isinstance(value, DamagedRow))
    if damaged:
        return f"is damaged: {', '.join(damaged)}. Download it again."
    return _note_rows(path, rows, form, findings)


def _type_problem(form: Format, column: str, found: Any) -> str | None:
    """Return why a column of that Arrow type is not what the format reads."""
    import pyarrow

    if isinstance(found, pyarrow.BaseExtensionType) and holds_json(found):
        return None  # Only its rows show what it is.
    if pyarrow.types.is_dictionary(found):
        found = found.value_type
    name = str(found).partition("<")[0]
    is_text, is_list = "string" in name, "list" in name
    if form.name == "text":
        fits, wanted = is_text, "text"
    elif column == form.column:
        fits, wanted = is_list, "a list of messages"
    else:
        fits, wanted = is_text or is_list, "text or a list of messages"
    if fits:
        return None
    return (
        f"has a column {column!r} of type {found}, not {wanted}. Name another column, or write a format module:attr "
        "that reads it."
    )


def _check_text(path: Path, form: Format, findings: Findings) -> str | None:
    missing = [column for column in form.required_columns if column != "text"]
    if missing:
        return (
            f"is plain text and has no column {missing[0]!r}. The files of a source are read alike: give this file a "
            "source of its own, or leave it out."
        )
    rows = list(islice(read_rows(path), SAMPLED_ROWS))
    if not rows:
        return WHITE_SPACE
    findings.bad_rows += [f"{path}: {value.reason}" for _, _, value in rows if isinstance(value, BadRow)]
    return None


def _check_whole(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    """Read every row of a csv file or JSON array: behind a mistake nothing can be read. Its first and last rows are
    read through the format."""
    if kind_of(path.name) == "csv":
        if next(read_rows(path), None) is None:  # a header at most: it is left out where the source has other files
            return NO_ROWS
        if form.name in ("messages", "turns"):
            return "is csv, whose columns are text and no lists of messages. Write it as jsonl or parquet."
        with open_text(path) as file:
            _, names = next(csv_records(file, path.name), (1, []))
        reason = column_problem(form, names, column_key)
        if reason:
            return reason
    # To its end, keeping the first and the last rows and the bad ones between them.
    rows = read_rows(path, columns=form.read_columns)
    first, last = list(islice(rows, SAMPLED_ROWS)), deque[RawRow](maxlen=SAMPLED_ROWS)
    if not first:
        return NO_ROWS
    reason = _mapping_problem(first, form, column_key)
    if reason:
        return reason
    bad: list[RawRow] = []
    for row in rows:
        last.append(row)
        if isinstance(row[2], BadRow) and len(bad) < MOST_ROWS:
            bad.append(row)
    looked_at = {row[1]: row for row in chain(first, bad, last)}  # a short file's first rows are its last ones too
    return _note_rows(path, list(looked_at.values()), form, findings)


def _check_lines(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    """Check the first and the last lines of a jsonl file."""
    rows = list(islice(read_rows(path), SAMPLED_ROWS))
    values = [value for _, _, value in rows if not isinstance(value, BadRow)]
    if not rows:
        return BLANK_LINES
    if not values and len(rows) > 1:
        return _rows_within(path) or (
            f"is no jsonl: none of its first {len(rows)} lines can be read; line {rows[0][1] + 1} "
            f"{rows[0][2].reason}. Write one JSON object a line."
        )
    if holds_columns([value for value in values if isinstance(value, dict)]):
        return ONE_OBJECT
    reason = _mapping_problem(rows, form, column_key)
    if reason:
        return reason
    # The last line, of which half is missing where a copy was cut off.
    last, item, problem = b"", None, None
    if len(rows) == SAMPLED_ROWS and path.suffix.lower() not in COMPRESSIONS:
        last = _last_line(path).strip(b"\r\n")
    if last:
        with suppress(UntrainableConversation):
            item, problem = read_item(parse_json_line(last), form, form.reader())
    reason = _note_rows(path, rows, form, findings, end_is_blank=not last or is_blank(item))
    if problem and not reason:
        findings.bad_rows.append(f"{row_name(path, count_rows(path) - 1)}: {problem}")
    return reason


def _rows_within(path: Path) -> str | None:
    """Return what to do with a file that is one JSON object around its rows, as exports of chats are; None for
    another."""
    if path.stat().st_size > MOST_OF_AN_OBJECT:
        return None
    # What is no object has no items, and one may be nested without end.
    with open_text(path) as file, suppress(ValueError, AttributeError, RecursionError):
        whole = json.load(file)
        lists = {key: value for key, value in whole.items() if isinstance(value, list) and value}
        key, rows = max(lists.items(), key=lambda item: len(item[1]))
        keys = ", ".join(list(rows[0])[:6]) if isinstance(rows[0], dict) else "no mappings"
        return (
            f"is one JSON object, and its rows are the {len(rows):,} of its key {key!r} (with {keys}). Write these as "
            "a file of their own, talks as messages of a user and an assistant (docs/data.md#exports-of-chats)."
        )
    return None


def _mapping_problem(rows: list[RawRow], form: Format, column_key: str) -> str | None:
    """Return why rows that are mappings have no column of the format's."""
    mappings = [value for _, _, value in rows if isinstance(value, dict)]
    names = list(dict.fromkeys(name for value in mappings for name in value))
    return column_problem(form, names, column_key) if mappings else None


def _note_rows(
    path: Path, rows: list[RawRow], form: Format, findings: Findings, *, end_is_blank: bool = True
) -> str | None:
    """Note what is wrong with single rows; return why the whole file is useless. end_is_blank: of a row behind
    these."""
    bad, left_out, empty = read_through(path, rows, form)
    findings.bad_rows += bad
    if empty and end_is_blank:
        return EMPTY
    if 2 * len(left_out) > len(rows):
        reason = " / ".join(grouped(left_out))
        return (
            f"holds conversations most of which cannot be trained on: {reason}. Correct them, or read them with a "
            "format module:attr."
        )
    findings.untrainable += left_out
    return None


def column_problem(form: Format, found: list[str], column_key: str) -> str | None:
    """Return why the format's columns are none of those found, with the one that is probably meant, or are there
    twice."""
    missing = [column for column in form.required_columns if column not in found]
    for column in form.required_columns:
        if found.count(column) > 1:
            return f"has {found.count(column)} columns {column!r}. Write it again with one of them."
    if not missing:
        return None
    text = f"has no column {missing[0]!r}; found: {', '.join(found) or 'none'}."
    if form.recognised:
        return (
            f"{text} The files of a source are read alike, as its first one shows: give this file a source of its own."
        )
    # What is meant: a column of almost this name, or else one of a usual name.
    near = get_close_matches(missing[0], found, n=1)
    if form.columns:
        return f"{text} Correct columns: did you mean {near[0]}?" if near else f"{text} Correct columns."
    usual = TEXT_COLUMNS if form.kind == "text" else CHAT_COLUMNS
    meant = near or [name for name in found if name.lower() in usual]
    if meant:
        return f"{text} Set {column_key}: {meant[0]}."
    if form.kind == "text":
        return f"{text} Set {column_key} to the one that holds the text."
    return (
        f"{text} Leave {column_key} out, and the columns are recognised by looking; or name them: columns: {{prompt: "
        "COLUMN, response: COLUMN}."
    )


def holds_columns(rows: list[dict]) -> bool:
    """Return whether the only row is a table by columns, each a mapping of row numbers."""
    return len(rows) == 1 and bool(rows[0]) and all(isinstance(v, dict) and "0" in v for v in rows[0].values())


def _last_line(path: Path) -> bytes:
    """Return the last line, with its end if it has one; nothing when it is longer than TAIL_BYTES."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
    start = tail.rstrip(b"\n").rfind(b"\n") + 1
    return tail[start:] if start or size <= TAIL_BYTES else b""
