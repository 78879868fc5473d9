"""Generated data files with odd rows, through all that reads them: recognition, reading, splits, packing into shards, the preview.

An exception that is no TandemError is a defect, and so is a row that is neither read nor named bad nor counted as empty, a text that is
read as another one, and a document or conversation that no shard counts.
"""

import argparse
import csv
import datetime
import decimal
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from pipeline.data.preview import preview
from pipeline.data.shard_writer import ShardWriter
from pipeline.data.shards import end_path, read_seal
from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from pipeline.sources.raw_rows import count_rows, is_array
from pipeline.tokenizer.train import train_bpe
from tests.hostile import random_inputs as st

ROW_TOKENS = 48
IN_MEMORY = "/dev/shm"  # an fsync of a disk takes longer than all that is looked at
ODD_TEXTS = ["", " ", "\n", "\0", "a\0b", "\ufeff", "\ufffe", "\ufdd0", "\u2028", "\x85", "\r", "a\rb", "a\r\nb", "<|endoftext|>", "<|user_start|>", "<|assistant_end|>", "NaN", "null", "NA", "\u202e", "e\u0301" * 9, "\U0001f468\u200d\U0001f469", '"', '""', "a,b", "a;b", "a\tb", "'", "\\", "\\n", "{}", "[]", '{"role": "user"}', "x" * 5_000, "\x1b[31m", "=1+1", "\ud800", "\udfff a", "\udc0d"]  # fmt: skip
# As they stand in a JSON file: no writer of ours makes them.
RAW_VALUES = ["NaN", "Infinity", "-Infinity", "1e999", "-0", "1" * 5_000, "1" * 400, "1." + "3" * 4_400, '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"a\x01b"', "[" * 2_000 + "]" * 2_000, "[" * 100_000, '{"a":' * 3_000 + "1" + "}" * 3_000, '"' + "k" * 70_000 + '"', "tru", "01", "'a'", "{}", "[]", "null", "true", "0.1", '"a"', '["a", "b"]', '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]']  # fmt: skip
RAW_LINES = ["", " ", "\t", "[]", "{}", "null", "true", "7", '"text"', "{", "}", '{"text": "a"', '{"text": "a"} {"text": "b"}', '{"text": "a"},', "\ufeff" + '{"text": "a"}', "// a comment", "{'text': 'a'}", '{"text": "a", "text": "b"}', '{"messages": [], "messages": 7}', '{"": "a"}', '{"text": "a", "' + "k" * 70_000 + '": 1}', "\0\0\0\0", '["a", "b"]', '[{"role": "user", "content": "q"}]', '{"text"\r: "a"}']  # fmt: skip
RAW_BYTES = [
    b'{"text": "\xff\xfe"}',
    b"\xff\xfe{\x00}\x00",
    b"\x80",
    b'{"text": "caf\xe9"}',
    b"\x1f\x8b\x08\x00",
    b"PAR1",
]
ROLES = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "User", "", "developer", None, 7, ["user"], {"role": "user"}]  # fmt: skip
NAMES = ["text", "content", "messages", "conversations", "prompt", "response", "instruction", "input", "output", "question", "answer", "chosen", "rejected", "completion", "label", "system", "history", "role", "id", "", "Text", "a b", "message_id", "parent_id", "replies", "rank", "turns", "tree"]  # fmt: skip

odd_text = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=40), st.text(alphabet="ab \n", max_size=300))
good_text = st.text(alphabet="abcdefgh ", min_size=1, max_size=200)
number = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.integers(0, 9))
plain = st.one_of(st.none(), number, odd_text, good_text)
value = st.recursive(plain, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(NAMES), odd_text), inner, max_size=4)))  # fmt: skip
part = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image", None, 7])}, optional={"text": plain}), value
)
call = st.one_of(st.fixed_dictionaries({"function": st.one_of(st.fixed_dictionaries({"name": plain}, optional={"arguments": value}), value)}, optional={"type": plain, "id": plain}), value)  # fmt: skip
turn = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES[:2]), "content": good_text}),
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.one_of(plain, st.lists(part, max_size=3), value)}, optional={"tool_calls": st.one_of(st.lists(call, max_size=2), value), "name": plain, "tool_call_id": plain}),
    st.fixed_dictionaries({"from": st.sampled_from(ROLES), "value": plain}),
    st.fixed_dictionaries({"input": plain, "output": plain}),
    value,
)  # fmt: skip
GOOD_TALK = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "it is this"}]
talk = st.one_of(st.just(GOOD_TALK), st.lists(turn, max_size=5), value)
column = st.one_of(st.sampled_from(NAMES), st.sampled_from(NAMES[:6]), odd_text)
chat_row = st.fixed_dictionaries({"messages": talk}, optional={"system": plain, "text": plain, "history": value})
text_row = st.fixed_dictionaries(
    {"text": st.one_of(good_text, odd_text, value)}, optional={"id": value, "content": plain}
)
pair_row = st.fixed_dictionaries({"prompt": st.one_of(odd_text, good_text, talk), "response": st.one_of(odd_text, good_text, talk)}, optional={"system": value, "history": value, "context": value})  # fmt: skip
tree_row = st.fixed_dictionaries({"message_id": plain, "role": plain, "text": plain, "replies": value})
any_row = st.dictionaries(column, value, max_size=5)
row = st.one_of(text_row, chat_row, pair_row, tree_row, any_row)
good_text_row = st.fixed_dictionaries({"text": good_text}, optional={"id": st.integers(0, 9)})
good_chat_row = st.builds(lambda text, more: {"messages": [*(GOOD_TALK * more)[:-1], {"role": "assistant", "content": text + "a"}]}, good_text, st.integers(1, 3))  # fmt: skip
good_pair_row = st.fixed_dictionaries({"prompt": good_text.map("q".__add__), "response": good_text.map("a".__add__)})
# By form: whole rows, odd ones of the form, the stage, and the keys of a source that fit it.
FORMS: dict[str, tuple[Any, Any, str, list[dict[str, Any]]]] = {
    "text": (good_text_row, text_row, "pretrain", [{}, {}, {"text_column": "text"}, {"columns": {"text": "text"}}, {"format": "text"}]),
    "chat": (good_chat_row, chat_row, "sft", [{}, {}, {"messages_column": "messages"}, {"columns": {"messages": "messages", "system": "system"}}, {"format": "messages"}]),
    "pair": (good_pair_row, pair_row, "sft", [{}, {}, {"columns": {"prompt": "prompt", "response": "response"}}, {"columns": {"prompt": "prompt", "response": "response", "system": "system", "context": "context"}}, {"format": "prompt_response"}]),
    "tree": (good_chat_row, tree_row, "sft", [{}]),
    "any": (any_row, any_row, "pretrain", [{}, {"text_column": "text"}, {"text_column": ""}]),
}  # fmt: skip
raw_line = st.one_of(
    st.sampled_from(RAW_LINES).map(str.encode),
    st.sampled_from(RAW_BYTES),
    st.builds(lambda name, raw: f'{{"{name}": {raw}}}'.encode(), st.sampled_from(NAMES), st.sampled_from(RAW_VALUES)),
    st.builds(lambda raw, after: f'{{"text": "a text", "x": {raw}{after}'.encode(), st.sampled_from(RAW_VALUES), st.sampled_from(["}", "}", ""])),
    st.builds(lambda raw: f'{{"messages": [{{"role": "user", "content": {raw}}}, {{"role": "assistant", "content": "a"}}]}}'.encode(), st.sampled_from(RAW_VALUES)),
)  # fmt: skip
special = st.sampled_from([datetime.date(2024, 2, 29), datetime.datetime(1, 1, 1), datetime.timedelta(days=9), decimal.Decimal("1.10"), b"bytes \xff", datetime.time(1, 2)])  # fmt: skip


@st.composite
def data_files(draw: Callable) -> dict[str, Any]:
    """kind of the file, its rows (dicts, or bytes of a line), the keys of the source, and how strict the recipe is."""
    kind = draw(st.sampled_from(["jsonl", "jsonl", "raw", "json", "csv", "parquet", "arrow", "feather", "folder"]))
    whole, odd, stage, fitting = FORMS[draw(st.sampled_from(["text", "text", "chat", "chat", "pair", "tree", "any"]))]
    several = st.lists(st.one_of(whole, whole, odd, st.one_of(odd, row)), min_size=1, max_size=24)
    rows: list[Any] = [*draw(st.lists(whole, max_size=3)), *draw(several)]
    if kind == "raw":
        between = draw(st.lists(raw_line, min_size=1, max_size=4))
        rows = [json.dumps(row).encode() for row in rows]
        for number, line in enumerate(between):
            rows.insert(draw(st.integers(0, len(rows))) if number else 0, line)
    if kind in ("parquet", "arrow", "feather") and draw(st.booleans()):
        rows = [row | {"extra": draw(special)} for row in rows]
    others = [keys for *_, all_keys in FORMS.values() for keys in all_keys]
    chosen = draw(st.sampled_from(fitting if draw(st.integers(0, 4)) else others))
    if not draw(st.integers(0, 9)):
        stage = "sft" if stage == "pretrain" else "pretrain"
    return {"kind": kind, "rows": rows, "settings": json.loads(json.dumps(chosen)), "stage": stage, "max_bad_rows": draw(st.sampled_from([0, *[10**6] * 7]))}  # fmt: skip


class Campaign:
    """Runs files and counts what became of their rows."""

    def __init__(self, folder: Path):
        self.folder, self.counts, self.defects = folder, Counter(), []
        self.tokenizer = train_bpe([], vocab_size=272, split_pattern="gpt2")

    def run(self, case: dict[str, Any]) -> None:
        self.counts["files"] += 1
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            files = written(case, folder)
            if files is None:
                self.counts["no such file can be written"] += 1
                return
            self.counts["rows"] += len(case["rows"])
            self._allowing(case, "refused", lambda: self._read(case, files, folder))
            self._allowing(case, "refused by the preview", lambda: self._look(case, files, folder))
        except AssertionError as error:
            self._defect(case, str(error))
        except Exception:
            self._defect(case, traceback.format_exc(limit=-6))
        finally:
            shutil.rmtree(folder)

    def _allowing(self, case: dict[str, Any], name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except TandemError as error:
            self.counts[name] += 1
            if not str(error).strip() or not is_characters(str(error)):
                self._defect(case, f"no sentence: {error!s:.200}")

    def _read(self, case: dict[str, Any], files: Path, folder: Path) -> None:
        recipe = recipe_of(case, files, folder)
        (source,), _ = open_sources(recipe.source_settings())
        blocks = list(source.read())
        items = [item for block in blocks for item in block.items]
        bad, empty = sum(len(block.bad_rows) for block in blocks), sum(block.empty_rows for block in blocks)
        there = sum(count_rows(file.path) - blank_lines(file.path) for file in source.files)
        assert len(items) + bad + empty == there, f"{there} rows, {len(items)} read, {bad} bad, {empty} empty"
        self.counts.update(read=len(items), bad=bad, empty=empty)
        self._must_be_what_was_written(case, source, items)
        counts = packed(source, self.tokenizer, folder / "shards", case["stage"])
        kept = counts["read"]
        if case["stage"] == "sft":
            refused = len(counts["bad_rows"]) - bad
            assert kept["conversations"] + refused == len(items), f"{len(items)} conversations, {kept}, {refused} bad"
        else:
            assert kept["documents"] == len(items), f"{len(items)} documents, {kept}"
        assert kept["empty_rows"] >= empty

    def _must_be_what_was_written(self, case: dict[str, Any], source: Any, items: list) -> None:
        """Every text that was written as one and is not white space alone is read, unchanged."""
        column = source.format.column
        if source.kind != "text" or source.format.name != "text" or case["kind"] not in ("jsonl", "json", "parquet", "arrow"):  # fmt: skip
            return
        texts = [row.get(column) for row in case["rows"] if isinstance(row, dict)]
        wanted = [text for text in texts if isinstance(text, str) and text.strip() and is_characters(text)]
        assert [item.text for item in items] == wanted, f"{[item.text for item in items]!r} of {wanted!r}"

    def _look(self, case: dict[str, Any], files: Path, folder: Path) -> None:
        os.environ["TANDEM_CACHE"] = str(folder / "preview")
        keys = [f"{key}={json.dumps(value)}" for key, value in case["settings"].items()]
        lines = list(preview(str(files), keys, tokenizer=None, rows=2, colour=False))
        assert lines
        self.counts["looked at"] += 1

    def _defect(self, case: dict[str, Any], what: str) -> None:
        self.counts["defects"] += 1
        self.defects.append(f"{what}\n  {str(case)[:2_000]}")


def recipe_of(case: dict[str, Any], files: Path, folder: Path) -> Recipe:
    recipe = Recipe()
    recipe.stage, recipe.path = case["stage"], str(folder / "recipe.yaml")
    place = {"id": str(files)} if files.is_dir() else {"files": str(files)}
    recipe.data.sources, recipe.data.validation = [Source(**place, **case["settings"])], []
    recipe.data.cache_dir, recipe.data.max_bad_rows = str(folder / "cache"), case["max_bad_rows"]
    return recipe


def packed(source: Any, tokenizer: Any, folder: Path, stage: str) -> dict[str, Any]:
    """What the shards count, all of them made."""
    common = {"kind": source.kind, "bos": tokenizer.bos_token_id, "pad": 0, "dtype": "uint16", "row_tokens": ROW_TOKENS, "packing_documents": 8, "shard_rows": 4}  # fmt: skip
    packing = {"max_row_overflow": "cut"} if stage == "sft" else {"packing": "best_fit_crop"}
    writer = ShardWriter(folder, source=source, tokenizer=tokenizer, settings=common | packing)
    while writer.extend():
        pass
    end = json.loads(end_path(folder).read_text())
    seals = [read_seal(folder, number) for number in range(end["shards"])]
    return {"read": end["read"], "bad_rows": [line for seal in [*seals, end] for line in seal["bad_rows"]]}


def written(case: dict[str, Any], folder: Path) -> Path | None:
    """The file or folder; None where the writer of that kind has no such rows."""
    kind, rows = case["kind"], case["rows"]
    path = folder / f"data.{'jsonl' if kind in ('raw', 'folder') else kind}"
    try:
        if kind == "raw":
            path.write_bytes(b"\n".join(rows) + b"\n")
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "json":
            path.write_text(json.dumps(rows, indent=1 if len(rows) % 2 else None))
        elif kind == "csv":
            path.write_bytes(csv_of(rows).encode())
        elif kind == "folder":
            path = folder / "set"
            path.mkdir()
            for split, part_of_rows in (("train", rows), ("test", rows[:1])):
                (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part_of_rows))
        else:
            write_table(table_of(rows), path, kind)
    except (ValueError, TypeError, OverflowError, UnicodeEncodeError, pa.ArrowException, csv.Error):
        return None
    return path


def csv_of(rows: list[dict]) -> str:
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = {str(name): cell for name, cell in row.items()}
        writer.writerow([cells.get(name) if isinstance(cells.get(name), str | None) else json.dumps(cells[name]) for name in names])  # fmt: skip
    return text.getvalue()


def table_of(rows: list[dict]) -> pa.Table:
    """A table of the rows that can stand in one with the first: a column has one type."""
    fitting = rows[:1]
    for one in rows[1:]:
        try:
            pa.Table.from_pylist([*fitting, one])
            fitting.append(one)
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            continue
    rows[:] = fitting
    names = list(dict.fromkeys(name for one in rows for name in one))
    return pa.Table.from_pylist([{name: one.get(name) for name in names} for one in rows])


def write_table(table: pa.Table, path: Path, kind: str) -> None:
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=2)
    elif kind == "feather":
        pa.feather.write_feather(table, str(path))
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)


def blank_lines(path: Path) -> int:
    if path.suffix != ".jsonl" or is_array(path):
        return 0
    return sum(line.isspace() for line in path.read_bytes().split(b"\n")[:-1] for line in [line + b"\n"])


def is_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def run(count: int, seed: int) -> dict[str, Any]:
    """Run files until `count` rows have been written; their counts, and `defects` as a list."""
    logging.disable(logging.WARNING)
    before = os.environ.get("TANDEM_CACHE")
    random, cases = Random(seed), data_files()
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None) as folder:
        campaign = Campaign(Path(folder))
        while campaign.counts["rows"] < count:
            campaign.run(cases.draw(random))
    logging.disable(logging.NOTSET)
    os.environ.pop("TANDEM_CACHE", None)
    if before is not None:
        os.environ["TANDEM_CACHE"] = before
    return {**campaign.counts, "defects": campaign.defects}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.generated_rows", description=__doc__)
    parser.add_argument("count", type=int, help="rows")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="another one makes other rows")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(argv)
    started, found = time.monotonic(), Counter()
    shares = [(asked.count // asked.processes + 1, asked.seed * 1000 + number) for number in range(asked.processes)]
    results = st.in_processes(run, shares)
    defects = [defect for one in results for defect in one.pop("defects")]
    for one in results:
        found.update(one)
    for defect in defects:
        print(defect, "\n")
    seconds = time.monotonic() - started
    print(f"{dict(found)}, {len(defects)} defects in {seconds:.0f} s: {found['rows'] / seconds:.0f} rows a second")
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
