"""Wrong data files: each gets one message that names file, row and cure, and the status of its kind, before step 1."""

import gzip
import json
import os
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources

GOOD_LINES = [json.dumps({"text": f"Document number {n}."}) for n in range(40)]


def recipe(folder, files, *, text_column=None, max_bad_rows=0, **source):
    made = Recipe()
    made.path = str(folder / "recipe.yaml")
    made.data.cache_dir = str(folder / "cache")
    made.data.sources = [Source(files=files, text_column=text_column, **source)]
    made.data.max_bad_rows = max_bad_rows
    return made


def write_parquet(path, table, **options):
    pq.write_table(pa.table(table), path, **options)


def truncated(path, keep):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def no_file(folder):
    return "absent.jsonl", InputMissingError, ["'absent.jsonl' does not exist", "Looked in"]


def no_match(folder):
    return "corpus/*.parquet", InputMissingError, ["matches no file"]


def empty_folder(folder):
    (folder / "corpus").mkdir()
    return "corpus", InputMissingError, ["corpus has no readable file", "Readable are"]


def unknown_ending(folder):
    (folder / "a.xlsx").write_text("text\nhello\n")
    return "a.xlsx", RecipeError, ["a.xlsx", "Readable are"]


def table_by_columns(folder):
    pd.DataFrame({"text": ["one", "two"], "n": [1, 2]}).to_json(folder / "a.json")
    return "a.json", DataError, ["a.json is one JSON object of columns", "orient='records', lines=True"]


def zero_bytes(folder):
    (folder / "a.jsonl").touch()
    return "a.jsonl", DataError, ["a.jsonl is empty (0 bytes)"]


def zero_bytes_parquet(folder):
    (folder / "a.parquet").touch()
    return "a.parquet", DataError, ["a.parquet is empty (0 bytes)"]


def lfs_pointer(folder):
    (folder / "a.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    return "a.parquet", DataError, ["a.parquet is a git-lfs pointer", "git lfs pull"]


def html_page(folder):
    (folder / "a.jsonl").write_text("<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>\n")
    return "a.jsonl", DataError, ["a.jsonl looks like an HTML page (404 Not Found)", "Download it again"]


def xml_error_page(folder):
    (folder / "a.jsonl").write_text(
        '<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>no</Message></Error>'
    )
    return "a.jsonl", DataError, ["looks like an XML error page (AccessDenied)"]


def truncated_parquet(folder):
    write_parquet(folder / "a.parquet", {"text": [f"document {n}" * 50 for n in range(200)]})
    truncated(folder / "a.parquet", 0.7)
    return "a.parquet", DataError, ["a.parquet is truncated", "footer"]


def damaged_page(folder):
    path = folder / "a.parquet"
    write_parquet(path, {"text": [f"document {n} {os.urandom(40).hex()}" for n in range(300)]}, compression="zstd")
    content = bytearray(path.read_bytes())
    content[60:400] = bytes(340)
    path.write_bytes(bytes(content))
    return "a.parquet", DataError, ["a.parquet is damaged: row group 0 is damaged"]


def not_parquet(folder):
    (folder / "a.parquet").write_text("\n".join(GOOD_LINES))
    return "a.parquet", DataError, ["ends in .parquet and is no such file"]


def no_rows(folder):
    write_parquet(folder / "a.parquet", {"text": pa.array([], pa.string())})
    return "a.parquet", DataError, ["a.parquet has no rows"]


def renamed_column(folder):
    write_parquet(folder / "a.parquet", {"essay": ["hello there"] * 4, "id": [1, 2, 3, 4]})
    return "a.parquet", DataError, ["has no column 'text'; found: essay, id", "Set text_column: essay"]


def renamed_key(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"content": "hello", "body": "x"}) + "\n" for _ in range(5)))
    said = (
        "has no column 'text'; found: content, body. content and body could each be the text. Set text_column: content"
    )
    return "a.jsonl", DataError, [said]


def integer_column(folder):
    write_parquet(folder / "a.parquet", {"text": [1, 2, 3]})
    return "a.parquet", DataError, ["column 'text' of type int64, not text"]


def list_column(folder):
    write_parquet(folder / "a.parquet", {"text": [["a"], ["b"]]})
    return "a.parquet", DataError, ["column 'text' of type list"]


def null_column(folder):
    write_parquet(folder / "a.parquet", {"text": pa.nulls(3)})
    return "a.parquet", DataError, ["column 'text' of type null"]


def null_in_a_row(folder):
    (folder / "a.jsonl").write_text("\n".join([*GOOD_LINES[:6], '{"text": null}', *GOOD_LINES[7:]]) + "\n")
    return "a.jsonl", DataError, ["a.jsonl:7: the text is null, not text", "data.max_bad_rows"]


def number_in_a_row(folder):
    (folder / "a.jsonl").write_text("\n".join(['{"text": 3}', *GOOD_LINES]) + "\n")
    return "a.jsonl", DataError, ["a.jsonl:1: the text is int, not text"]


def blank_lines_only(folder):
    (folder / "a.jsonl").write_text("\n \n\n")
    return "a.jsonl", DataError, ["a.jsonl holds blank lines only"]


def cut_last_line(folder):
    (folder / "a.jsonl").write_text("\n".join([*GOOD_LINES, '{"text": "the rest is miss']))
    return "a.jsonl", DataError, ["a.jsonl:41: is not JSON", "probably cut off"]


def cut_last_line_of_a_long_file(folder):
    (folder / "a.jsonl").write_text("\n".join([*(GOOD_LINES * 20), '{"text": "the rest is miss']))
    return "a.jsonl", DataError, ["a.jsonl:801: is not JSON", "probably cut off"]


def invalid_utf8(folder):
    (folder / "a.jsonl").write_bytes("\n".join(GOOD_LINES[:3]).encode() + b'\n{"text": "caf\xe9"}\n')
    return "a.jsonl", DataError, ["a.jsonl:4: is not UTF-8", "0xe9"]


def utf16(folder):
    (folder / "a.txt").write_bytes("hello".encode("utf-16"))
    return "a.txt", DataError, ["a.txt is UTF-16 text", "iconv"]


def binary_text(folder):
    (folder / "a.txt").write_bytes(b"abc\0def" * 100)
    return "a.txt", DataError, ["a.txt is no text"]


def invalid_utf8_text(folder):
    (folder / "a.txt").write_bytes(b"first line\nsecond caf\xe9 line\n")
    return "a.txt", DataError, ["a.txt: is not UTF-8 (line 2)", "iconv -f"]


def a_folder_of_archives(folder):
    (folder / "corpus").mkdir()
    (folder / "corpus" / "texts.zip").write_bytes(b"PK")
    return "corpus", RecipeError, ["corpus has archives, which are not unpacked: texts.zip", "Unpack them"]


def truncated_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(GOOD_LINES * 200).encode()))
    truncated(folder / "a.jsonl.gz", 0.5)
    return "a.jsonl.gz", DataError, ["a.jsonl.gz is truncated or damaged"]


def plain_text_named_gzip(folder):
    (folder / "a.jsonl.gz").write_text("\n".join(GOOD_LINES))
    return "a.jsonl.gz", DataError, ["ends in .gz and is no such file"]


def error_page_inside_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"<html><head><title>Sign in</title></head></html>"))
    return "a.jsonl.gz", DataError, ["HTML page (Sign in)"]


def unterminated_array(folder):
    (folder / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=1)[:-1])
    return "a.json", DataError, ["a.json:8: the JSON array cannot be read from its row 2 on", "probably cut off"]


def array_without_a_comma(folder):
    (folder / "a.json").write_text('[{"text": "one"} {"text": "two"}]')
    return "a.json", DataError, ["a.json:1: the JSON array", "a comma is missing"]


def csv_with_an_open_quote(folder):
    (folder / "a.csv").write_text('id,text\n1,good\n2,"never closed\n3,good\n')
    return "a.csv", DataError, ["a.csv:3: the csv cannot be read", "a quote is never closed"]


def csv_with_bare_commas(folder):
    (folder / "a.csv").write_text("id,text\n1,good\n2,one, two\n")
    return "a.csv", DataError, ["a.csv row 1: has 3 fields, and the header has 2 (line 3)", "must stand in quotes"]


def truncated_arrow(folder):
    with pa.ipc.new_stream(str(folder / "a.arrow"), pa.schema({"text": pa.string()})) as writer:
        for _ in range(3):
            writer.write_table(pa.table({"text": GOOD_LINES}))
    truncated(folder / "a.arrow", 0.6)
    return "a.arrow", DataError, ["a.arrow is truncated or damaged: record batch 1 cannot be read"]


def no_json_at_all(folder):
    (folder / "a.jsonl").write_text("Once upon a time\nthere was a text\n")
    return "a.jsonl", DataError, ["none of its first 2 lines can be read", "one JSON object a line"]


def half_a_surrogate_pair(folder):
    (folder / "a.jsonl").write_text("\n".join([*GOOD_LINES, '{"text": "half \\ud83d of a face"}']) + "\n")
    return "a.jsonl", DataError, ["a.jsonl:41: holds half of a surrogate pair (U+D83D)"]


CASES = [
    no_file, no_match, empty_folder, unknown_ending, table_by_columns, zero_bytes, zero_bytes_parquet, lfs_pointer, html_page, xml_error_page, truncated_parquet,
    damaged_page, not_parquet, no_rows, renamed_column, renamed_key, integer_column, list_column, null_column, null_in_a_row, number_in_a_row,
    blank_lines_only, cut_last_line, cut_last_line_of_a_long_file, invalid_utf8, utf16, binary_text, invalid_utf8_text, truncated_gzip,
    plain_text_named_gzip, error_page_inside_gzip, unterminated_array, array_without_a_comma, csv_with_an_open_quote, csv_with_bare_commas, truncated_arrow,
    no_json_at_all, half_a_surrogate_pair,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_wrong_file_is_named_with_its_reason_before_anything_is_read(case, tmp_path):
    files, error, said = case(tmp_path)
    with pytest.raises(error) as caught:
        open_sources(recipe(tmp_path, files).source_settings())
    assert type(caught.value) is error
    for text in said:
        assert text in str(caught.value)
    assert "Traceback" not in str(caught.value)
    # Nothing was kept that would let a second start pass.
    with pytest.raises(error):
        open_sources(recipe(tmp_path, files).source_settings())


def test_all_problems_of_all_files_are_reported_at_once(tmp_path):
    (tmp_path / "a.jsonl").touch()
    html_page(tmp_path)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    zero_bytes(tmp_path)
    blank = tmp_path / "c.jsonl"
    blank.write_text("\n\n")
    (tmp_path / "d.jsonl").write_text("\n".join(GOOD_LINES))
    with pytest.raises(DataError) as caught:
        open_sources(recipe(tmp_path, "*.jsonl").source_settings())
    message = str(caught.value)
    assert message.startswith("3 problems")
    assert "a.jsonl is empty" in message
    assert "b.jsonl looks like an HTML page" in message
    assert "c.jsonl holds blank lines only" in message


def test_all_missing_sources_are_reported_together_with_their_recipe_places(tmp_path):
    made = recipe(tmp_path, "one.jsonl")
    made.data.sources.append(Source(files=["two.parquet", "three/*.txt"]))
    with pytest.raises(InputMissingError) as caught:
        open_sources(made.source_settings())
    for text in (
        "recipe.yaml: data.sources[0].files: 'one.jsonl'",
        "data.sources[1].files: 'two.parquet'",
        "'three/*.txt' matches no file",
    ):
        assert text in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(GOOD_LINES))
    path.chmod(0)
    with pytest.raises(DataError, match="may not be read"):
        open_sources(recipe(tmp_path, "a.jsonl").source_settings())


def test_bad_rows_that_the_recipe_tolerates_are_left_out_and_named(tmp_path):
    null_in_a_row(tmp_path)
    train, validation = open_sources(recipe(tmp_path, "a.jsonl", max_bad_rows=1).source_settings())
    blocks = [block for source in train + validation for block in source.read()]
    assert sum(len(block.items) for block in blocks) == len(GOOD_LINES) - 1
    assert [bad.split("/")[-1] for block in blocks for bad in block.bad_rows] == [
        "a.jsonl:7: the text is null, not text"
    ]


def test_a_column_of_csv_that_is_not_read_may_be_anything(tmp_path):
    lines = [b"Document number %d.,caf\xe9\n" % n for n in range(40)]
    (tmp_path / "a.csv").write_bytes(b"text,place\n" + b"".join(lines))
    train, validation = open_sources(recipe(tmp_path, "a.csv", text_column="text").source_settings())
    assert sum(len(block.items) for source in train + validation for block in source.read()) == 40


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(GOOD_LINES).encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    train, validation = open_sources(recipe(tmp_path, ["a.jsonl", "b.txt"]).source_settings())
    texts = [item.text for source in train + validation for block in source.read() for item in block.items]
    assert "Document number 0." in texts
    assert "one\ntwo" in texts


@pytest.mark.parametrize("source", [{}, {"columns": {"prompt": "instruction", "response": "output"}}])
def test_a_text_file_among_conversations_is_refused_before_step_1(source, tmp_path):
    rows = [json.dumps({"instruction": f"Count to {n}.", "output": "one"}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "notice.txt").write_text("You may copy this.")
    with pytest.raises(
        DataError, match=r"notice.txt is plain text and has no column 'instruction'\. .* or leave it out"
    ):
        open_sources(replace(recipe(tmp_path, ["a.jsonl", "notice.txt"], **source).source_settings(), kind="chat"))


def test_bad_rows_in_the_middle_of_a_file_are_found_when_reached(tmp_path):
    lines = [json.dumps({"text": f"Document number {n}."}) for n in range(3000)]
    lines[1500] = '{"text": broken}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "z.jsonl").write_text("\n".join(GOOD_LINES))
    train, _ = open_sources(recipe(tmp_path, "*.jsonl").source_settings())
    blocks = list(train[0].read())
    assert [len(block.bad_rows) for block in blocks] == [0, 1, 0]
    assert "a.jsonl:1501: is not JSON" in blocks[1].bad_rows[0]
    assert sum(len(block.items) for block in blocks) == 2999


def test_a_damaged_row_group_in_the_middle_costs_only_its_rows(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"document {n} {os.urandom(30).hex()}" for n in range(3000)]
    write_parquet(path, {"text": texts}, row_group_size=1000, compression="zstd", use_dictionary=False)
    column = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 400] = bytes(400)
    path.write_bytes(bytes(content))
    (tmp_path / "z.jsonl").write_text("\n".join(GOOD_LINES))
    train, _ = open_sources(recipe(tmp_path, ["a.parquet", "z.jsonl"]).source_settings())
    blocks = list(train[0].read())
    kept = {item.row for block in blocks for item in block.items}
    assert kept >= set(range(1000)) | set(range(2000, 3000))
    bad = [row for block in blocks for row in block.bad_rows]
    assert len(bad) == 3000 - len(kept)
    assert bad
    assert "row group 1 is damaged" in bad[0]


def test_a_file_changed_after_it_was_verified_is_not_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD_LINES))
    (tmp_path / "b.jsonl").write_text("\n".join(GOOD_LINES[:9]))
    train, _ = open_sources(recipe(tmp_path, "*.jsonl").source_settings())
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD_LINES[:30]))
    with pytest.raises(DataError, match="was changed since it was verified"):
        list(train[0].read())
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputMissingError, match="is gone"):
        list(train[0].read())


def test_an_export_around_its_messages_is_refused_by_their_key(tmp_path):
    rows = [{"date": "2025-05-01T09:00", "from": "Ben", "text": "Hi"}] * 40
    (tmp_path / "export.json").write_text(json.dumps({"name": "Ben", "messages": rows}, indent=1))
    made = recipe(tmp_path, str(tmp_path / "export.json"), text_column="text")
    with pytest.raises(DataError, match="its rows are the 40 of its key 'messages' \\(with date, from, text\\)"):
        open_sources(made.source_settings())
