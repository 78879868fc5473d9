"""Files as other programs write them are read as they are: every text the writer put in, in order, and nothing else.

`pytest -v tests/sources/test_files_of_other_programs.py` prints the table writer x option x result.
"""

import codecs
import csv
import gzip
import itertools
import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import duckdb
import fastparquet
import orjson
import pandas
import polars
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.process.errors import DataError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources import raw_rows
from pipeline.sources.open import open_sources
from pipeline.sources.raw_rows import BadRow, array_rows, count_rows, read_blocks, read_rows
from tests.conftest import docstrings
from tests.runner import WarmRunner

ODD = [
    'He said "no", then: ""', "one, two; three\tfour", "first line\nsecond line\n\nfourth", "Windows\r\nline ends\r\n", "a lone\rreturn",
    "NA", "null", "None", "nan", "NULL", "true", "007", "1e5", "-", "#comment", "'single'", "back\\slash \\n \\u0041", "[1, 2]", '{"text": "a"}',
    "Gr\u00fc\u00dfe aus Z\u00fcrich", "\u4e2d\u6587\u7684\u53e5\u5b50\u3002", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u0939\u093f\u0928\u094d\u0926\u0940", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600",
    "e\u0301 combined", "line\u2028separator\u0085next\x0bvertical", "\ufeffmark", " spaces around ", "trailing\n", "\nleading", "<|endoftext|>", "x",
    "", " ", "\n", "long " * 30_000, "\u00e4" * 70_000,
]  # fmt: skip
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "row",
    "and",
    "learns",
    "what",
    "comes",
    "next",
    "in",
    "it",
    "Stra\u00dfe",
    "\u6587",
]
DRAW = random.Random(0)
TEXTS = [f"{n}: " + " ".join(DRAW.choices(WORDS, k=DRAW.randrange(20, 200))) for n in range(2300)]
for place, odd in enumerate(ODD):
    TEXTS.insert(7 + place * 60, odd)
KEPT = [text for text in TEXTS if text.strip()]
IDS = list(range(len(TEXTS)))
CHATS = [
    [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": text}]
    for n, text in enumerate(KEPT[:2200])
]
Write = Callable[[Path], Any]


def frame() -> pandas.DataFrame:
    return pandas.DataFrame({"id": IDS, "text": TEXTS})


def table(kind: Any = None, **more: Any) -> pa.Table:
    return pa.table({"id": IDS, "text": pa.array(TEXTS, kind or pa.string()), **more})


def parquet(made: Callable[[], pa.Table] = table, **options: Any) -> Write:
    return lambda folder: pq.write_table(made(), folder / "a.parquet", **options)


def pandas_parquet(**options: Any) -> Write:
    return lambda folder: frame().to_parquet(folder / "a.parquet", **options)


def fast(**options: Any) -> Write:
    return lambda folder: fastparquet.write(str(folder / "a.parquet"), frame(), **options)


def duck(name: str, options: str) -> Write:
    def write(folder: Path) -> None:
        with duckdb.connect() as connection:
            connection.register("rows", table())
            connection.execute(f"COPY (SELECT * FROM rows ORDER BY id) TO '{folder / name}' ({options})")

    return write


def polar(write: Callable[[polars.DataFrame, Path], Any]) -> Write:
    return lambda folder: write(polars.DataFrame({"id": IDS, "text": TEXTS}), folder)


def of_datasets(write: Callable[[datasets.Dataset, Path], Any]) -> Write:
    return lambda folder: write(datasets.Dataset.from_dict({"id": IDS, "text": TEXTS}), folder)


def lines(
    dumps: Callable[[Any], Any],
    name: str = "a.jsonl",
    end: bytes = b"\n",
    start: bytes = b"",
    stop: bytes | None = None,
) -> Write:
    rows = (dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS))
    return bytes_of(
        lambda: (
            start + end.join(r if isinstance(r, bytes) else r.encode() for r in rows) + (end if stop is None else stop)
        ),
        name,
    )


def array(name: str = "a.json", start: bytes = b"", **options: Any) -> Write:
    return bytes_of(
        lambda: start + json.dumps([{"id": n, "text": text} for n, text in enumerate(TEXTS)], **options).encode(), name
    )


def bytes_of(content: Callable[[], bytes], name: str) -> Write:
    def write(folder: Path) -> None:
        data = content()
        (folder / name).write_bytes(
            gzip.compress(data, 1) if name.endswith(".gz") else zstd(data) if name.endswith(".zst") else data
        )

    return write


def zstd(data: bytes) -> bytes:
    """As two frames, as `cat a.zst b.zst` and parallel compressors leave them."""
    frames = (data[: len(data) // 2], data[len(data) // 2 :])
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in frames)


def csv_module(name: str = "a.csv", encoding: str = "utf-8", **options: Any) -> Write:
    def write(folder: Path) -> None:
        with open(folder / name, "w", newline="", encoding=encoding) as file:
            writer = csv.writer(file, **options)
            writer.writerow(["id", "text"])
            writer.writerows(zip(IDS, TEXTS, strict=True))

    return write


def pandas_csv(name: str = "a.csv", **options: Any) -> Write:
    return lambda folder: frame().to_csv(folder / name, **options)


def pandas_json(name: str, **options: Any) -> Write:
    return lambda folder: frame().to_json(folder / name, orient="records", **options)


def arrow(
    made: Callable[[], pa.Table] = table, *, stream: bool = False, rows: int | None = None, **options: Any
) -> Write:
    def write(folder: Path) -> None:
        opened = pa.ipc.new_stream if stream else pa.ipc.new_file
        with opened(str(folder / "a.arrow"), made().schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(made(), max_chunksize=rows)

    return write


def beside() -> pa.Table:
    """Columns of every other kind around the text, some of them without values."""
    count, nothing = len(IDS), [None] * len(IDS)
    return pa.table({
        "when": pa.array([10**18 + n for n in IDS], pa.timestamp("ns", "UTC")), "day": pa.array(IDS, pa.date32()), "score": pa.array([0.5, None] * (count // 2) + [None] * (count % 2)),
        "meta": pa.array([{"url": f"u{n}", "tags": ["a", None]} for n in IDS]), "deep": pa.array([[[n], []] for n in IDS]), "blob": pa.array([b"\xff"] * count),
        "empty": pa.nulls(count), "nothing": pa.array(nothing, pa.string()), "price": pa.array(IDS, pa.decimal128(10, 2)), "text": pa.array(TEXTS),
        "map": pa.array([[("k", n)] for n in IDS], pa.map_(pa.string(), pa.int64())), "kind": pa.array(["web"] * count).dictionary_encode(),
    })  # fmt: skip


def chunked() -> pa.Table:
    return pa.concat_tables([table().slice(0, 1500), table().slice(1500)])


VERSIONS, CODECS = ("1.0", "2.4", "2.6"), ("none", "snappy", "zstd", "gzip", "lz4", "brotli")
CASES: dict[str, Write] = {
    f"pyarrow-parquet-{version}-{codec}-{'dictionary' if dictionary else 'plain'}": parquet(version=version, compression=codec, use_dictionary=dictionary)
    for version, codec, dictionary in itertools.product(VERSIONS, CODECS, (True, False))
} | {
    "pyarrow-parquet-defaults": parquet(),
    "pyarrow-parquet-row_groups": parquet(row_group_size=1000),
    "pyarrow-parquet-row_groups_of_7": parquet(row_group_size=7),
    "pyarrow-parquet-small_pages": parquet(data_page_size=4096, write_batch_size=16),
    "pyarrow-parquet-page_version_2": parquet(data_page_version="2.0"),
    "pyarrow-parquet-page_version_2-checksums": parquet(data_page_version="2.0", write_page_checksum=True, compression="zstd"),
    "pyarrow-parquet-checksums": parquet(write_page_checksum=True, row_group_size=1000),
    "pyarrow-parquet-page_index": parquet(write_page_index=True),
    "pyarrow-parquet-small_dictionary_page": parquet(dictionary_pagesize_limit=10_000),
    "pyarrow-parquet-delta_lengths": parquet(use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY", "id": "PLAIN"}),
    "pyarrow-parquet-delta": parquet(use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY", "id": "PLAIN"}),
    "pyarrow-parquet-content_defined_chunks": parquet(use_content_defined_chunking=True, write_page_index=True),
    "pyarrow-parquet-no_statistics": parquet(write_statistics=False, store_schema=False),
    "pyarrow-parquet-large_string": parquet(lambda: table(pa.large_string())),
    "pyarrow-parquet-string_view": parquet(lambda: table(pa.string_view())),
    "pyarrow-parquet-dictionary_type": parquet(lambda: pa.table({"text": pa.array(TEXTS).dictionary_encode()})),
    "pyarrow-parquet-not_nullable": parquet(lambda: table().cast(pa.schema([("id", pa.int64()), pa.field("text", pa.string(), nullable=False)]))),
    "pyarrow-parquet-columns_beside": parquet(beside),
    "pyarrow-parquet-columns_beside-int96": parquet(lambda: beside().drop(["map"]), use_deprecated_int96_timestamps=True),
    "pyarrow-parquet-chunks": parquet(chunked),
    "pandas-parquet-defaults": pandas_parquet(),
    "pandas-parquet-zstd": pandas_parquet(compression="zstd", index=False),
    "pandas-parquet-index": lambda folder: frame().set_index("id").to_parquet(folder / "a.parquet"),
    "pandas-parquet-fastparquet": pandas_parquet(engine="fastparquet"),
    "pandas-parquet-object": lambda folder: frame().astype({"text": object}).to_parquet(folder / "a.parquet"),
    "pandas-parquet-category": lambda folder: frame().astype({"text": "category"}).to_parquet(folder / "a.parquet"),
    "pandas-feather": lambda folder: frame().to_feather(folder / "a.feather"),
    "pandas-jsonl": pandas_json("a.jsonl", lines=True),
    "pandas-jsonl-not_ascii": pandas_json("a.jsonl", lines=True, force_ascii=False),
    "pandas-jsonl-gz": pandas_json("a.jsonl.gz", lines=True),
    "pandas-json-array": pandas_json("a.json"),
    "pandas-json-array-indent": pandas_json("a.json", indent=2),
    "pandas-csv": pandas_csv(),
    "pandas-csv-no_index": pandas_csv(index=False),
    "pandas-csv-crlf": pandas_csv(lineterminator="\r\n"),
    "pandas-csv-bom": pandas_csv(encoding="utf-8-sig"),
    "pandas-csv-quote_all": pandas_csv(quoting=csv.QUOTE_ALL),
    "pandas-csv-semicolon": pandas_csv(sep=";"),
    "pandas-csv-tab": pandas_csv(sep="\t"),
    "pandas-tsv": pandas_csv("a.tsv", sep="\t"),
    "pandas-csv-gz": pandas_csv("a.csv.gz"),
    "pandas-csv-one_column": lambda folder: frame()[["text"]].to_csv(folder / "a.csv", index=False),
    "datasets-parquet": of_datasets(lambda rows, folder: rows.to_parquet(folder / "a.parquet")),
    "datasets-parquet-batches": of_datasets(lambda rows, folder: rows.to_parquet(folder / "a.parquet", batch_size=100)),
    "datasets-json": of_datasets(lambda rows, folder: rows.to_json(folder / "a.json")),
    "datasets-jsonl-gz": of_datasets(lambda rows, folder: rows.to_json(folder / "a.jsonl.gz", compression="gzip")),
    "datasets-json-array": of_datasets(lambda rows, folder: rows.to_json(folder / "a.json", lines=False, batch_size=len(rows))),
    "datasets-csv": of_datasets(lambda rows, folder: rows.to_csv(folder / "a.csv")),
    "datasets-save_to_disk": of_datasets(lambda rows, folder: (rows.save_to_disk(folder / "d"), next((folder / "d").glob("*.arrow")).rename(folder / "a.arrow"))),
    "pyarrow-arrow-file": arrow(),
    "pyarrow-arrow-file-batches": arrow(rows=700),
    "pyarrow-arrow-stream": arrow(stream=True),
    "pyarrow-arrow-stream-lz4": arrow(stream=True, rows=700, compression="lz4"),
    "pyarrow-arrow-columns_beside": arrow(beside, rows=500, compression="zstd"),
    "pyarrow-arrow-string_view": arrow(lambda: table(pa.string_view())),
    "pyarrow-arrow-large_string": arrow(lambda: table(pa.large_string()), stream=True),
    "pyarrow-arrow-dictionary_type": arrow(lambda: pa.table({"text": pa.array(TEXTS).dictionary_encode()}), stream=True),
    "pyarrow-arrow-chunks": arrow(chunked),
    "pyarrow-feather": lambda folder: feather.write_feather(table(), folder / "a.feather"),
    "pyarrow-feather-zstd": lambda folder: feather.write_feather(table(), folder / "a.feather", compression="zstd", chunksize=900),
    "polars-parquet": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet")),
    "polars-parquet-snappy-row_groups": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", compression="snappy", row_group_size=800)),
    "polars-parquet-gzip-small_pages": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", compression="gzip", data_page_size=8192)),
    "polars-parquet-lz4": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", compression="lz4", statistics=False)),
    "polars-parquet-brotli": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", compression="brotli")),
    "polars-parquet-uncompressed": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", compression="uncompressed")),
    "polars-parquet-pyarrow": polar(lambda rows, folder: rows.write_parquet(folder / "a.parquet", use_pyarrow=True)),
    "polars-parquet-sink": polar(lambda rows, folder: rows.lazy().sink_parquet(folder / "a.parquet")),
    "polars-parquet-categorical": polar(lambda rows, folder: rows.with_columns(polars.col("text").cast(polars.Categorical)).write_parquet(folder / "a.parquet")),
    "polars-ipc": polar(lambda rows, folder: rows.write_ipc(folder / "a.arrow")),
    "polars-ipc-oldest": polar(lambda rows, folder: rows.write_ipc(folder / "a.ipc", compat_level=polars.CompatLevel.oldest(), compression="zstd")),
    "polars-ipc-stream": polar(lambda rows, folder: rows.write_ipc_stream(folder / "a.arrow")),
    "polars-ndjson": polar(lambda rows, folder: rows.write_ndjson(folder / "a.ndjson")),
    "polars-json-array": polar(lambda rows, folder: rows.write_json(folder / "a.json")),
    "polars-csv": polar(lambda rows, folder: rows.write_csv(folder / "a.csv")),
    "polars-csv-quote_always": polar(lambda rows, folder: rows.write_csv(folder / "a.csv", quote_style="always", include_bom=True)),
    "polars-csv-non_numeric": polar(lambda rows, folder: rows.write_csv(folder / "a.csv", quote_style="non_numeric", line_terminator="\r\n")),
    "duckdb-parquet": duck("a.parquet", "FORMAT parquet"),
    "duckdb-parquet-row_groups": duck("a.parquet", "FORMAT parquet, ROW_GROUP_SIZE 2048"),
    "duckdb-parquet-v2": duck("a.parquet", "FORMAT parquet, PARQUET_VERSION v2"),
    **{f"duckdb-parquet-{codec}": duck("a.parquet", f"FORMAT parquet, CODEC {codec}") for codec in ("uncompressed", "snappy", "gzip", "zstd", "brotli", "lz4", "lz4_raw")},
    "duckdb-csv": duck("a.csv", "FORMAT csv, HEADER"),
    "duckdb-csv-gz": duck("a.csv.gz", "FORMAT csv, HEADER, COMPRESSION gzip"),
    "duckdb-csv-zst": duck("a.csv.zst", "FORMAT csv, HEADER, COMPRESSION zstd"),
    "duckdb-csv-tab": duck("a.tsv", "FORMAT csv, HEADER, DELIMITER '\t', FORCE_QUOTE *"),
    "duckdb-jsonl": duck("a.jsonl", "FORMAT json"),
    "duckdb-jsonl-gz": duck("a.jsonl.gz", "FORMAT json, COMPRESSION gzip"),
    "duckdb-jsonl-zst": duck("a.jsonl.zst", "FORMAT json, COMPRESSION zstd"),
    "duckdb-json-array": duck("a.json", "FORMAT json, ARRAY true"),
    "fastparquet-parquet": fast(),
    **{f"fastparquet-parquet-{codec}": fast(compression=codec) for codec in ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI")},
    "fastparquet-parquet-row_groups": fast(row_group_offsets=500, stats=True),
    "fastparquet-parquet-not_nullable": fast(has_nulls=False),
    "fastparquet-parquet-page_version_2": fast(object_encoding="utf8", times="int96"),
    "json-lines": lines(json.dumps),
    "json-lines-not_ascii": lines(lambda row: json.dumps(row, ensure_ascii=False)),
    "json-lines-bom": lines(json.dumps, start=codecs.BOM_UTF8),
    "json-lines-crlf": lines(json.dumps, end=b"\r\n"),
    "json-lines-no_last_end": lines(json.dumps, stop=b""),
    "json-lines-gz": lines(json.dumps, "a.jsonl.gz"),
    "json-lines-gz-bom-crlf": lines(json.dumps, "a.json.gz", start=codecs.BOM_UTF8, end=b"\r\n"),
    "json-lines-zst": lines(json.dumps, "a.jsonl.zst"),
    "json-lines-named_json": lines(json.dumps, "a.json"),
    "json-array": array(),
    "json-array-indent_1": array(indent=1),
    "json-array-indent_4-not_ascii": array(indent=4, ensure_ascii=False),
    "json-array-compact": array(separators=(",", ":")),
    "json-array-bom": array(start=codecs.BOM_UTF8 + b"\r\n ", indent=2),
    "json-array-named_jsonl": array("a.jsonl"),
    "json-array-gz": array("a.json.gz", indent=2),
    "json-array-zst": array("a.json.zst"),
    "orjson-lines": lines(orjson.dumps),
    "orjson-lines-newline": lines(lambda row: orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE), end=b"", stop=b""),
    "orjson-array": bytes_of(lambda: orjson.dumps([{"text": text} for text in TEXTS], option=orjson.OPT_INDENT_2), "a.json"),
    "csv-excel": csv_module(),
    "csv-excel-bom": csv_module(encoding="utf-8-sig"),
    "csv-unix": csv_module(dialect="unix"),
    "csv-excel_tab": csv_module("a.tsv", dialect="excel-tab"),
    "csv-quote_all-zst": lambda folder: (csv_module(quoting=csv.QUOTE_ALL)(folder), (folder / "a.csv.zst").write_bytes(zstd((folder / "a.csv").read_bytes())), (folder / "a.csv").unlink()),
}  # fmt: skip


def open_all(folder: Path, files: str, *, kind: Any = "text") -> Any:
    """The source of these files, none of it held out."""
    held = (
        {"text": "Something else."}
        if kind == "text"
        else {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    )
    (folder / "held_out").mkdir(exist_ok=True)
    (folder / "held_out" / "a.jsonl").write_text(json.dumps(held) + "\n")
    recipe = Recipe(path=str(folder / "recipe.yaml"))
    recipe.data.cache_dir = str(folder / "cache")
    recipe.data.sources = [Source(files=files)]
    recipe.data.validation = [Source(files="held_out/a.jsonl")]
    (source,), _ = open_sources(replace(recipe.source_settings(), kind=kind))
    return source


def only_file(folder: Path) -> str:
    (path,) = list(folder.glob("a.*"))
    return path.name


@pytest.mark.parametrize("case", CASES)
def test_every_text_of_a_file_is_read_as_it_was_written(case, tmp_path):
    CASES[case](tmp_path)
    source = open_all(tmp_path, only_file(tmp_path))
    blocks = list(source.read())
    assert [item.text for block in blocks for item in block.items] == KEPT
    assert not [bad for block in blocks for bad in block.bad_rows]
    assert list(source.read(block=2)) == blocks[2:]
    rows = [row for block in read_blocks(tmp_path / only_file(tmp_path)) for _, row, _ in block]
    assert rows == list(range(count_rows(tmp_path / only_file(tmp_path))))


SHORT = [
    text
    for text in KEPT
    if len(text) < 2000 and "\r" not in text and text != "<|endoftext|>" and not text.startswith("\ufeff")
]


@pytest.mark.full
@pytest.mark.parametrize("ending", [".txt", ".md", ".txt.gz", ".md.zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_folder_of_texts_gives_one_document_per_file_without_its_readme(ending, end, tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number, text in enumerate(SHORT[:200]):
        bytes_of(lambda text=text: text.replace("\n", end).encode(), f"deep/{number:04}{ending}")(folder)
    (folder / "README.md").write_text("# What this corpus is\n")
    source = open_all(tmp_path, "corpus")
    found = {source.files[item.file].label: item.text for block in source.read() for item in block.items}
    expected = {f"{number:04}{ending}": text.strip("\n") for number, text in enumerate(SHORT[:200])}
    assert found == expected


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
CHAT_CASES: dict[str, Write] = {
    "pyarrow-parquet": lambda folder: pq.write_table(pa.table({"messages": pa.array(CHATS, MESSAGES)}), folder / "a.parquet"),
    "pyarrow-parquet-large_list": lambda folder: pq.write_table(
        pa.table({"messages": pa.array(CHATS, pa.large_list(MESSAGES.value_type))}), folder / "a.parquet", row_group_size=600, compression="zstd"
    ),
    "pandas-parquet": lambda folder: pandas.DataFrame({"messages": CHATS}).to_parquet(folder / "a.parquet"),
    "pandas-jsonl": lambda folder: pandas.DataFrame({"messages": CHATS}).to_json(folder / "a.jsonl", orient="records", lines=True),
    "pandas-json-array": lambda folder: pandas.DataFrame({"messages": CHATS}).to_json(folder / "a.json", orient="records"),
    "datasets-parquet": lambda folder: datasets.Dataset.from_dict({"messages": CHATS}).to_parquet(folder / "a.parquet"),
    "datasets-json": lambda folder: datasets.Dataset.from_dict({"messages": CHATS}).to_json(folder / "a.json"),
    "datasets-save_to_disk": lambda folder: (
        datasets.Dataset.from_dict({"messages": CHATS}).save_to_disk(folder / "d"), next((folder / "d").glob("*.arrow")).rename(folder / "a.arrow"),
    ),
    "polars-parquet": lambda folder: polars.DataFrame({"messages": CHATS}).write_parquet(folder / "a.parquet"),
    "polars-ipc": lambda folder: polars.DataFrame({"messages": CHATS}).write_ipc(folder / "a.arrow"),
    "polars-ndjson": lambda folder: polars.DataFrame({"messages": CHATS}).write_ndjson(folder / "a.jsonl"),
    "json-lines-of_lists": bytes_of(lambda: b"".join(json.dumps(chat).encode() + b"\n" for chat in CHATS), "a.jsonl"),
    "json-array-of_lists": bytes_of(lambda: json.dumps(CHATS).encode(), "a.json"),
    "json-array": bytes_of(lambda: json.dumps([{"messages": chat} for chat in CHATS], indent=2).encode(), "a.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAT_CASES)
def test_every_conversation_of_a_file_is_read_as_it_was_written(case, tmp_path):
    CHAT_CASES[case](tmp_path)
    source = open_all(tmp_path, only_file(tmp_path), kind="chat")
    assert [item.messages for block in source.read() for item in block.items] == CHATS


@pytest.mark.full
def test_missing_texts_of_a_csv_are_empty_rows_and_not_bad(tmp_path):
    for number, write in enumerate(
        (pandas.DataFrame.to_csv, lambda rows, path: polars.from_pandas(rows).write_csv(path))
    ):
        write(pandas.DataFrame({"id": [1, 2, 3], "text": ["one", None, "three"]}), tmp_path / f"{number}.csv")
    source = open_all(tmp_path, "*.csv")
    blocks = list(source.read())
    assert [item.text for block in blocks for item in block.items] == ["one", "three"] * 2
    assert [block.empty_rows for block in blocks] == [1, 1]
    assert not any(block.bad_rows for block in blocks)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0"}, {"compression": "none", "use_dictionary": False}]
)
def test_a_page_with_a_wrong_checksum_is_named_and_not_trained_on(options, tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text number {n:05}" for n in range(3000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, write_page_checksum=True, **options)
    column = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + column.total_compressed_size - 100] ^= 1  # one bit, of a text or a code
    path.write_bytes(bytes(content))
    blocks = list(open_all(tmp_path, "a.parquet").read())
    assert {item.text for block in blocks for item in block.items} <= {*texts[:1000], *texts[2000:]}
    assert all("row group 1 is damaged" in bad for block in blocks for bad in block.bad_rows)
    assert sum(len(block.bad_rows) for block in blocks) == 1000


@pytest.mark.full
@pytest.mark.parametrize("chunk_chars", [3, 7, 50, 2**20])
def test_an_array_is_read_alike_wherever_its_chunks_end(chunk_chars, monkeypatch, tmp_path):
    monkeypatch.setattr(raw_rows, "CHUNK_CHARS", chunk_chars)
    rows = [
        {"text": 'a "b" \\ \u00e9 \U0001f600', "n": [1, -2.5e-7, True, None, {}]},
        {"t": ""},
        "\n",
        12345,
        -0.25,
        None,
        [],
        {"a": [[{"b": "]"}]]},
    ]
    for text in (
        json.dumps(rows),
        json.dumps(rows, indent=3, ensure_ascii=False),
        f" {json.dumps(rows, indent=1)}\r\n",
    ):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert [value for _, _, value in array_rows(tmp_path / "a.json")] == rows
        assert [row for _, row, _ in array_rows(tmp_path / "a.json", first_row=5)] == [5, 6, 7]


@pytest.mark.full
@pytest.mark.parametrize(
    "rows",
    [
        [[], [{"role": "user", "content": "?"}]],
        [[{"speaker": "a", "says": "b"}]] * 3,
        [["Hello?", "Hello!"]],
        [[{"from": "gpt", "value": "a"}]],
    ],
)
def test_lists_that_stand_in_lines_are_rows_and_no_array(rows, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [value for _, _, value in read_rows(tmp_path / "a.jsonl")] == rows


@pytest.mark.full
@pytest.mark.parametrize("chunk_chars", [2, 7, 2**20])
def test_an_array_that_ends_too_early_anywhere_is_called_cut_off(chunk_chars, monkeypatch, tmp_path):
    monkeypatch.setattr(raw_rows, "CHUNK_CHARS", chunk_chars)
    text = json.dumps([{"text": 'a "b" \\ \u00e9', "n": [1, -2.5e-7, True]}, 12345, None, "\n", [{}]], indent=1)
    for end in range(1, len(text)):
        (tmp_path / "a.json").write_text(text[:end])
        line = 1 + text[:end].count("\n")
        with pytest.raises(DataError, match=f"a.json:{line}: .*probably cut off"):
            list(array_rows(tmp_path / "a.json"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl", "a.arrow", "a.parquet"])
def test_a_large_file_is_read_in_little_memory(name, tmp_path):
    frame = pandas.DataFrame({"text": [f'"{n}" ' + "word, " * 100 for n in range(30_000)]})
    if name.endswith("json"):
        frame.to_json(tmp_path / name, orient="records")
    elif name.endswith("jsonl"):
        frame.to_json(tmp_path / name, orient="records", lines=True)
    elif name.endswith("csv"):
        frame.to_csv(tmp_path / name)
    elif name.endswith("parquet"):
        frame.to_parquet(tmp_path / name, compression=None, row_group_size=1_000_000)
    else:
        datasets.Dataset.from_pandas(frame).save_to_disk(tmp_path / "d")
        next((tmp_path / "d").glob("*.arrow")).rename(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 18_000_000
    tracemalloc.start()
    allocated = pa.total_allocated_bytes()
    try:
        for place, block in enumerate(read_blocks(tmp_path / name)):
            assert not any(isinstance(value, BadRow) for _, _, value in block)
            if place == 20:
                assert pa.total_allocated_bytes() - allocated < 8_000_000
        assert tracemalloc.get_traced_memory()[1] < 9_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.full
def test_an_array_that_breaks_behind_what_was_verified_stops_the_reading(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}] * 2000)[:-30])
    with pytest.raises(DataError, match=r"a.json:1: the JSON array cannot be read from its row 19\d\d on .*cut off"):
        list(read_rows(tmp_path / "a.json"))


@pytest.mark.full
def test_a_run_trains_on_files_of_several_programs_from_the_command_line(tmp_path, text_files, chat_files, warm):
    texts = docstrings(modules=60)
    write_parts = [
        lambda rows: rows.to_parquet(tmp_path / "pandas.parquet"),
        lambda rows: datasets.Dataset.from_pandas(rows).save_to_disk(tmp_path / "saved"),
        lambda rows: rows.to_csv(tmp_path / "pandas.csv"),
        lambda rows: rows.to_json(tmp_path / "array.json", orient="records", indent=2),
        lambda rows: polars.from_pandas(rows).write_parquet(tmp_path / "polars.parquet"),
        lambda rows: (tmp_path / "json.jsonl.zst").write_bytes(zstd(rows.to_json(orient="records", lines=True).encode())),
        lambda rows: (tmp_path / "words.md").write_text("\n\n".join(rows["text"]), newline="\r\n"),
    ]  # fmt: skip
    for number, write in enumerate(write_parts):
        write(pandas.DataFrame({"text": texts[number :: len(write_parts)]}))
    files = ["pandas.parquet", "saved/*.arrow", "pandas.csv", "array.json", "polars.parquet", "json.jsonl.zst", "words.md"]  # fmt: skip
    runner = WarmRunner(tmp_path, tmp_path / "cache", text_files, chat_files, warm)
    data = {
        "sources": [{"files": str(tmp_path / name)} for name in files],
        "validation": [{"files": str(text_files[2])}],
    }
    recipe = yaml.safe_load(runner.recipe("several", "gpt2").read_text())
    recipe["data"] |= data
    recipe["train"]["max_steps"] = 4
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(recipe))
    done = runner.train(tmp_path / "several.yaml")
    assert list(done.values("train/loss")) == [1, 2, 3, 4]
    manifest = (done.directory / "run_manifest.json").read_text()
    assert all(f'"label": "{Path(name).name}"' in manifest for name in files if "*" not in name)
    assert '"label": "data-00000-of-00001.arrow"' in manifest
