"""Rows of one local file, from any block on, in bounded memory.

A block is BLOCK_ROWS consecutive rows. parquet, arrow, csv: rows of the file, whatever its row groups, batches and
lines. jsonl: lines, blank ones counted so that row + 1 is the line number an editor shows; a file that is one JSON
array: its elements. txt (and md): pieces, cut at a line `<|endoftext|>`, else at the first blank line after
PIECE_CHARS, else at a line end after twice as many.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

from pipeline.process.errors import DataError
from pipeline.process.network import may_pass

MAGIC = {
    b"PAR1": "a parquet file",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstandard data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"BZh": "bzip2 data",
    b"ARROW1": "an Arrow file",
    b"%PDF": "a PDF",
}
CURES = {
    "UTF-16 text": "Convert it: iconv -f UTF-16 -t UTF-8.",
    "gzip data": "Give it the ending .gz.",
    "zstandard data": "Give it the ending .zst.",
    "a parquet file": "Give it the ending .parquet.",
    "an Arrow file": "Give it the ending .arrow.",
    "a zip archive": "Unpack it.",
    "bzip2 data": "Unpack it.",
}


ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # an IPC file, an IPC stream
BEGINNINGS = {
    ".parquet": (b"PAR1",), ".gz": (b"\x1f\x8b",), ".zst": (b"\x28\xb5\x2f\xfd",),
    ".arrow": ARROW, ".feather": ARROW, ".ipc": ARROW,
}  # fmt: skip


def check_magic_bytes(name: str, head: bytes) -> str | None:
    """Return why a file of that name cannot begin like this, with a cure; None when it may be what its ending says."""
    suffix = PurePath(name).suffix.lower()
    magic = BEGINNINGS.get(suffix, ())
    reason = check_content(head, expected=magic)
    if reason is None and magic and not head.startswith(magic):
        return (
            f"ends in {suffix} and is no such file (it begins with {head[:8]!r}). Download it again or correct its "
            "ending."
        )
    return reason


def check_content(head: bytes, *, expected: tuple[bytes, ...] = ()) -> str | None:
    """Return what the first bytes betray, with a cure, as `is ... . Do ...`; None when they look like what they should
    be.

    expected: the magic bytes, one of which the file's own ending promises.
    """
    if not head.strip(b"\0"):
        return (
            "holds zero bytes where its content should be, as an unfinished copy or a crash leaves it. Download or "
            "write it again."
        )
    # Pages and pointers may begin with a byte order mark or white space.
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a git-lfs pointer, not the file itself. Run `git lfs pull` in its repository, or download it again."
    if start[:5].lower() == b"<?xml" or (start.startswith(b"<") and b"<Error>" in start[:512]):
        code = re.search(rb"<(?:Code|code|title|Message)>\s*([^<]{1,80})", start)
        return f"looks like an XML error page{_shown(code)}, saved by a failed download. Download it again."
    if re.match(rb"<(!doctype html|html|head|body)\b", start[:64].lower()):
        title = re.search(rb"<title[^>]*>\s*([^<]{1,80})", start, re.IGNORECASE)
        return f"looks like an HTML page{_shown(title)}, saved by a failed download. Download it again."
    for magic, name in MAGIC.items():
        if head.startswith(magic) and magic not in expected:
            return (
                f"is {name}, whatever its ending says. {CURES.get(name, 'Convert it to parquet, jsonl, csv or txt.')}"
            )
    return None


def _shown(match: re.Match[bytes] | None) -> str:
    return f" ({match.group(1).decode('utf-8', 'replace').strip()})" if match else ""


BLOCK_ROWS = 1024  # Rows of a block: the packing policy that is the default packs within this many documents.


@dataclass(frozen=True, slots=True)
class Document:
    """One text. file: index in the source's order; row: zero-based in the file (a line of jsonl, a piece of txt)."""

    text: str
    file: int
    row_group: int
    row: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat of checked messages.

    messages: dicts with role, content and, where given, tool_calls, name, tool_call_id; an assistant's also with its
    reasoning, under the name that the data have, and `weight: 0` where it is not trained (formats.plain_messages).
    tools: definitions, as apply_chat_template takes them.
    """

    messages: list[dict]
    file: int
    row_group: int
    row: int
    tools: list[dict] | None = None


@dataclass(slots=True)
class Block:
    """Up to BLOCK_ROWS consecutive rows of one file.

    items: what the rows gave, in order. bad_rows: one line `file:row: reason` for each row that gave nothing because
    it is damaged. empty_rows: how many held no text at all, or a conversation that nothing can be learned from, which
    is no damage.
    """

    items: list = field(default_factory=list)
    file: int = 0
    index: int = 0
    bad_rows: list[str] = field(default_factory=list)
    empty_rows: int = 0


KINDS = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow", ".jsonl": "jsonl", ".json": "jsonl",
    ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".txt": "txt", ".md": "txt",
}  # fmt: skip
# Source code is text, read as .txt is; in a folder only where there is nothing else to read (patterns.py).
CODE = (
    ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".java", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".rs", ".rb",
    ".php", ".swift", ".kt", ".scala", ".sh", ".sql", ".r", ".jl", ".lua", ".pl", ".hs", ".ml", ".ex", ".erl", ".clj",
    ".lisp", ".vim", ".css", ".tex", ".rst",
)  # fmt: skip
KINDS |= dict.fromkeys(CODE, "txt")
COMPRESSIONS = (".gz", ".zst")
COMPRESS_THEMSELVES = ("parquet", "arrow")
CHUNK_CHARS = 2**20  # of a JSON file: the first show whether it is an array
WHITE, OPENING, CLOSING = re.compile(r"[ \t\r\n]*"), re.compile(r"\s*\[\s*(\]?)"), re.compile(r'[\]}",]')
LINE_BYTES = 256 * 2**20  # A longer line is no row but a file without line ends.
PIECE_CHARS = 16_384
SEPARATOR = "<|endoftext|>"
BOM = b"\xef\xbb\xbf"
# Stands for a carriage return that ends no record: pandas does not quote it, and Python's csv refuses it.
RETURN = "\udc0d"


class BadRow:
    """A row that cannot be read, and why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str):
        self.reason = reason


class DamagedRow(BadRow):
    """A row of a part of the file that cannot be decoded at all."""

    __slots__ = ()


class TableRow(dict):
    """A row of a file of columns. json: those whose type says that they hold JSON."""

    json: Collection[str] = ()

    def may_invent(self, column: str | None) -> bool:
        """Return whether a null in a mapping of the column may stand for a key that the mapping does not have: Arrow
        gives each of them the keys of all. `datasets` makes JSON where rows differ in their keys, and then each has
        its own."""
        return column not in self.json


RawRow = tuple[int, int, Any]  # row group, row, value or BadRow


def kind_of(name: str) -> str | None:
    """Return parquet, arrow, jsonl, csv or txt by the file's name, compressed or not; None when it is none of
    these."""
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        kind = KINDS.get(path.with_suffix("").suffix)
        return None if kind in COMPRESS_THEMSELVES else kind
    return KINDS.get(path.suffix)


def is_data(name: str) -> bool:
    """Return whether a file found in a folder is data: README.md describes a dataset, and `datasets` leaves it out
    too; code reads or made it."""
    is_note = is_code(name) or PurePath(name).name.lower() == "readme.md"
    return kind_of(name) is not None and not is_note


def is_code(name: str) -> bool:
    """Return whether the file's name is that of source code."""
    return PurePath(name.lower()).suffix in CODE


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file's content, decompressed by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield file  # type: ignore[misc]
    elif suffix == ".zst":
        import pyarrow

        with pyarrow.input_stream(str(path), compression="zstd") as stream, io.BufferedReader(stream) as file:
            yield file
    else:
        with open(path, "rb", buffering=2**20) as file:
            yield file


@contextmanager
def open_text(path: Path, *, newline: str | None = "\n") -> Iterator[IO[str]]:
    """Yield the file's characters, its lines cut at line feeds alone. Bytes that are not UTF-8 become lone
    surrogates."""
    with (
        open_bytes(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file,
    ):
        yield file


def read_blocks(path: Path, *, block: int = 0, columns: list[str] | None = None) -> Iterator[list[RawRow]]:
    """Yield the file's rows by blocks, beginning with block number `block`.

    Raises DataError where a file of json or csv or arrow cannot be read any further: its remaining rows are not known.
    """
    rows = read_rows(path, first_row=block * BLOCK_ROWS, columns=columns)
    index = block
    batch: list[RawRow] = []
    for row in rows:
        # A block may have no rows, since blank lines are counted.
        while row[1] // BLOCK_ROWS > index:
            yield batch
            index, batch = index + 1, []
        batch.append(row)
    if batch:
        yield batch


def read_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Return the file's rows from one on."""
    kind = kind_of(path.name)
    if kind == "jsonl" and is_array(path):
        kind = "array"
    readers = {
        "parquet": parquet_rows, "arrow": arrow_rows, "jsonl": jsonl_rows, "array": array_rows, "csv": csv_rows,
        "txt": txt_rows,
    }  # fmt: skip
    return readers[kind or "unknown"](path, first_row=first_row, columns=columns)


def count_rows(path: Path) -> int:
    """Return how many rows the file has, bad ones and blank lines of jsonl included."""
    kind = kind_of(path.name)
    if kind == "parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    if kind == "arrow":
        return sum(batch.num_rows for _, batch in _arrow_batches(path))
    if kind != "jsonl" or is_array(path):
        return sum(1 for _ in read_rows(path))
    lines, last = 0, b"\n"
    with open_bytes(path) as file:
        while chunk := file.read(2**20):
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines if last == b"\n" else lines + 1  # the last line may have no end


def parquet_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield rows of a parquet file. A row group that cannot be decoded makes each of its remaining rows a BadRow."""
    import pyarrow
    import pyarrow.parquet

    # Without a buffer a column is held as a whole row group has it, which for pandas is a file of a million rows.
    with pyarrow.parquet.ParquetFile(
        path, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True
    ) as file:
        start = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            row, end = start, start + count
            start = end
            if end <= first_row:
                continue
            try:
                for batch in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=columns):
                    skip = min(batch.num_rows, max(0, first_row - row))
                    row += skip
                    for value in _values(batch.slice(skip)):
                        yield group, row, value
                        row += 1
            except (OSError, ValueError, pyarrow.ArrowException) as error:
                if may_pass(error):
                    raise  # the disk's, not the file's
                # What came before the damage is kept, and each row behind it in the group is named.
                damage = DamagedRow(f"row group {group} is damaged ({_short(error)})")
                for damaged in range(max(row, first_row), end):
                    yield group, damaged, damage


def _values(batch: Any) -> list[Any]:
    """Return the rows of a batch. parquet does not promise that its texts are UTF-8: then the rows are taken one by
    one."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_value(batch.slice(row, 1)) for row in range(batch.num_rows)]
    kinds = {column.name: column.type for column in batch.schema if holds_json(column.type)}
    return [_table_row(row, kinds) for row in rows]


def _value(one: Any) -> Any:
    try:
        return one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.start} of the text is 0x{error.object[error.start]:02x})")


def _table_row(row: dict | BadRow, kinds: dict[str, Any]) -> Any:
    """Return the row, its JSON read. kinds: Arrow types of its columns that hold JSON."""
    if isinstance(row, BadRow):
        return row
    made = TableRow(row)
    if kinds:
        made.json = kinds
    for name, kind in kinds.items():
        try:
            made[name] = _with_json(row[name], kind)
        except (ValueError, RecursionError):
            return BadRow(f"is no JSON in the column {name!r}, whose type says that it is")
    return made


def holds_json(kind: Any) -> bool:
    """Return whether an Arrow type is the extension arrow.json (a Json feature of `datasets`), or holds it."""
    from pyarrow.types import is_map

    if getattr(kind, "extension_name", "") == "arrow.json":
        return True
    return not is_map(kind) and any(holds_json(kind.field(number).type) for number in range(kind.num_fields))


def _with_json(value: Any, kind: Any) -> Any:
    """Return the value, the texts in it that are JSON by their type as what they stand for."""
    if value is None or not holds_json(kind):
        return value
    if isinstance(value, str):
        return json.loads(value)
    if isinstance(value, dict):
        return {field.name: _with_json(value[field.name], field.type) for field in kind}
    return [_with_json(item, kind.value_type) for item in value]


def arrow_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield rows of an Arrow IPC file or stream; the group of a row is its record batch. Raises DataError for a
    damaged one."""
    start = 0
    for number, batch in _arrow_batches(path):
        row, end = max(start, first_row), start + batch.num_rows
        wanted = batch.schema.names
        if columns:
            wanted = [name for name in columns if name in wanted]
        for at in range(row - start, batch.num_rows, BLOCK_ROWS):
            for value in _values(batch.select(wanted).slice(at, BLOCK_ROWS)):
                yield number, row, value
                row += 1
        start = end


def _arrow_batches(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, record batch), each valid: an offset that points beyond its buffer would end the process."""
    import pyarrow
    import pyarrow.ipc

    number = 0
    try:
        with pyarrow.OSFile(str(path)) as file, open_arrow(file) as reader:
            for batch in _batches_of(reader):
                for column in batch.columns:
                    _must_be_valid(column)
                yield number, batch
                number += 1
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if may_pass(error):
            raise
        raise DataError(
            f"{path} is truncated or damaged: record batch {number} cannot be read ({_short(error)}). Write or "
            "download it again."
        ) from error


def _must_be_valid(column: Any) -> None:
    """Raise ArrowInvalid for a column whose offsets or indices point anywhere; a text that is not UTF-8 is its row's
    alone."""
    import pyarrow
    import pyarrow.types as types

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        # Of plain texts the offsets are looked at first. Anything else that holds such a text was not looked at to its
        # end.
        plain = types.is_string(column.type) or types.is_large_string(column.type)
        if not plain or "UTF8" not in str(error):
            raise


def open_arrow(file: Any) -> Any:
    """Return pyarrow's reader of an Arrow IPC file or, as `datasets` writes it, stream."""
    import pyarrow.ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    return pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)


def _batches_of(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def table_schema(path: Path) -> Any:
    """Return the Arrow schema of a parquet or arrow file."""
    import pyarrow
    import pyarrow.parquet

    if kind_of(path.name) == "parquet":
        return pyarrow.parquet.read_schema(path)
    with pyarrow.OSFile(str(path)) as file, open_arrow(file) as reader:
        return reader.schema


def csv_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield records of a csv file as {name: text}, the names from its first record. Raises DataError where a quote is
    wrong.

    Python's csv and not pyarrow's, which makes numbers and nulls of "007" and "NA" by what the first block holds, and
    ends at the first record with a field too many or with a carriage return in it.
    """
    with open_text(path) as file:
        records = csv_records(file, str(path))
        _, names = next(records, (1, []))
        for row, (line, record) in enumerate(records):
            if row >= first_row:
                yield row // BLOCK_ROWS, row, _csv_row(record, names, columns, line)


def _csv_row(record: list[str], names: list[str], columns: list[str] | None, line: int) -> Any:
    if len(record) != len(names):
        return BadRow(
            f"has {len(record)} fields, and the header has {len(names)} (line {line}): a text with a separator or a "
            "line end in it must stand in quotes"
        )
    value = {name: text for name, text in zip(names, record, strict=True) if not columns or name in columns}
    if any(lone_surrogate(text) is not None for text in value.values()):
        return BadRow(f"is not UTF-8 (line {line})")
    return value


def csv_records(file: IO[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line it begins in, fields) of each record that is no blank line."""
    csv.field_size_limit(max(csv.field_size_limit(), LINE_BYTES))  # by default less than a long document
    first = file.readline(LINE_BYTES)
    end = "\r\n" if first.endswith("\r\n") else "\n"
    # Line by line, so that a record's first line is known and a file without line ends does not fill the memory.
    rest = iter(lambda: file.readline(LINE_BYTES), "")
    lines = (_without_returns(line, end) for line in chain([first], rest))
    reader = csv.reader(lines, delimiter=_csv_delimiter(name, first), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            reason = "a quote is never closed" if "unexpected end" in str(error) else str(error)
            raise DataError(
                f"{name}:{line}: the csv cannot be read from this line on ({reason}). Write it again with each text "
                "in quotes and quotes in it doubled, or as parquet or jsonl."
            ) from error
        if record is None:
            return
        if record:
            yield line, [text.replace(RETURN, "\r") for text in record]


def _without_returns(line: str, end: str) -> str:
    """Return the line with RETURN for each carriage return that does not end it."""
    if "\r" not in line:
        return line
    text = line.removesuffix(end)
    return text.replace("\r", RETURN) + line[len(text) :]


def _csv_delimiter(name: str, header: str) -> str:
    """Return what separates the fields: a tab in .tsv; else a comma, unless the header has none and has a semicolon or
    a tab."""
    if ".tsv" in PurePath(name.lower()).suffixes:
        return "\t"
    for mark in ",;\t":
        if mark in header:
            return mark
    return ","


def is_array(path: Path) -> bool:
    """Return whether a JSON file is one array of rows, not one row a line."""
    with open_text(path) as file:
        return begins_array(file.read(CHUNK_CHARS))


def begins_array(text: str) -> bool:
    """Return whether JSON that begins so is an array of mappings or of lists. A list of messages, or of texts, is the
    row of a line."""
    text = text.lstrip()
    if not text.startswith("["):
        return False
    # One list in each line, as of messages, is jsonl.
    line, _, rest = text.partition("\n")
    if rest.lstrip().startswith("[") and line.rstrip().endswith("]"):
        return False
    try:
        first, _ = json.JSONDecoder().raw_decode(text, WHITE.match(text, 1).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return True
    if isinstance(first, dict):
        return not ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys())
    return isinstance(first, list)


def array_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield elements of a file that is one JSON array, a chunk of it in memory at a time. Raises DataError where it is
    no array any more."""
    decode, row, line = json.JSONDecoder().raw_decode, 0, 1
    with open_text(path) as file:
        text = file.read(CHUNK_CHARS)
        start = OPENING.match(text)
        at, mark = start.end(), start[1]  # type: ignore[index, union-attr]
        while mark != "]":
            at = WHITE.match(text, at).end()  # type: ignore[union-attr]
            # The element, then the mark behind it: a comma, or the bracket that closes the array.
            try:
                value, end = decode(text, at)
                place, bad_row = WHITE.match(text, end).end(), row + 1  # type: ignore[union-attr]
                mark, reason = text[place : place + 1], "a comma is missing before it"
            except (ValueError, RecursionError) as error:
                place, bad_row = getattr(error, "pos", at), row
                mark, reason = "", getattr(error, "msg", str(error))
                if row and text[place : place + 1] == "]":
                    reason += " behind the comma"
            if mark not in (",", "]"):
                # The chunk may have cut it. As much again: a long element is decoded a few times, not once a chunk.
                line += text.count("\n", 0, at)
                text, place, at = text[at:], place - at, 0
                held = len(text)
                if held < LINE_BYTES:
                    text += file.read(max(CHUNK_CHARS, held))
                if len(text) == held:
                    raise _broken_array(path, text, bad_row, line, place, reason)
                continue
            if row >= first_row:
                if lone_surrogate(text[at:end]) is not None:
                    value = BadRow("is not UTF-8")
                yield row // BLOCK_ROWS, row, value
            row, at = row + 1, place + 1
        text += file.read(CHUNK_CHARS)
        if not WHITE.fullmatch(text, at):
            raise _broken_array(path, text, row, line, at, "something follows the closing bracket")


def _broken_array(path: Path, text: str, row: int, line: int, at: int, reason: str) -> DataError:
    """Return the error for a place of the text, which begins in that line."""
    if reason.startswith("Unterminated string") or not CLOSING.search(text, at):
        reason = "the file ends before the closing bracket: it was probably cut off"
    return DataError(
        f"{path}:{line + text.count(chr(10), 0, at)}: the JSON array cannot be read from its row {row} on ({reason}). "
        "Write or download it again."
    )


def lone_surrogate(text: str) -> int | None:
    """Return the place of the first lone surrogate, as `open_text` makes them of bytes that are no UTF-8; None without
    one."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def jsonl_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield objects of a jsonl file, one a line; blank lines are passed over."""
    with open_bytes(path) as file:
        row = -1
        while line := file.readline(LINE_BYTES):
            row += 1
            if len(line) == LINE_BYTES and not line.endswith(b"\n"):
                yield row // BLOCK_ROWS, row, BadRow(f"the line is longer than {LINE_BYTES // 2**20} MiB")
                while line and not line.endswith(b"\n"):  # to its end
                    line = file.readline(LINE_BYTES)
                continue
            if row < first_row:
                continue
            if row == 0 and line.startswith(BOM):
                line = line[len(BOM) :]
            if line.isspace():
                continue
            yield row // BLOCK_ROWS, row, parse_json_line(line)


def parse_json_line(line: bytes) -> Any:
    """Return the value of one line, or a BadRow that says what is wrong with it."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.start} of the line is 0x{error.object[error.start]:02x})")
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " and the file ends there without a line end: it was probably cut off"
        return BadRow(f"is not JSON ({error.msg} at column {error.colno}){cut}")
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        return BadRow("is JSON with a number of too many digits")
    except RecursionError:
        return BadRow("is JSON nested too deeply")


def txt_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Yield pieces of a text file as {"text": piece}. Bytes that are not UTF-8 make the piece a BadRow."""
    with open_text(path, newline=None) as file:
        row, line_number, first_line, length, lines = 0, 0, 1, 0, []
        while True:
            line = file.readline(PIECE_CHARS)
            if line.endswith("\n"):  # a longer line comes in parts
                line_number += 1
            separator = line.rstrip("\n") == SEPARATOR
            if line and not separator:
                lines.append(line)
                length += len(line)
            # A piece ends at a separator, at the first blank line when it is long enough, or anywhere when it is twice
            # as long.
            blank = length >= PIECE_CHARS and line.isspace()
            if lines and (not line or separator or blank or length >= 2 * PIECE_CHARS):
                piece = "".join(lines).strip("\n")
                if piece.strip():
                    if row >= first_row:
                        yield row // BLOCK_ROWS, row, _piece(piece, first_line)
                    row += 1
                lines, length, first_line = [], 0, line_number + 1
            if not line:
                return


def _piece(piece: str, first_line: int) -> Any:
    if (at := lone_surrogate(piece)) is not None:
        return BadRow(f"is not UTF-8 (line {first_line + piece.count(chr(10), 0, at)})")
    return {"text": piece}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."


SAMPLED_FOOTERS = 8  # Parquet files whose footers are read; a footer of 1,000 row groups takes tens of milliseconds.


def text_bytes(source: Any) -> int | None:
    """Return bytes of the source's text, to a few per cent: of jsonl also its keys and quotes, of many parquet files
    as some of them have it. None where only reading would tell: compressed files, arrow, and parquet that is not
    fetched yet."""
    source, passes = source.once, source.passes
    parquet = []
    for file in source.files:
        kind = kind_of(file.label)
        if kind == "parquet":
            parquet.append(file)
        if kind == "arrow" or file.label.lower().endswith(COMPRESSIONS) or (kind == "parquet" and file.path is None):
            return None
    # 1. Footers of some parquet files, and by them the share of text in the bytes of all.
    sample = parquet[:: max(1, -(-len(parquet) // SAMPLED_FOOTERS))]
    known = {file.path: _parquet_bytes(file.path, source.format.column) for file in sample}
    text_share = sum(known.values()) / max(1, sum(file.bytes for file in sample))
    # 2. Of a file that is split by rows, validation has one of every `period`.
    total = 0
    for file in source.files:
        size = file.bytes
        if kind_of(file.label) == "parquet":
            size = known.get(file.path, round(size * text_share))
        if file.period:
            rows = 1 if file.part == "validation" else file.period - 1
            size = size * rows // file.period
        total += size
    return total * passes


def _parquet_bytes(path: Any, column: str | None) -> int:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    # A column of messages is several leaves below its name.
    leaves = []
    for number in range(metadata.num_columns):
        if column is None or metadata.schema.column(number).path.split(".")[0] == column:
            leaves.append(number)
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        total += sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
    return total
