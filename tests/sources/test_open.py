"""Order, held-out files and rows, cursors, fingerprints."""

import gzip
import json
import os
import pickle
import random
from dataclasses import replace

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.process.errors import DataError, RecipeError
from pipeline.recipe.schema import Recipe, Source, with_values
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.holdout import is_held_out, period_of
from pipeline.sources.open import open_sources, with_recorded_inputs
from pipeline.sources.raw_rows import BLOCK_ROWS

WORDS = ["the", "model", "reads", "a", "row", "and", "learns", "what", "comes", "next", "in", "it"]


def text(seed):
    draw = random.Random(seed)
    return f"{seed}: " + " ".join(draw.choices(WORDS, k=20))


def write_jsonl(path, rows, *, start=0):
    content = "".join(json.dumps({"text": text(start + n)}) + "\n" for n in range(rows)).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def recipe(folder, *sources, validation=None, seed=42):
    made = Recipe()
    made.path = str(folder / "recipe.yaml")
    made.data.cache_dir = str(folder / "cache")
    made.data.sources = list(sources)
    made.data.validation = validation
    made.train["seed"] = seed
    return made


def with_inputs(made: Recipe, inputs: dict) -> Recipe:
    return with_values(made, {"data": with_recorded_inputs(made.data, inputs)})


def items(source):
    return [item for block in source.read() for item in block.items]


@pytest.fixture
def corpus(tmp_path):
    for n in range(6):
        write_jsonl(tmp_path / f"part-{n}.jsonl", 30, start=100 * n)
    return tmp_path


def test_the_last_file_in_sorted_order_is_held_out_from_training(corpus):
    train, validation = open_sources(recipe(corpus, Source(files="part-*.jsonl")).source_settings())
    assert sorted(file.label for file in train[0].files) == [f"part-{n}.jsonl" for n in range(5)]
    assert [file.label for file in validation[0].files] == ["part-5.jsonl"]
    assert not {item.text for item in items(train[0])} & {item.text for item in items(validation[0])}


def test_the_seed_alone_decides_the_order_of_the_files(corpus):
    def order(seed):
        (train,), _ = open_sources(recipe(corpus, Source(files="part-*.jsonl"), seed=seed).source_settings())
        return [file.label for file in train.files]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 3
    assert all(sorted(order(seed)) == sorted(order(1)) for seed in range(8))


def test_the_order_is_the_same_in_every_version():
    # An order that changes between versions makes every resume and every cached shard another one.
    from pipeline.sources.files import SourceFile
    from pipeline.sources.source import permuted

    assert [file.label for file in permuted([SourceFile(label=str(n)) for n in range(8)], key="42 0")] == list(
        "46035721"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt"])
def test_reading_goes_on_exactly_behind_any_block(name, tmp_path):
    if name == "a.parquet":
        # Row groups that neither divide a block nor are divided by it.
        pq.write_table(pa.table({"text": [text(n) for n in range(5000)]}), tmp_path / name, row_group_size=700)
    elif name == "a.txt":
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(text(n) for n in range(5000)))
    else:
        write_jsonl(tmp_path / name, 5000)
    write_jsonl(tmp_path / "b.jsonl", 1500, start=10_000)
    write_jsonl(tmp_path / "z.jsonl", 10)
    train, _ = open_sources(recipe(tmp_path, Source(files=[name, "b.jsonl", "z.jsonl"])).source_settings())
    blocks = list(train[0].read())
    assert [len(block.items) for block in blocks if block.file == blocks[0].file][:-1] == [BLOCK_ROWS] * (
        len([b for b in blocks if b.file == blocks[0].file]) - 1
    )
    assert len({item.text for block in blocks for item in block.items}) == 6500
    for place, block in enumerate(blocks):
        assert [b.items for b in train[0].read(file=block.file, block=block.index)] == [
            b.items for b in blocks[place:]
        ]
        assert [b.items for b in train[0].read(file=block.file, block=block.index + 1)] == [
            b.items for b in blocks[place + 1 :]
        ]


def test_blank_lines_do_not_shift_blocks_or_line_numbers(tmp_path):
    lines = [json.dumps({"text": text(n)}) if n % 3 else "" for n in range(4000)]
    lines[1024:2048] = [""] * 1024
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_jsonl(tmp_path / "z.jsonl", 10)
    train, _ = open_sources(recipe(tmp_path, Source(files=["a.jsonl", "z.jsonl"])).source_settings())
    blocks = list(train[0].read())
    assert [block.index for block in blocks] == [0, 1, 2, 3]
    assert not blocks[1].items
    for block in blocks:
        assert all(
            json.loads(lines[item.row])["text"] == item.text and item.row // BLOCK_ROWS == block.index
            for item in block.items
        )


def test_rows_without_text_are_counted_and_are_no_fault(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " \\n"}\n' + json.dumps({"text": text(1)}) + "\n")
    write_jsonl(tmp_path / "z.jsonl", 10)
    train, _ = open_sources(recipe(tmp_path, Source(files=["a.jsonl", "z.jsonl"])).source_settings())
    block = next(train[0].read())
    assert (len(block.items), block.empty_rows, block.bad_rows) == (1, 2, [])


@pytest.mark.parametrize("rows", [2, 15, 16, 100, 799, 5000])
def test_a_single_file_is_split_by_rows_that_cover_it_without_overlap(rows, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", rows)
    train, validation = open_sources(recipe(tmp_path, Source(files="a.jsonl")).source_settings())
    trained, held = {item.row for item in items(train[0])}, {item.row for item in items(validation[0])}
    assert trained
    assert held
    assert not trained & held
    assert trained | held == set(range(rows))
    assert len(held) >= min(8, rows // 2)
    assert rows < 800 or len(held) <= 0.011 * rows


def test_the_headlines_of_a_split_file_say_which_rows_are_whose(tmp_path):
    write_jsonl(tmp_path / "one.jsonl", 40)
    train, held_out = open_sources(recipe(tmp_path, Source(files=str(tmp_path / "one.jsonl"))).source_settings())
    assert train[0].headline().endswith(", all but one row of 5")
    assert held_out[0].headline().endswith(", one row of 5 of it")


def test_held_out_rows_are_not_the_same_place_of_every_period():
    assert len({row % 100 for row in range(100_000) if is_held_out(row, 100)}) > 90
    assert period_of(1) == 0


def test_a_single_file_of_one_row_cannot_be_split_and_says_so(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", 1)
    with pytest.raises(DataError, match=r"a.jsonl has 1 row .* data.validation"):
        open_sources(recipe(tmp_path, Source(files="a.jsonl")).source_settings())


def test_the_same_content_in_training_and_validation_is_refused_whatever_its_name(corpus):
    (corpus / "held").mkdir()
    (corpus / "held" / "other.jsonl").write_bytes((corpus / "part-2.jsonl").read_bytes())
    made = recipe(corpus, Source(files="part-*.jsonl"), validation=[Source(files="held")])
    with pytest.raises(DataError, match=r"other.jsonl of held \(validation\) has the same content as part-2.jsonl"):
        open_sources(made.source_settings())


def test_named_validation_leaves_all_files_to_training(corpus):
    write_jsonl(corpus / "held.jsonl", 20, start=9000)
    train, validation = open_sources(
        recipe(corpus, Source(files="part-*.jsonl"), validation=[Source(files="held.jsonl")]).source_settings()
    )
    assert len(train[0].files) == 6
    assert len(items(validation[0])) == 20


def test_names_are_distinguished(corpus):
    made = recipe(
        corpus,
        Source(files="part-0.jsonl"),
        Source(files="part-1.jsonl", name="part-0"),
        Source(files=["part-2.jsonl"], name="mine"),
    )
    assert [source.name for source in open_sources(made.source_settings())[0]] == ["part-0", "part-0-2", "mine"]


def test_the_fingerprint_follows_content_order_and_reading_but_not_the_place(corpus, tmp_path_factory):
    def fingerprint(folder, **changes):
        seed = changes.pop("seed", 42)
        return open_sources(recipe(folder, Source(files="part-*.jsonl", **changes), seed=seed).source_settings())[0][
            0
        ].fingerprint

    first = fingerprint(corpus)
    moved = tmp_path_factory.mktemp("elsewhere")
    for path in corpus.glob("part-*.jsonl"):
        (moved / path.name).write_bytes(path.read_bytes())
    assert fingerprint(moved) == first
    assert fingerprint(corpus, seed=7) != first
    assert fingerprint(corpus, name="other", weight=2.0) == first
    write_jsonl(corpus / "part-1.jsonl", 31)
    assert fingerprint(corpus) != first


def test_a_second_start_reads_no_file_again(corpus, monkeypatch):
    made = recipe(corpus, Source(files="part-*.jsonl"))
    first = open_sources(made.source_settings())[0][0].fingerprint

    def never(path):
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr("pipeline.sources.file_facts.sha256_file", never)
    assert open_sources(made.source_settings())[0][0].fingerprint == first
    write_jsonl(corpus / "part-1.jsonl", 29)
    with pytest.raises(AssertionError, match=r"part-1.jsonl was hashed again"):
        open_sources(made.source_settings())


def test_facts_of_a_file_count_rows_as_the_reader_does(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}')
    (tmp_path / "b.txt").write_text("one\n<|endoftext|>\ntwo\n")
    facts = FileFacts(tmp_path / "cache")
    assert (facts.rows(tmp_path / "a.jsonl"), facts.rows(tmp_path / "b.txt")) == (3, 2)


def test_a_long_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
    paragraphs = [text(n) for n in range(2000)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    train, validation = open_sources(recipe(tmp_path, Source(files="book.txt")).source_settings())
    pieces = sorted(items(train[0]) + items(validation[0]), key=lambda item: item.row)
    assert len(pieces) > 8
    assert [line for piece in pieces for line in piece.text.split("\n") if line] == paragraphs
    assert max(len(piece.text) for piece in pieces) < 20_000


def test_one_endless_line_of_text_is_read_in_bounded_pieces(tmp_path):
    content = "äbc def " * 50_000
    (tmp_path / "line.txt").write_text(content, encoding="utf-8")
    train, validation = open_sources(recipe(tmp_path, Source(files="line.txt")).source_settings())
    pieces = sorted(items(train[0]) + items(validation[0]), key=lambda item: item.row)
    assert "".join(piece.text for piece in pieces) == content
    assert max(len(piece.text) for piece in pieces) <= 2 * 16_384


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Source(), "names neither id nor files"),
        (Source(files=[]), "is an empty list"),
        (Source(files="part-0.jsonl", split="test"), "names files one by one, which have no splits"),
        (Source(id="tandem:nothing"), "there is no built-in source"),
        (Source(id="tandem:quickstart_chat"), "holds conversations"),
        (Source(id="tandem:quickstart_text", split="test"), "has train and validation"),
        (Source(id="tandem:quickstart_text", text_column="body"), "text_column cannot be chosen"),
    ],
)
def test_a_source_that_cannot_mean_what_it_says_is_a_recipe_error(corpus, source, said):
    with pytest.raises(RecipeError, match=said):
        open_sources(recipe(corpus, source).source_settings())


def test_a_recipe_without_sources_says_what_to_write(corpus):
    with pytest.raises(RecipeError, match="names no source"):
        open_sources(recipe(corpus).source_settings())


def test_other_content_of_equal_size_and_time_is_seen(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", 30)
    facts = FileFacts(tmp_path / "cache")
    before, status = facts.of(file).sha256, file.stat()
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes().replace(b"a", b"b"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p and rsync -t leave it
    other.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    for again in (facts, FileFacts(tmp_path / "cache")):
        assert again.of(file).sha256 != before


def test_a_file_replaced_during_the_run_is_refused_and_changed_rights_pass(tmp_path):
    file = write_jsonl(tmp_path / "corpus" / "a.jsonl", 30)
    write_jsonl(tmp_path / "corpus" / "b.jsonl", 31)
    source = open_sources(recipe(tmp_path, Source(files="corpus/*.jsonl")).source_settings())[0][0]
    status = file.stat()
    file.chmod(0o600)
    os.link(file, tmp_path / "backup")
    assert items(source)
    (tmp_path / "backup").unlink()
    file.write_bytes(file.read_bytes().replace(b"a", b"b"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="was changed since it was verified"):
        items(source)


def test_facts_of_many_files_are_kept_together_without_waiting_for_the_disk(tmp_path, monkeypatch):
    for number in range(300):
        write_jsonl(tmp_path / "corpus" / f"{number:03d}.jsonl", 2 + number)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("waits for the disk"))
    made = recipe(tmp_path, Source(files="corpus/*.jsonl"))
    first = open_sources(made.source_settings())[0][0].fingerprint
    (store,) = (tmp_path / "cache" / "files").iterdir()
    monkeypatch.setattr(
        "pipeline.sources.file_facts.sha256_file", lambda path: pytest.fail(f"{path} was hashed again")
    )
    assert open_sources(made.source_settings())[0][0].fingerprint == first
    assert store.stat().st_size < 300 * 2 * 500


def test_a_worker_hashes_no_file_that_its_leader_has_looked_at_meanwhile(tmp_path, monkeypatch):
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", 30) for name in "ab")
    facts = FileFacts(tmp_path / "cache")
    known, of_worker = facts.of(first), pickle.loads(pickle.dumps(facts))
    assert of_worker.of(first) == known
    found = facts.of(second)
    monkeypatch.setattr(
        "pipeline.sources.file_facts.sha256_file", lambda path: pytest.fail(f"{path} was hashed again")
    )
    assert of_worker.of(second) == found


def test_damaged_and_torn_facts_are_found_out_again(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", 30)
    first = FileFacts(tmp_path / "cache").of(file)
    (store,) = (tmp_path / "cache" / "files").iterdir()
    content = store.read_bytes()
    for damaged in (content[:50], b"[" * 20_000, b""):
        store.write_bytes(damaged)
        assert FileFacts(tmp_path / "cache").of(file) == first
        assert FileFacts(tmp_path / "cache").rows(file) == 30


def test_a_number_of_too_many_digits_is_a_bad_row(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", 30)
    with open(file, "a") as more:
        more.write('{"text": "x", "id": ' + "9" * 5000 + "}\n")
    with pytest.raises(DataError, match=r"a.jsonl:31: is JSON with a number of too many digits"):
        open_sources(recipe(tmp_path, Source(files="a.jsonl")).source_settings())


def write_folder(folder, files, *, size=5000, name="{:03d}.txt"):
    folder.mkdir(exist_ok=True)
    for n in range(files):
        (folder / name.format(n)).write_text((text(n) + " ") * (size // 120) + "\n")
    return folder


def split_of(made):
    train, validation = open_sources(made.source_settings())
    return [{file.label: file.bytes for file in files} for files in (train[0].files, validation[0].files)]


def test_of_many_small_files_a_tenth_at_most_is_held_out(tmp_path):
    write_folder(tmp_path / "books", 120)
    trained, held = split_of(recipe(tmp_path, Source(files="books")))
    assert len(trained) + len(held) == 120
    assert not trained.keys() & held.keys()
    share = sum(held.values()) / (sum(held.values()) + sum(trained.values()))
    assert 0.08 < share <= 0.1  # 0.6 MB in all: a hundredth of it could not be scored
    assert (
        max(int(label[:3]) for label in held) - min(int(label[:3]) for label in held) > 60
    )  # from all over the folder


def test_of_very_many_files_a_hundredth_of_the_text_is_held_out(tmp_path):
    write_folder(tmp_path / "books", 1500, size=20_000, name="{:04d}.txt")
    trained, held = split_of(recipe(tmp_path, Source(files="books")))
    share = sum(held.values()) / (sum(held.values()) + sum(trained.values()))
    assert 0.0099 < share < 0.011


def test_the_files_drawn_stay_the_same_when_the_folder_moves_or_grows(tmp_path, tmp_path_factory):
    made = recipe(tmp_path, Source(files="books"))
    write_folder(tmp_path / "books", 120)
    _, held = split_of(made)
    moved = tmp_path_factory.mktemp("elsewhere")
    write_folder(moved / "books", 120)
    assert split_of(recipe(moved, Source(files="books")))[1] == held
    write_folder(tmp_path / "books", 130)
    assert len(split_of(made)[1].keys() & held.keys()) >= len(held) - 2


@pytest.mark.parametrize(
    "sizes",
    [
        [30_000] * 6,  # a sixth of the text
        [2_000_000] * 15 + [210_000],  # enough to be scored
        [2_000_000] * 3 + [50_000],  # too little, but any other file is more than a tenth
    ],
)
def test_a_last_file_that_is_large_enough_is_held_out_alone(tmp_path, sizes):
    for n, size in enumerate(sizes):
        (tmp_path / f"{n:02d}.txt").write_text((text(n) + "\n") * (size // len(text(n))))
    made = recipe(tmp_path, Source(files="*.txt"))
    assert split_of(made)[1].keys() == {f"{len(sizes) - 1:02d}.txt"}


def test_copies_of_a_file_drawn_are_held_out_with_it(tmp_path):
    write_folder(tmp_path / "books", 120)
    _, held = split_of(recipe(tmp_path, Source(files="books")))
    copied = sorted(held)[0]
    free = next(f"{n:03d}.txt" for n in range(120) if f"{n:03d}.txt" not in held)
    (tmp_path / "books" / free).write_bytes((tmp_path / "books" / copied).read_bytes())
    trained, now = split_of(recipe(tmp_path, Source(files="books")))
    assert now.keys() == held.keys() | {free}
    assert free not in trained


def test_a_run_begun_with_another_split_keeps_it(tmp_path):
    write_folder(tmp_path / "books", 120)
    made = recipe(tmp_path, Source(files="books"))
    _, validation = open_sources(made.source_settings())
    before = {"name": "books", "files": [{"label": "119.txt", "sha256": "", "bytes": 5000}]}
    assert split_of(with_inputs(made, {"validation": [before]}))[1].keys() == {"119.txt"}
    assert len(validation[0].files) > 1
    before["files"][0]["label"] = "gone.txt"  # What is missing is named when the inputs are compared.
    assert split_of(with_inputs(made, {"validation": [before]}))[1].keys() == {
        file.label for file in validation[0].files
    }


def test_parquet_with_dictionary_pages_as_pandas_writes_it_is_whole(tmp_path):
    texts = [text(n) * 20 for n in range(4000)]
    for part in range(2):
        pandas.DataFrame({"text": texts[part::2]}).to_parquet(tmp_path / f"{part}.parquet")
    chunk = pq.read_metadata(tmp_path / "0.parquet").row_group(0).column(0)
    assert chunk.data_page_offset - chunk.dictionary_page_offset > 2**16
    train, validation = open_sources(recipe(tmp_path, Source(files="*.parquet")).source_settings())
    assert sorted(item.text for source in train + validation for item in items(source)) == sorted(texts)


def test_a_run_inside_its_data_folder_is_no_data_of_it(tmp_path):
    write_folder(tmp_path / "books", 4)
    run = tmp_path / "books" / "runs" / "books-1"
    (run / "report").mkdir(parents=True)
    (run / "run_manifest.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "report" / "report.md").write_text("# A report\n")
    train, _ = open_sources(recipe(tmp_path, Source(files="books"), validation=[]).source_settings())
    assert sorted(file.label for file in train[0].files) == ["000.txt", "001.txt", "002.txt", "003.txt"]


def write_talks(path, count, name):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{name} {{}}"}]
    lines = [json.dumps({"messages": talk}).replace("{}", str(n)) + "\n" for n in range(count)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


def said(sources):
    return [[item.messages[-1]["content"] for item in items(source)] for source in sources]


def test_of_conversations_rows_of_every_file_are_held_out(tmp_path):
    for name in ("colours", "numbers", "weather"):
        write_talks(tmp_path / "chat" / f"{name}.jsonl", 120, name)
    made = recipe(tmp_path, Source(files="chat"))
    train, validation = open_sources(replace(made.source_settings(), kind="chat"))
    (trained,), (held,) = said(train), said(validation)
    assert len(trained) + len(held) == 360
    assert not set(trained) & set(held)
    assert {text.split()[0] for text in held} == {"colours", "numbers", "weather"}
    assert 8 <= len(held) <= 12
    assert said(open_sources(replace(made.source_settings(), kind="chat"))[1]) == [held]


def test_of_files_of_one_conversation_each_some_are_held_out(tmp_path):
    for n in range(40):
        write_talks(tmp_path / "chat" / f"{n:02d}.jsonl", 1, str(n))
    train, validation = open_sources(replace(recipe(tmp_path, Source(files="chat")).source_settings(), kind="chat"))
    (trained,), (held,) = said(train), said(validation)
    assert len(held) == 8
    assert len(trained) == 32


def test_copies_of_a_file_hold_out_the_same_conversations(tmp_path):
    for name in ("a", "b", "c"):
        write_talks(tmp_path / "chat" / f"{name}.jsonl", 60, "b" if name == "c" else name)
    train, validation = open_sources(replace(recipe(tmp_path, Source(files="chat")).source_settings(), kind="chat"))
    assert not set(said(train)[0]) & set(said(validation)[0])


def test_a_chat_run_begun_with_its_last_file_held_out_keeps_it(tmp_path):
    for name in ("a", "b", "c"):
        write_talks(tmp_path / "chat" / f"{name}.jsonl", 60, name)
    made = recipe(tmp_path, Source(files="chat"))
    begun = {"name": "chat", "format": "messages(messages)", "files": [{"label": "c.jsonl", "sha256": "", "bytes": 1}]}
    train, validation = open_sources(
        replace(with_inputs(made, {"validation": [begun]}).source_settings(), kind="chat")
    )
    assert {text[0] for text in said(train)[0]} == {"a", "b"}
    assert {text[0] for text in said(validation)[0]} == {"c"}
    now = [source.describe() for source in open_sources(replace(made.source_settings(), kind="chat"))[1]]
    again = open_sources(replace(with_inputs(made, {"validation": now}).source_settings(), kind="chat"))[1]
    assert [source.describe() for source in again] == now


@pytest.mark.parametrize("nothing", [b"\n\n", b"other\n"])
def test_a_csv_without_a_row_is_left_out_whatever_its_header(nothing, tmp_path, caplog):
    for n, name in enumerate(("a", "b")):
        (tmp_path / f"{name}.csv").write_text("text\n" + "".join(f"Text number {n} {row}.\n" for row in range(40)))
    (tmp_path / "ab.csv").write_bytes(nothing)
    train, validation = open_sources(recipe(tmp_path, Source(files="*.csv", text_column="text")).source_settings())
    assert "ab.csv" not in {file.label for source in train + validation for file in source.files}
    assert "ab.csv has nothing in it and is left out" in caplog.text


def test_a_single_conversation_is_not_sent_to_init(tmp_path):
    write_talks(tmp_path / "a.jsonl", 1, "a")
    with pytest.raises(DataError) as caught:
        open_sources(replace(recipe(tmp_path, Source(files="a.jsonl")).source_settings(), kind="chat"))
    assert "conversations it takes two" in str(caught.value)
    assert "init" not in str(caught.value)


@pytest.mark.parametrize("nothing", [b"", b"\n\n", b"[]"])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_file_with_nothing_in_it_is_left_out_with_a_line(kind, nothing, tmp_path, caplog):
    for n, name in enumerate(("a", "b", "d")):
        if kind == "chat":
            write_talks(tmp_path / "all" / f"{name}.json", 30, name)
        else:
            write_jsonl(tmp_path / "all" / f"{name}.json", 30, start=100 * n)
    (tmp_path / "all" / "c.json").write_bytes(nothing)
    train, validation = open_sources(replace(recipe(tmp_path, Source(files="all")).source_settings(), kind=kind))
    assert "c.json" not in {file.label for source in train + validation for file in source.files}
    assert "c.json has nothing in it and is left out" in caplog.text
    for name in ("a", "b", "d"):
        (tmp_path / "all" / f"{name}.json").write_bytes(nothing)
    with pytest.raises(DataError, match=r"a\.json"):
        open_sources(replace(recipe(tmp_path, Source(files="all")).source_settings(), kind=kind))


def test_one_file_next_to_an_empty_one_parts_with_rows(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", 30)
    (tmp_path / "b.jsonl").touch()
    train, validation = open_sources(recipe(tmp_path, Source(files="*.jsonl")).source_settings())
    assert [file.part for source in train + validation for file in source.files] == ["train", "validation"]


def zstandard_frame(data, *, window_log):
    """A frame of raw blocks with a window of 2**window_log, as `zstd --long=31` writes its header."""
    blocks = [data[at : at + 100_000] for at in range(0, len(data), 100_000)]
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3])
    for number, block in enumerate(blocks):
        frame += ((number == len(blocks) - 1) | len(block) << 3).to_bytes(3, "little") + block
    return frame


def test_zstandard_data_with_a_long_window_says_how_to_unpack_it(tmp_path):
    lines = [(json.dumps({"text": text(n)}) + "\n").encode() for n in range(3000)]
    path = tmp_path / "dump.jsonl.zst"
    path.write_bytes(zstandard_frame(b"".join(lines), window_log=20))
    train, validation = open_sources(recipe(tmp_path, Source(files=path.name)).source_settings())
    assert sum(len(items(source)) for source in train + validation) == 3000
    path.write_bytes(zstandard_frame(b"".join(lines), window_log=31))
    with pytest.raises(DataError, match=r"a window above 128 MiB\. Decompress it: zstd -d --long=31"):
        open_sources(recipe(tmp_path, Source(files=path.name)).source_settings())
