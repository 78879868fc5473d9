"""A dataset checked before training: its files, their signatures, rows that are no text or conversation."""

import hashlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.process.errors import DataError, readable
from pipeline.process.network import read_again
from pipeline.process.storage import parse_json, sha256_file, sum_of, where_writable, write_bytes
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import CHAT_COLUMNS, TEXT_COLUMNS, TREE_KEYS, Format, UntrainableConversation
from pipeline.sources.raw_rows import (
    COMPRESSIONS,
    BadRow,
    DamagedRow,
    RawRow,
    array_rows,
    arrow_rows,
    count_rows,
    csv_header,
    holds_json,
    is_array,
    jsonl_rows,
    kind_of,
    open_arrow,
    open_bytes,
    open_text,
    parquet_rows,
    parse_json_line,
    read_rows,
    txt_rows,
    wrong_beginning,
    wrong_content,
)

# Single rows that a format cannot read, each named so that an editor or a reader of parquet finds it.

MOST_OF_REASON = 1_000  # characters: a reason lists the row's columns, whose names may be of any length


def row_name(path: Path | str, row: int) -> str:
    """Return `file:line` for files of lines, one-based as editors count; else `file row n`, zero-based as tables
    count."""
    kind = kind_of(Path(path).name)
    if kind == "jsonl" and not (isinstance(path, Path) and is_array(path)):
        return f"{path}:{row + 1}"
    return f"{path} {'piece' if kind == 'txt' else 'row'} {row}"


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
    groups: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        found = re.match(r"(.*?(?::\d+| (?:row|piece) \d+)): (.*)", line, re.DOTALL)
        place, reason = found.groups() if found else ("", line)
        groups.setdefault(re.sub(r"\d+", "#", reason), []).append((place, reason))
    return [
        f"{len(group):,} rows: {group[0][1]}" + (f" (first: {group[0][0]})" if group[0][0] else "")
        if len(group) > 1
        else ": ".join(part for part in group[0] if part)
        for group in groups.values()
    ]


# Facts about files, kept under the cache by path, size and times of change: a second start reads no byte.

SPARE_LINES = 1000  # that a file of facts may have beyond four a file before it is written anew


@dataclass
class Facts:
    """sha256 and size of the file as it is on disk; rows: as `raw_rows` counts them, None until asked for.

    checked: keys of the readings that were found sound.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str = ""
    rows: int | None = None
    checked: list[str] = field(default_factory=list)

    def stat(self) -> tuple[int, int, int]:
        return self.size, self.mtime_ns, self.ctime_ns


class FactsOfFiles:
    """Facts by file, with their store in `folder`, which threads and processes may share. follows: another one looks
    first."""

    def __init__(self, folder: Path, *, follows: bool = False):
        self.folder, self.follows = folder, follows
        self._known: dict[Path, dict[str, Facts]] = {}  # store -> path -> facts
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return partial(type(self), follows=True), (self.folder,)

    def of(self, path: Path) -> Facts:
        """Return what is known and still true of the file; its sha256 at least, computed now if need be."""
        status = os.stat(path)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        facts = self._facts(path)
        if self.follows and (facts is None or facts.stat() != now):
            with self._lock:
                self._known.pop(self._store(path), None)
            facts = self._facts(path)
        if facts is None or facts.stat() != now:
            facts = Facts(str(path), *now, sha256=sha256_file(path))
            self.keep(facts)
        return facts

    def rows(self, path: Path) -> int:
        """Return how many rows the file has; blank lines of a jsonl count."""
        facts = self.of(path)
        if facts.rows is None:
            facts.rows = count_rows(path)
            self.keep(facts)
        return facts.rows

    def keep(self, facts: Facts) -> None:
        value = asdict(facts)
        store = self._store(Path(facts.path))
        with self._lock:
            self._of_store(store)[facts.path] = facts
            with where_writable():
                store.parent.mkdir(parents=True, exist_ok=True)
                with open(store, "ab") as file:
                    file.write(_line(value))

    def head_is_known(self, reading: str) -> bool:
        """Return whether a file that is not fetched yet began and ended as it should when it was looked at."""
        return self._head(reading).exists()

    def keep_head(self, reading: str) -> None:
        with where_writable():
            self._head(reading).parent.mkdir(parents=True, exist_ok=True)
            self._head(reading).touch()

    def _head(self, reading: str) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(reading)).hexdigest()[:24]}.head"

    def _store(self, path: Path) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:24]}.jsonl"

    def _facts(self, path: Path) -> Facts | None:
        with self._lock:
            return self._of_store(self._store(path)).get(str(path))

    def _of_store(self, store: Path) -> dict[str, Facts]:
        if store not in self._known:
            lines = store.read_bytes().splitlines() if store.exists() else []
            known = {facts.path: facts for line in lines if (facts := _facts_in(line))}
            # Of a line that another process adds meanwhile the fact is found out again.
            if len(lines) > 4 * len(known) + SPARE_LINES:
                with where_writable():
                    write_bytes(store, b"".join(_line(asdict(facts)) for facts in known.values()))
            self._known[store] = known
        return self._known[store]


def _line(value: dict) -> bytes:
    # ASCII: a path that is not UTF-8 stays what it is. The line end before it closes a line that a crash has torn.
    return b"\n" + json.dumps({**value, "sum": sum_of(value)[:16]}).encode() + b"\n"


def _facts_in(line: bytes) -> Facts | None:
    """Return the facts of a line as it was written; a damaged or a torn one has none."""
    try:
        value = parse_json(line)
        own_sum = value.pop("sum", None)
        return Facts(**value) if own_sum == sum_of(value)[:16] else None
    except (ValueError, TypeError):
        return None


# Every planned file by its content, before anything is trained: what cannot be read is reported now, with its fix.

HEAD_BYTES = 4096
SAMPLED_ROWS = 64  # Read at the file's beginning; of its end as many from parquet, the last line from jsonl.
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


def verify(path: Path, form: Format, *, column_key: str) -> Findings:
    """Look at the file's first bytes, its footer or last line, and its first and last rows through the format.

    column_key: the recipe's key that names the column, for the cure.
    """
    findings = Findings()
    try:
        reason = _verify(path, form, column_key, findings)
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


def verified(file: SourceFile, form: Format, facts_of_files: FactsOfFiles, *, column_key: str) -> Findings:
    """Look into one local file and note its size and sha256; skipped when this very content was found sound before."""
    path = file.local_path()
    try:
        facts = read_again(lambda: facts_of_files.of(path), path=path)
    except PermissionError:
        return Findings(problems=[f"{path} may not be read by this user. Change its permissions (chmod u+r)."])
    if file.sha256 and not file.sha256.startswith("git:") and file.sha256 != facts.sha256:
        return Findings(
            problems=[
                (
                    f"{path} has the sha256 {facts.sha256[:12]}, and the Hub lists {file.sha256[:12]}: it is damaged. "
                    "Delete it and run the same command again."
                )
            ]
        )
    file.sha256, file.bytes = file.sha256 or facts.sha256, facts.size
    file.mtime_ns, file.ctime_ns = facts.mtime_ns, facts.ctime_ns
    identity = form.identity()
    if identity in facts.checked:
        return Findings()
    findings = verify(path, form, column_key=column_key)
    if not findings.problems and not findings.bad_rows:
        facts.checked.append(identity)
        facts_of_files.keep(facts)
    return findings


def _verify(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    kind = kind_of(path.name)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        return NO_BYTES
    reason = wrong_beginning(path.name, head)
    if reason:
        return reason
    compressed = path.suffix.lower() in COMPRESSIONS
    if kind == "parquet":
        return _verify_parquet(path, form, column_key, findings)
    if kind == "arrow":
        return _verify_arrow(path, form, column_key, findings)
    if compressed:
        reason = _verify_compressed(path)
        if reason:
            return reason
    if kind == "txt":
        return _verify_txt(path, form, findings)
    if kind == "csv":
        return _verify_csv(path, form, column_key, findings)
    if is_array(path):
        return _verify_array(path, form, column_key, findings)
    return _verify_jsonl(path, form, column_key, findings, compressed=compressed)


def _verify_compressed(path: Path) -> str | None:
    """Decompress to the end: only that shows whether the end is there."""
    import zlib

    try:
        with open_bytes(path) as file:
            first = file.read(HEAD_BYTES)
            if not first:
                return NOTHING_INSIDE
            reason = wrong_content(first)
            if reason:
                return f"holds something else once decompressed: it {reason}"
            while file.read(TAIL_BYTES):
                pass
    except (EOFError, zlib.error, OSError) as error:
        return f"is truncated or damaged: {error}. Download it again."
    return None


def _verify_parquet(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - 4))
        if size < 12 or file.read(4) != b"PAR1":
            return (
                f"is truncated: a parquet file ends with its footer, and this one breaks off after {size:,} bytes. "
                "Download it again."
            )
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        return f"has a damaged footer: {error}. Download it again."
    if not metadata.num_rows:
        return NO_ROWS
    chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
    if any(chunk_start(chunk) + chunk.total_compressed_size > size for chunk in chunks):
        return "is truncated: its footer names data beyond its end. Download it again."
    if reason := _schema_problem(schema, form, column_key):
        return reason
    columns = form.read_columns
    rows = list(islice(parquet_rows(path, columns=columns), SAMPLED_ROWS))
    if metadata.num_rows > SAMPLED_ROWS:
        rows += parquet_rows(path, first_row=max(SAMPLED_ROWS, metadata.num_rows - SAMPLED_ROWS), columns=columns)
    damaged = dict.fromkeys(value.reason for _, _, value in rows if isinstance(value, DamagedRow))
    if damaged:
        return f"is damaged: {', '.join(damaged)}. Download it again."
    return _note_rows(path, rows, form, findings)


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


def _verify_arrow(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    """Read every batch: neither a stream nor a file says anywhere what should be in it."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as file, open_arrow(file) as reader:
            schema = reader.schema
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        return f"is truncated or damaged: {error}. Write or download it again."
    if reason := _schema_problem(schema, form, column_key):
        return reason
    count = count_rows(path)
    if not count:
        return NO_ROWS
    columns = form.read_columns
    rows = list(islice(arrow_rows(path, columns=columns), SAMPLED_ROWS))
    rows += arrow_rows(path, first_row=max(SAMPLED_ROWS, count - SAMPLED_ROWS), columns=columns)
    return _note_rows(path, rows, form, findings)


def _schema_problem(schema: Any, form: Format, column_key: str) -> str | None:
    if reason := _column_twice(form, schema.names) or column_problem(form, schema.names, column_key):
        return reason
    problems = (_type_problem(form, column, schema.field(column).type) for column in form.required_columns)
    return next(filter(None, problems), None)


def _column_twice(form: Format, found: list[str]) -> str | None:
    twice = next((column for column in form.required_columns if found.count(column) > 1), None)
    if twice:
        return (
            f"has {found.count(twice)} columns {twice!r}, and which one is meant cannot be known. Write it again with "
            "one."
        )
    return None


def chunk_start(chunk: Any) -> int:
    """Return the offset of a column chunk's first byte: its dictionary page's where it has one, else its first data
    page's.

    Some writers leave the dictionary's offset 0 where there is none; no page can begin before the magic bytes end.
    """
    dictionary = chunk.dictionary_page_offset
    return min(dictionary, chunk.data_page_offset) if dictionary and dictionary >= 4 else chunk.data_page_offset


def _type_problem(form: Format, column: str, found: Any) -> str | None:
    import pyarrow
    import pyarrow.types as types

    if types.is_dictionary(found):
        found = found.value_type
    if isinstance(found, pyarrow.BaseExtensionType) and holds_json(found):
        return None  # Only its rows show what it is.
    is_text = types.is_string(found) or types.is_large_string(found) or types.is_string_view(found)
    is_list = types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    is_list = is_list or types.is_list_view(found) or types.is_large_list_view(found)
    if form.name == "text":
        if is_text:
            return None
        return (
            f"has a column {column!r} of type {found}, not text. Name a column of text, or write a format module:attr "
            "that makes text of it."
        )
    if column == form.column:
        if is_list or (types.is_struct(found) and {one.name for one in found} >= TREE_KEYS):
            return None
        return (
            f"has a column {column!r} of type {found}, not a list of messages. Name the right column, or write a "
            "format module:attr."
        )
    if is_text or is_list:
        return None
    return (
        f"has a column {column!r} of type {found}, neither text nor a list of messages. Name another in columns, or "
        "write a format module:attr."
    )


def column_problem(form: Format, found: list[str], column_key: str) -> str | None:
    """Return why the format's columns are none of those found, with the one that is probably meant."""
    missing = [column for column in form.required_columns if column not in found]
    if not missing:
        return None
    text = f"has no column {missing[0]!r}; found: {', '.join(found) or 'none'}."
    if form.recognised:
        return (
            f"{text} The files of a source are read alike, as its first one shows: give this file a source of its own."
        )
    near = get_close_matches(missing[0], found, n=1)
    if form.columns:
        return f"{text} Correct columns{f': did you mean {near[0]}?' if near else '.'}"
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


def _verify_csv(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    with open_text(path) as file:
        head = file.read(2**16)
    if "\0" in head:
        return NO_TEXT
    with open_text(path) as file:
        names = csv_header(file, str(path))
    if reason := csv_problem(names, form, column_key):
        return reason
    return _verify_whole(path, form, findings)


def csv_problem(names: list[str], form: Format, column_key: str) -> str | None:
    """Return why a csv file with this header has nothing for the format."""
    if form.name in ("messages", "turns"):
        return "is csv, whose columns are text and no lists of messages. Write it as jsonl or parquet."
    return _column_twice(form, names) or column_problem(form, names, column_key)


def _verify_array(path: Path, form: Format, column_key: str, findings: Findings) -> str | None:
    rows = list(islice(array_rows(path), SAMPLED_ROWS))
    if not rows:
        return NO_ROWS
    return array_problem(rows, form, column_key) or _verify_whole(path, form, findings)


def array_problem(rows: list[RawRow], form: Format, column_key: str) -> str | None:
    """Return why JSON that begins with these rows has no column of the format's."""
    mappings = [value for _, _, value in rows if isinstance(value, dict)]
    names = list(dict.fromkeys(name for value in mappings for name in value))
    return column_problem(form, names, column_key) if mappings else None


def _verify_whole(path: Path, form: Format, findings: Findings) -> str | None:
    """Read every row of a file that cannot be read on behind a mistake; its first and last rows through the format."""
    rows = read_rows(path, columns=form.read_columns)
    looked_at, last = list(islice(rows, SAMPLED_ROWS)), deque[RawRow](maxlen=SAMPLED_ROWS)
    if not looked_at:
        return NO_ROWS
    for row in rows:
        if len(last) == SAMPLED_ROWS and isinstance(last[0][2], BadRow) and len(looked_at) < MOST_ROWS:
            looked_at.append(last[0])
        last.append(row)
    looked_at += last
    return _note_rows(path, looked_at, form, findings)


def _verify_jsonl(path: Path, form: Format, column_key: str, findings: Findings, *, compressed: bool) -> str | None:
    rows = list(islice(jsonl_rows(path), SAMPLED_ROWS))
    if reason := jsonl_problem(rows, form, column_key):
        return reason
    last = None if compressed or len(rows) < SAMPLED_ROWS else _last_line(path)
    item, problem = None, None
    if last and not last.isspace():
        with suppress(UntrainableConversation):
            item, problem = read_item(parse_json_line(last), form, form.reader())
    if reason := _note_rows(path, rows, form, findings, end_is_blank=not last or is_blank(item)):
        return reason
    if last and problem:
        findings.bad_rows.append(f"{row_name(path, count_rows(path) - 1)}: {problem}")
    return None


def jsonl_problem(rows: list[RawRow], form: Format, column_key: str) -> str | None:
    """Return why a file with these first rows is no jsonl with the format's column."""
    if not rows:
        return BLANK_LINES
    values = [value for _, _, value in rows if not isinstance(value, BadRow)]
    if not values and len(rows) > 1:
        return (
            f"is no jsonl: none of its first {len(rows)} lines can be read; line {rows[0][1] + 1} "
            f"{rows[0][2].reason}. Write one JSON object a line."
        )
    if holds_columns([value for value in values if isinstance(value, dict)]):
        return ONE_OBJECT
    return array_problem(rows, form, column_key)


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


def _verify_txt(path: Path, form: Format, findings: Findings) -> str | None:
    if missing := [column for column in form.required_columns if column != "text"]:
        return (
            f"is plain text and has no column {missing[0]!r}. The files of a source are read alike: give this file a "
            "source of its own, or leave it out."
        )
    with open_bytes(path) as file:
        head = file.read(2**16)
    if b"\0" in head:
        return NO_TEXT
    rows = list(islice(txt_rows(path), SAMPLED_ROWS))
    if not rows:
        return WHITE_SPACE
    findings.bad_rows += [f"{path}: {value.reason}" for _, _, value in rows if isinstance(value, BadRow)]
    return None
