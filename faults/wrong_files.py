"""Every way in which a data file was found wrong: as jsonl, JSON array, csv, parquet or arrow, text and conversations, and
what must be said of it.

`wrong_files()` gives the cases. A case is reported when the message names the
file (and the row, where one row is wrong) with the reason.
"""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

ROWS = 100  # of a file with one wrong row: more than are looked at from its beginning
PLACE = 6  # of the wrong row, zero-based
HTML = b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head><body>later</body></html>\n"
XML = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
USER = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}
TOOL = {"role": "tool", "content": "3"}


@dataclass(frozen=True)
class WrongFile:
    """kind: text or chat. row: what follows the file's name when one row is wrong. said: the reason in the message."""

    name: str
    kind: str
    file: str
    content: bytes
    said: str
    row: str = ""

    @property
    def id(self) -> str:
        return f"{self.file.partition('.')[2]}-{self.kind}-{self.name.replace(' ', '_')}"


def good_row(n: int, kind: str) -> dict:
    text = f"Document number {n} says something of its own."
    return {"text": text} if kind == "text" else {"messages": [USER, {"role": "assistant", "content": text}]}


def good_file(kind: str, *, first: int = 1000, rows: int = 20) -> bytes:
    """That many documents, and one of white space, which is no document and no mistake."""
    return _lines([good_row(first + n, kind) for n in range(rows)] + [{"text": " "}] * (kind == "text"))


def _lines(rows: list) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def _with(wrong: object, *, kind: str = "text", place: int = PLACE) -> bytes:
    """Lines of which one is wrong. wrong: its bytes, or what is written as JSON."""
    rows: list = [good_row(n, kind) for n in range(ROWS)]
    rows[place] = wrong
    return _lines(rows)


TEXTS = [good_row(n, "text")["text"] for n in range(ROWS)]


def wrong_files() -> Iterator[WrongFile]:
    for name, content, said in _jsonl_files():
        yield WrongFile(name, "text", "bad.jsonl", content, said)
    for name, wrong, said in _jsonl_rows():
        yield WrongFile(name, "text", "bad.jsonl", _with(wrong), said, row=f":{PLACE + 1}: ")
    yield WrongFile(
        "cut off", "text", "bad.jsonl", _with(good_row(1, "text"))[:-9], "probably cut off", row=f":{ROWS}: "
    )
    for name, content, said in _compressed():
        yield WrongFile(name, "text", "bad.jsonl.gz", content, said)
    for name, content, said in _parquet_files():
        yield WrongFile(name, "text", "bad.parquet", content, said)
    for name, wrong, said, place in _parquet_rows():
        content = _table({"text": pa.array([*TEXTS[:place], wrong, *TEXTS[place + 1 :]], pa.string())})
        yield WrongFile(name, "text", "bad.parquet", content, said, row=f" row {place}: ")
    yield WrongFile("invalid UTF-8", "text", "bad.parquet", _not_utf8(), "is not UTF-8", row=f" row {PLACE}: ")
    for ending, cases in (("json", _arrays), ("csv", _csv_files), ("arrow", _arrow_files)):
        for name, content, said, row in cases():
            yield WrongFile(name, "text", f"bad.{ending}", content, said, row=row)
    for name, messages, said in _conversations():
        content = _with({"messages": messages}, kind="chat")
        yield WrongFile(name, "chat", "bad.jsonl", content, said, row=f":{PLACE + 1}: ")
        try:
            content = _chat_parquet(messages)
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError):
            continue  # parquet has one type for all rows: these cannot be written
        yield WrongFile(name, "chat", "bad.parquet", content, said, row=f" row {PLACE}: ")
    for name, messages, said in _untrainable():
        said = f"cannot be trained on: 9 rows: the conversation {said}" if name == "no messages" else said
        content = _lines([{"messages": messages}] * 9)
        yield WrongFile(f"only {name}", "chat", "bad.jsonl", content, said)
        yield WrongFile(f"only {name}", "chat", "bad.parquet", _chat_parquet(messages, rows=9), said)
    for name, content, said in _chat_files():
        yield WrongFile(name, "chat", "bad.jsonl", content, said)
    yield WrongFile("messages", "chat", "bad.csv", b"messages\n[]\n[]\n", "no lists of messages")
    column = "has a column 'messages' of type string, not a list of messages"
    yield WrongFile("text for messages", "chat", "bad.parquet", _table({"messages": TEXTS}), column)
    yield WrongFile(
        "text column", "chat", "bad.parquet", _table({"text": TEXTS}), "has no column 'messages'; found: text"
    )


def _jsonl_files() -> Iterator[tuple[str, bytes, str]]:
    rows = [good_row(n, "text") for n in range(5)]
    yield "empty", b"", "empty"
    yield "blank lines", b"\n \n\t\n\n", "holds blank lines only"
    yield "HTML page", HTML, "looks like an HTML page (503 Service Unavailable)"
    yield "HTML page after a byte order mark", b"\xef\xbb\xbf" + HTML, "looks like an HTML page"
    yield "XML error page", XML, "looks like an XML error page (AccessDenied)"
    yield "S3 error without a head", XML.partition(b"\n")[2], "looks like an XML error page (AccessDenied)"
    yield "JSON error", b'{"error": "Rate limit exceeded", "code": 429}\n', "has no column 'text'; found: error, code"
    yield "git-lfs pointer", POINTER, "is a git-lfs pointer"
    yield "UTF-16", "".join(json.dumps(r) + "\n" for r in rows).encode("utf-16"), "is UTF-16 text"
    yield "UTF-16 without a mark", "".join(json.dumps(r) + "\n" for r in rows).encode("utf-16-le"), "is no jsonl"
    yield "JSON array cut off", json.dumps(rows, indent=1).encode()[:-40], "probably cut off"
    yield "JSON array in one line cut off", json.dumps(rows).encode()[:-1], "probably cut off"
    yield "one object over lines", json.dumps(rows[0], indent=1).encode(), "is no jsonl"
    yield "prose", b"Once upon a time\nthere was a text\nof three lines\n", "is no jsonl"
    yield "CSV", b"id,text\n1,hello\n2,world\n", "is no jsonl"
    yield "Python's repr", b"".join(repr(r).encode() + b"\n" for r in rows), "is no jsonl"
    yield "commas after the lines", b"".join(json.dumps(r).encode() + b",\n" for r in rows), "is no jsonl"
    yield "gzip", gzip.compress(_lines(rows)), "is gzip data"
    yield "zip archive", _zipped(_lines(rows)), "is a zip archive"
    yield "parquet", _table({"text": TEXTS}), "is a parquet file"
    yield "PDF", b"%PDF-1.7\n%\xe2\xe3\n", "is a PDF"
    yield "zeros", bytes(5000), "holds zero bytes where its content should be"
    yield "noise", b"{" + random.Random(0).randbytes(5000), "is no jsonl"
    yield (
        "another column",
        _lines([{"content": "hello", "id": n} for n in range(9)]),
        "has no column 'text'; found: content, id",
    )
    yield "a column by another case", _lines([{"Text": "hello"}] * 9), "has no column 'text'; found: Text"
    yield "a column of null", _lines([{"text": None}] * 9), ": the text is null"
    yield "a column of empty texts", _lines([{"text": n % 2 * " "} for n in range(9)]), "has no text"


def _jsonl_rows() -> Iterator[tuple[str, object, str]]:
    yield "null", {"text": None}, "the text is null"
    yield "number", {"text": 3}, "the text is int"
    yield "fraction that is none", b'{"text": NaN}', "the text is float"
    yield "boolean", {"text": True}, "the text is bool"
    yield "list", {"text": ["a", "b"]}, "the text is list"
    yield "mapping", {"text": {"en": "a"}}, "the text is dict"
    yield "no column", {"content": "a"}, "there is no column 'text'; found: content"
    yield "no columns", {}, "there is no column 'text'; found: none"
    yield "row is a list", ["a"], "the row is list, not a mapping"
    yield "row is a text", "a", "the row is str, not a mapping"
    yield "row is a number", 7, "the row is int, not a mapping"
    yield "row is null", None, "the row is NoneType, not a mapping"
    yield "given twice, then null", b'{"text": "a", "text": null}', "the text is null"
    yield "Latin-1", b'{"text": "caf\xe9"}', "is not UTF-8 (byte 13 of the line is 0xe9)"
    yield "overlong UTF-8", b'{"text": "a\xc0\xafb"}', "is not UTF-8"
    yield "half a surrogate pair", b'{"text": "a \\ud83d face"}', "holds half of a surrogate pair (U+D83D)"
    yield "open quote", b'{"text": "a', "is not JSON"
    yield "two objects", b'{"text": "a"}{"text": "b"}', "is not JSON"
    yield "raw tab", b'{"text": "a\tb"}', "is not JSON (Invalid control character"
    yield "bad escape", b'{"text": "C:\\data"}', "is not JSON (Invalid \\escape"
    yield "zeros of a crash", bytes(40), "is not JSON"
    yield "merge conflict", b"<<<<<<< HEAD", "is not JSON"
    yield "comment", b"// the second part", "is not JSON"
    yield "byte order mark in the middle", b'\xef\xbb\xbf{"text": "a"}', "is not JSON"
    yield "HTML", HTML.replace(b"\n", b" "), "is not JSON"
    yield "too deep", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"


def _compressed() -> Iterator[tuple[str, bytes, str]]:
    noise = random.Random(2)
    whole = gzip.compress(_lines([{"text": noise.randbytes(40).hex()} for _ in range(500)]), mtime=0)
    yield "truncated", whole[: len(whole) // 2], "is truncated or damaged"
    yield "damaged", whole[:2000] + bytes(200) + whole[2200:], "is truncated or damaged"
    yield "not compressed", good_file("text"), "ends in .gz and is no such file"
    yield "HTML inside", gzip.compress(HTML, mtime=0), "looks like an HTML page"
    yield "empty inside", gzip.compress(b"", mtime=0), "holds nothing once decompressed"


def _table(columns: dict, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


def _parquet_files() -> Iterator[tuple[str, bytes, str]]:
    noise = random.Random(1)
    large = _table(
        {"text": [noise.randbytes(60).hex() for _ in range(ROWS)]}, compression="zstd", use_dictionary=False
    )
    yield "empty", b"", "empty"
    yield "truncated", large[: len(large) * 7 // 10], "is truncated"
    yield "truncated to its magic", large[:4], "is truncated"
    yield "footer of another", large[:-8] + (10**9).to_bytes(4, "little") + b"PAR1", "is truncated or damaged"
    yield "footer of zeros", large[:-200] + bytes(192) + large[-8:], "is truncated or damaged"
    yield "page of zeros", large[:60] + bytes(400) + large[460:], "is damaged"
    yield "middle missing", large[:500] + large[1500:], "is"
    yield "zeros", bytes(len(large)), "holds zero bytes where its content should be"
    yield "HTML page", HTML, "looks like an HTML page"
    yield "XML error page", XML, "looks like an XML error page"
    yield "git-lfs pointer", POINTER, "is a git-lfs pointer"
    yield "jsonl", good_file("text"), "ends in .parquet and is no such file"
    yield "CSV", b"id,text\n1,hello\n", "ends in .parquet and is no such file"
    yield "gzip", gzip.compress(large), "is gzip data"
    yield "zip archive", _zipped(large), "is a zip archive"
    yield "Arrow", _arrow(), "is an Arrow file"
    yield "encrypted", b"PARE" + large[4:-4] + b"PARE", "ends in .parquet and is no such file"
    yield "no rows", _table({"text": pa.array([], pa.string())}), "has no rows"
    yield "another column", _table({"content": TEXTS, "id": range(ROWS)}), "has no column 'text'; found: content, id"
    yield "a column by another case", _table({"Text": TEXTS}), "has no column 'text'; found: Text"
    for name, column, said in (
        ("integers", pa.array(range(ROWS)), "int64"),
        ("fractions", pa.array([0.5] * ROWS), "double"),
        ("booleans", pa.array([True] * ROWS), "bool"),
        ("nulls", pa.nulls(ROWS), "null"),
        ("bytes", pa.array([t.encode() for t in TEXTS], pa.binary()), "binary"),
        ("lists", pa.array([[t] for t in TEXTS]), "list"),
        ("mappings", pa.array([{"en": t} for t in TEXTS]), "struct"),
        ("times", pa.array([0] * ROWS, pa.timestamp("s")), "timestamp"),
        ("categories of integers", pa.array([1, 2] * (ROWS // 2)).dictionary_encode(), "int64"),
    ):
        yield f"a column of {name}", _table({"text": column}), f"has a column 'text' of type {said}"
    yield "a column of null texts", _table({"text": pa.nulls(ROWS, pa.string())}), ": the text is null"
    yield "a column of empty texts", _table({"text": ["", " "] * (ROWS // 2)}), "has no text"
    yield "a column twice", _twice(), "has 2 columns 'text'"


def _parquet_rows() -> Iterator[tuple[str, object, str, int]]:
    yield "null", None, "the text is null", PLACE
    yield "null in the first row", None, "the text is null", 0
    yield "null in the last row", None, "the text is null", ROWS - 1


def _not_utf8() -> bytes:
    """A column of texts that says UTF-8 and is not: as some writers leave it."""
    values = [text.encode() for text in TEXTS]
    values[PLACE] = b"caf\xe9"
    binary = pa.array(values, pa.binary())
    return _table({"text": pa.StringArray.from_buffers(len(binary), *binary.buffers()[1:])})


def _twice() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"]), sink)
    return sink.getvalue()


def _arrays() -> Iterator[tuple[str, bytes, str, str]]:
    rows = [good_row(n, "text") for n in range(ROWS)]
    whole = json.dumps(rows, indent=2).encode()

    def wrong(value: object) -> bytes:
        return json.dumps([*rows[:PLACE], value, *rows[PLACE + 1 :]]).encode()

    yield "cut off in a text", whole[: len(whole) - 20], "probably cut off", ""
    yield "cut off between rows", whole[: whole.rindex(b",")], "probably cut off", ""
    yield "cut off behind a comma", whole[: whole.rindex(b",") + 1], "probably cut off", ""
    yield (
        "no comma between rows",
        whole.replace(b"},", b"}", 1),
        ":5: the JSON array cannot be read from its row 1 on (a comma is missing",
        "",
    )
    yield "a comma too many", whole[:-2] + b",\n]", "Expecting value", ""
    yield (
        "bad escape",
        whole.replace(b"something", b"C:\\data", 1),
        ":3: the JSON array cannot be read from its row 0 on (Invalid \\escape",
        "",
    )
    yield "zeros of a crash", whole[:3000] + bytes(500) + whole[3500:], "Invalid control character", ""
    yield "a second array", whole + whole, "something follows the closing bracket", ""
    yield "no rows", b"[]", "has no rows", ""
    yield (
        "another column",
        json.dumps([{"content": "hello", "id": 1}] * 9).encode(),
        "has no column 'text'; found: content",
        "",
    )
    yield "a column of empty texts", json.dumps([{"text": " "}] * 9).encode(), "has no text", ""
    yield "null", wrong({"text": None}), "the text is null", f" row {PLACE}: "
    yield "number", wrong({"text": 3}), "the text is int", f" row {PLACE}: "
    yield "no column", wrong({"id": 3}), "there is no column 'text'; found: id", f" row {PLACE}: "
    yield "row is a text", wrong("a"), "the row is str, not a mapping", f" row {PLACE}: "
    yield "row is null", wrong(None), "the row is NoneType, not a mapping", f" row {PLACE}: "
    yield "half a surrogate pair", wrong({"text": "\ud83d"}), "half of a surrogate pair", f" row {PLACE}: "
    yield "Latin-1", wrong({"text": "cafe"}).replace(b"cafe", b"caf\xe9"), "is not UTF-8", f" row {PLACE}: "


def _csv_files() -> Iterator[tuple[str, bytes, str, str]]:
    lines = [f'{n},"{text}"\n'.encode() for n, text in enumerate(TEXTS)]

    def wrong(line: bytes, *, place: int = PLACE) -> bytes:
        return b"id,text\n" + b"".join([*lines[:place], line, *lines[place + 1 :]])

    yield "empty", b"", "empty", ""
    yield "header alone", b"id,text\n", "has no rows", ""
    yield "HTML page", HTML, "looks like an HTML page", ""
    yield "git-lfs pointer", POINTER, "is a git-lfs pointer", ""
    yield "UTF-16", wrong(lines[0]).decode().encode("utf-16"), "is UTF-16 text", ""
    yield "UTF-16 without a mark", wrong(lines[0]).decode().encode("utf-16-le"), "zero bytes in it", ""
    yield "Excel", _zipped(wrong(lines[0])), "is a zip archive", ""
    yield "parquet", _table({"text": TEXTS}), "is a parquet file", ""
    yield "jsonl", good_file("text"), "has no column 'text'", ""
    yield "no header", b"".join(lines), "has no column 'text'; found: 0, Document number 0", ""
    yield "another column", wrong(lines[0]).replace(b"text", b"content", 1), "has no column 'text'; found: ", ""
    yield "a column by another case", wrong(lines[0]).replace(b"text", b"Text", 1), "has no column 'text'; found: ", ""
    yield "a column twice", wrong(lines[0]).replace(b"id", b"text", 1), "has 2 columns 'text'", ""
    yield "a column of empty texts", b"id,text\n" + b"1,\n" * 9, "has no text", ""
    yield "zero bytes", wrong(b'6,"a\0b"\n'), "zero bytes in it", ""
    yield (
        "open quote",
        wrong(b'6,"never closed\n', place=ROWS - 1),
        f":{ROWS + 1}: the csv cannot be read from this line on (a quote is never closed",
        "",
    )
    yield (
        "cut off",
        wrong(lines[0])[:-9],
        f":{ROWS + 1}: the csv cannot be read from this line on (a quote is never closed",
        "",
    )
    yield "quote inside", wrong(b'6,"a "word" of it"\n'), f":{PLACE + 2}: the csv cannot be read", ""
    yield "a field too many", wrong(b"6,one, two\n"), "has 3 fields, and the header has 2 (line 8)", f" row {PLACE}: "
    yield "a field too few", wrong(b"one\n"), "has 1 fields, and the header has 2", f" row {PLACE}: "
    yield "Latin-1", wrong(b"6,caf\xe9\n"), "is not UTF-8", f" row {PLACE}: "


def _arrow_files() -> Iterator[tuple[str, bytes, str, str]]:
    stream, file = _stream({"text": pa.array(TEXTS)}), _arrow()
    offsets = stream.index(len(TEXTS[0]).to_bytes(4, "little") + (2 * len(TEXTS[0])).to_bytes(4, "little"))
    yield "empty", b"", "empty", ""
    yield "stream truncated", stream[: len(stream) * 7 // 10], "is truncated or damaged: record batch 0", ""
    yield "stream truncated in its schema", stream[:40], "is truncated or damaged", ""
    yield "file truncated", file[: len(file) * 7 // 10], "is truncated", ""
    yield "file without its footer's end", file[:-6], "is truncated", ""
    yield "offsets beyond the end", stream[:offsets] + b"\xff" * 4 + stream[offsets + 4 :], "record batch 0", ""
    yield "zeros", bytes(len(stream)), "holds zero bytes", ""
    yield "HTML page", HTML, "looks like an HTML page", ""
    yield "git-lfs pointer", POINTER, "is a git-lfs pointer", ""
    yield "jsonl", good_file("text"), "ends in .arrow and is no such file", ""
    yield "parquet", _table({"text": TEXTS}), "is a parquet file", ""
    yield "no rows", _stream({"text": pa.array([], pa.string())}), "has no rows", ""
    yield "another column", _stream({"content": pa.array(TEXTS)}), "has no column 'text'; found: content", ""
    yield "a column of integers", _stream({"text": pa.array(range(ROWS))}), "of type int64, not text", ""
    yield "a column of empty texts", _stream({"text": pa.array([" "] * ROWS)}), "has no text", ""
    yield "null", _stream({"text": pa.array([*TEXTS[:-1], None])}), "the text is null", f" row {ROWS - 1}: "


def _stream(columns: dict) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    return sink.getvalue()


def _arrow() -> bytes:
    sink = io.BytesIO()
    feather.write_feather(pa.table({"text": TEXTS}), sink, compression="uncompressed")
    return sink.getvalue()


def _zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.jsonl", content)
    return sink.getvalue()


def _conversations() -> Iterator[tuple[str, object, str]]:
    yield "null", None, "the messages are null"
    yield "text", "hello", "the messages are text, not a list"
    yield "messages of numbers", [1, 2], "not a mapping of role and content"
    yield "message is null", [USER, None], "not a mapping of role and content"
    yield "unknown role", [{"role": "narrator", "content": "x"}, ANSWER], "has the role 'narrator'"
    yield "no role", [{"content": "x"}, ANSWER], "has the role None"
    yield "content is a number", [{"role": "user", "content": 3}, ANSWER], "is a number, not text"
    yield "half a surrogate pair", [USER, {"role": "assistant", "content": "\ud83d"}], "half of a surrogate pair"


def _untrainable() -> Iterator[tuple[str, list, str]]:
    """A few of these among others are left out and counted; a file of nothing else is wrong."""
    yield "no messages", [], "has no messages"
    yield "null", [{"role": "user", "content": None}, ANSWER], "has no content"
    yield "two users", [USER, USER, ANSWER], "second user message in a row"
    yield "two assistants", [USER, ANSWER, ANSWER], "second assistant message in a row"
    yield "assistant first", [ANSWER, USER], "before any user message"
    yield "system later", [USER, ANSWER, {"role": "system", "content": "x"}], "may only come first"
    yield "no assistant", [USER], "nothing to train on"
    yield "empty assistants", [USER, {"role": "assistant", "content": " \n"}], "is empty"
    yield "tools without a call", [USER, ANSWER, TOOL], "no tool call"


def _chat_parquet(messages: object, *, rows: int = 1) -> bytes:
    """The messages in one row among good ones, or in so many rows alone."""
    one = {"messages": messages}
    made = [one] * rows if rows > 1 else [one if n == PLACE else good_row(n, "chat") for n in range(ROWS)]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(made, pa.schema([("messages", kind)])), sink)
    return sink.getvalue()


def _chat_files() -> Iterator[tuple[str, bytes, str]]:
    rows = [good_row(n, "chat") for n in range(9)]
    yield "text column", good_file("text"), "has no column 'messages'; found: text"
    yield (
        "turns",
        _lines([{"conversations": r["messages"]} for r in rows]),
        "has no column 'messages'; found: conversations",
    )
    yield "HTML page", HTML, "looks like an HTML page"
    yield "empty", b"", "empty"
    yield "only questions", _lines([{"messages": [USER]}] * 9), "9 rows: no assistant message"


def count(cases: Callable[[], Iterator[WrongFile]], ending: str) -> int:
    return sum(case.file.endswith(ending) for case in cases())
