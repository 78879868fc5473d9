"""Rows of one local file, from any block on, in bounded memory.

A block is BLOCK_ROWS consecutive rows. parquet: rows of the file, whatever its row groups. jsonl: lines, blank ones counted
so that row + 1 is the line number an editor shows. txt: pieces, cut at a line `<|endoftext|>`, else at the first blank line
after PIECE_CHARS, else at a line end after twice as many.
"""

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pipeline.artifacts.retries import may_pass
from pipeline.sources.documents import BLOCK_ROWS

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
COMPRESSIONS = (".gz", ".zst")
LINE_BYTES = 256 * 2**20  # A longer line is no row but a file without line ends.
PIECE_CHARS = 16_384
SEPARATOR = "<|endoftext|>"
BOM = b"\xef\xbb\xbf"


class BadRow:
    """A row that cannot be read, and why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str):
        self.reason = reason


class DamagedRow(BadRow):
    """A row of a part of the file that cannot be decoded at all."""

    __slots__ = ()


RawRow = tuple[int, int, Any]  # row group, row, value or BadRow


def kind_of(name: str) -> str | None:
    """parquet, jsonl or txt by the file's name, compressed or not; None when it is none of these."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
        return KINDS.get(path.suffix) if path.suffix != ".parquet" else None
    return KINDS.get(path.suffix)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, decompressed by its suffix."""
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


def read_blocks(path: Path, *, block: int = 0, columns: list[str] | None = None) -> Iterator[list[RawRow]]:
    """The file's rows by blocks, beginning with block number `block`."""
    kind = kind_of(path.name)
    read = {"parquet": parquet_rows, "jsonl": jsonl_rows, "txt": txt_rows}[kind or "unknown"]
    rows = read(path, first_row=block * BLOCK_ROWS, columns=columns)
    index = block
    batch: list[RawRow] = []
    for row in rows:
        while row[1] // BLOCK_ROWS > index:
            yield batch
            index, batch = index + 1, []
        batch.append(row)
    if batch:
        yield batch


def parquet_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Rows of a parquet file. A row group that cannot be decoded makes each of its remaining rows a BadRow."""
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            row, end = start, start + count
            start = end
            if end <= first_row:
                continue
            try:
                for batch in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=columns):
                    if row + batch.num_rows <= first_row:
                        row += batch.num_rows
                        continue
                    skip = max(0, first_row - row)
                    row += skip
                    for value in _values(batch.slice(skip)):
                        yield group, row, value
                        row += 1
            except (OSError, ValueError, pyarrow.ArrowException) as error:
                if may_pass(error):
                    raise  # the disk's, not the file's
                damage = DamagedRow(f"row group {group} is damaged ({_short(error)})")
                for damaged in range(max(row, first_row), end):
                    yield group, damaged, damage


def _values(batch: Any) -> list[Any]:
    """The rows of a batch. parquet does not promise that its texts are UTF-8: then the rows are taken one by one."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return [_value(batch.slice(row, 1)) for row in range(batch.num_rows)]


def _value(one: Any) -> Any:
    try:
        return one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.start} of the text is 0x{error.object[error.start]:02x})")


def jsonl_rows(path: Path, *, first_row: int = 0, columns: list[str] | None = None) -> Iterator[RawRow]:
    """Objects of a jsonl file, one a line; blank lines are passed over."""
    with open_bytes(path) as file:
        row = -1
        while line := file.readline(LINE_BYTES):
            row += 1
            if len(line) == LINE_BYTES and not line.endswith(b"\n"):
                yield row // BLOCK_ROWS, row, BadRow(f"the line is longer than {LINE_BYTES // 2**20} MiB")
                while line and not line.endswith(b"\n"):
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
    """The value of one line, or a BadRow that says what is wrong with it."""
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
    """Pieces of a text file as {"text": piece}. Bytes that are not UTF-8 make the piece a BadRow."""
    with (
        open_bytes(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline=None) as file,
    ):
        row, line_number, first_line, length, lines = 0, 0, 1, 0, []
        while True:
            line = file.readline(PIECE_CHARS)
            line_number += line.endswith("\n")
            separator = line.rstrip("\n") == SEPARATOR
            if line and not separator:
                lines.append(line)
                length += len(line)
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
    if not piece.isascii():
        try:
            piece.encode("utf-8")
        except UnicodeEncodeError as error:
            return BadRow(f"is not UTF-8 (line {first_line + piece.count(chr(10), 0, error.start)})")
    return {"text": piece}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."
