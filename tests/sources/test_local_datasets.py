"""Datasets in folders of this machine: what save_to_disk wrote, what load_dataset would read, and what there is not."""

import json
import zipfile
from dataclasses import replace

import datasets
import pytest
from split_layouts import tree

from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from pipeline.sources.patterns import local_files


def rows(split, count=40):
    return datasets.Dataset.from_dict({"text": [f"{split} {n}: a row that is long enough" for n in range(count)]})


@pytest.fixture
def saved(tmp_path):
    datasets.DatasetDict({"train": rows("train"), "test": rows("test")}).save_to_disk(
        tmp_path / "both", num_shards={"train": 3, "test": 1}
    )
    rows("one").save_to_disk(tmp_path / "one", num_shards=2)
    return tmp_path


def opened(folder, *, kind="text", validation=None, **source):
    recipe = Recipe()
    recipe.path = str(folder / "recipe.yaml")
    recipe.data.cache_dir = str(folder / "cache")
    recipe.data.sources = [Source(**source)]
    recipe.data.validation = validation
    return open_sources(replace(recipe.source_settings(), kind=kind))


def texts(*sources):
    return sorted(item.text for source in sources for block in source.read() for item in block.items)


@pytest.mark.parametrize("key", ["id", "files"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_of_a_saved_dict_the_split_alone_is_read(saved, key, split):
    train, validation = opened(saved, **{key: "./both", "split": split})
    assert texts(*train, *validation) == sorted(rows(split)["text"])


@pytest.mark.parametrize("key", ["id", "files"])
def test_a_saved_dataset_without_splits_has_only_the_split_it_came_from(saved, key):
    with pytest.raises(RecipeError, match="one is one dataset without splits, and 'test' is asked for"):
        opened(saved, **{key: "./one", "split": "test"})
    state = saved / "one" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_split": "test"}))
    train, validation = opened(saved, **{key: "./one", "split": "test"})
    assert texts(*train, *validation) == sorted(rows("one")["text"])


@pytest.mark.parametrize("asked", ["web[2024]", "web[2024]/part[1].jsonl", "web*/part?1?.jsonl"])
def test_names_with_brackets_are_those_names(tmp_path, asked):
    (tmp_path / "corpus" / "web[2024]").mkdir(parents=True)
    (tmp_path / "corpus" / "web[2024]" / "part[1].jsonl").write_text('{"text": "this one is long enough"}\n' * 20)
    (tmp_path / "corpus" / "part1.jsonl").write_text('{"text": "of somebody else"}\n')
    train, validation = opened(tmp_path, id="./corpus", files=asked)
    assert set(texts(*train, *validation)) == {"this one is long enough"}


@pytest.mark.parametrize("key", ["id", "files"])
def test_a_mapped_saved_dataset_is_read_only_from_its_state_files(saved, key):
    loaded = datasets.load_from_disk(saved / "one")
    loaded.map(lambda row: {"text": row["text"].upper()}, load_from_cache_file=False)
    assert len(list((saved / "one").glob("cache-*.arrow"))) == 1
    train, validation = opened(saved, **{key: str(saved / "one")})
    assert texts(*train, *validation) == sorted(rows("one")["text"])


def test_rows_selected_and_shuffled_before_saving_to_disk_are_those_read(saved):
    rows("one").shuffle(seed=1).select(range(9)).save_to_disk(saved / "nine")
    train, validation = opened(saved, id="./nine")
    assert texts(*train, *validation) == sorted(datasets.load_from_disk(saved / "nine")["text"])


def test_indices_beside_the_rows_as_old_versions_saved_them_are_refused(saved):
    state = json.loads((saved / "one" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (saved / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="saved with a selection or order of its rows"):
        opened(saved, id="./one")


def test_a_folder_of_saved_datasets_gives_their_rows_and_no_descriptions(saved):
    (saved / "cache").mkdir()
    (saved / "all").mkdir()
    (saved / "one").rename(saved / "all" / "one")
    (saved / "both").rename(saved / "all" / "both")
    (saved / "all" / "more.jsonl").write_text('{"text": "one more"}\n')
    (saved / "all" / ".hidden").mkdir()
    (saved / "all" / ".hidden" / "less.jsonl").write_text('{"text": "hidden"}\n')
    train, validation = opened(saved, files="all")
    assert texts(*train, *validation) == sorted([*rows("train")["text"], *rows("one")["text"], "one more"])
    train, validation = opened(saved, files="all/one/*")
    assert texts(*train, *validation) == sorted(rows("one")["text"])


def test_a_saved_dataset_that_is_not_whole_is_said(saved):
    (saved / "both" / "train" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(InputMissingError, match=r"both/train lacks data-00001-of-00003.arrow, so it is not whole"):
        opened(saved, id="./both")
    with pytest.raises(RecipeError, match=r"both has no split 'validation'; it has train, test. Write one of them"):
        opened(saved, files="both", split="validation")


@pytest.fixture
def folder(tmp_path):
    for name, content in tree("own/train/a.jsonl own/train/b.jsonl own/test/c.jsonl own/test/d.jsonl").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ({"files": "own"}, "train/a train/b test/c test/d"),
        ({"files": "own", "split": "test"}, "test/c test/d"),
        ({"id": "own"}, "train/a train/b"),
        ({"id": "./own/", "split": "test"}, "test/c test/d"),
        ({"id": "own", "files": ["test", "train/a*"]}, "test/c test/d train/a"),
    ],
)
def test_files_of_a_folder_or_split_are_those_that_datasets_finds(folder, source, names):
    train, validation = opened(folder, **source)
    assert texts(*train, *validation) == sorted(f"own/{name}.jsonl" for name in names.split())
    assert train[0].revision is None


def test_the_test_split_of_a_folder_can_be_the_validation(folder):
    train, validation = opened(folder, id="own", validation=[Source(id="own", split="test")])
    assert texts(*train) == ["own/train/a.jsonl", "own/train/b.jsonl"]
    assert texts(*validation) == ["own/test/c.jsonl", "own/test/d.jsonl"]


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ({"id": "./nothing"}, InputMissingError, r"sources\[0\].id: './nothing' is neither a folder here nor a dataset's id"),
        ({"id": "../a/b/c"}, InputMissingError, "Write OWNER/NAME of the Hub, or a folder that is there"),
        ({"id": "https://huggingface.co/datasets/a/b"}, InputMissingError, "neither a folder here nor a dataset's id"),
        ({"id": "own/train/a.jsonl"}, RecipeError, "is a file, and id names a dataset. Write files: own/train/a.jsonl."),
        ({"id": "own", "revision": "main"}, RecipeError, "Leave revision out"),
        ({"id": "own", "split": "dev"}, RecipeError, "own has no split 'dev'; it has train, test"),
        ({"id": "own", "config": "en"}, RecipeError, "own has no configuration 'en'; it has default"),
        ({"id": "own", "files": "no*"}, InputMissingError, "'no.' matches no file of own, .* It has test/c.jsonl, test/d.jsonl"),
        ({"id": "own", "files": "../*"}, RecipeError, "leads out of own"),
        ({"files": "own", "split": "dev"}, RecipeError, "own has no split 'dev'; it has train, test"),
        ({"files": "own/train/*", "split": "test"}, RecipeError, "names files one by one, which have no splits"),
    ],
)  # fmt: skip
def test_a_dataset_that_is_not_there_is_said_in_a_sentence(folder, source, error, said):
    with pytest.raises(error, match=said) as raised:
        opened(folder, **source)
    assert "\n" not in str(raised.value)


def test_data_files_of_no_split_are_named_in_a_warning(folder, caplog):
    opened(folder, id="own")
    assert not caplog.messages
    (folder / "own" / "train" / "z.txt").write_text("of another format")
    opened(folder, id="own")
    assert "of own 1 data files belong to no split that `datasets` finds and are not read: train/z.txt." in caplog.text


@pytest.mark.parametrize("key", ["id", "files"])
def test_archives_are_refused_by_name(folder, key):
    with zipfile.ZipFile(folder / "own" / "train" / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "zipped"}\n')
    (folder / "own" / "train" / "a.jsonl").unlink()
    (folder / "own" / "train" / "b.jsonl").unlink()
    path = "own/train" if key == "id" else "own/train/*"
    with pytest.raises(RecipeError, match=r"archives, which are not unpacked: .*a.zip. Unpack them"):
        opened(folder, **{key: path})


# Files of a table whose second write overwrote the first, as deltalake 1.6, pyiceberg 0.12 and Lance 14 name them.
TABLES = {
    "Delta": ("_delta_log/00000000000000000000.json", "_delta_log/00000000000000000001.json"),
    "Iceberg": ("metadata/00001-6f2c.metadata.json", "metadata/snap-58-0-6f2c.avro"),
    "Lance": ("_versions/2.manifest", "_transactions/1-6f2c.txn"),
}


@pytest.mark.parametrize("source", [{"files": "table"}, {"files": "table/data/*/*.parquet"}, {"id": "table"}])
@pytest.mark.parametrize("kind", TABLES)
def test_files_of_a_table_are_refused_as_they_hold_rows_it_dropped(kind, source, tmp_path):
    for name in TABLES[kind]:
        (tmp_path / "table" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "table" / name).write_text("{}")
    for name in ("overwritten", "current"):
        file = tmp_path / "table" / "data" / "language=en" / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows(name).to_parquet(file)
    with pytest.raises(
        RecipeError, match=f"table is a table of {kind}, whose files also hold rows that were overwritten"
    ):
        opened(tmp_path, **source)


def test_a_folder_of_metadata_beside_the_files_is_no_table(tmp_path):
    rows("one").to_parquet(tmp_path / "data.parquet")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "own.metadata.json").write_text("{}")
    train, validation = opened(tmp_path, files="data.parquet")
    assert texts(*train, *validation) == sorted(rows("one")["text"])


def test_the_saved_recipe_names_a_local_dataset_as_a_path(folder, monkeypatch):
    (folder / "recipes").mkdir()
    (folder / "own").rename(folder / "recipes" / "own")
    (folder / "recipes" / "mine.yaml").write_text(
        "data: {sources: [{id: own}], batch_tokens: 512, row_tokens: 64}\ntrain: {max_steps: 3}\nmodel: {n_layer: 1, n_embd: 16, n_head: 2}\n"
    )
    monkeypatch.chdir(folder)
    assert read_recipe(["recipes/mine.yaml", "run.stage=pretrain"]).data.sources[0].id == "./recipes/own"


def test_a_local_folder_goes_before_a_hub_dataset_of_the_same_name(folder):
    (folder / "somebody").mkdir()
    (folder / "own").rename(folder / "somebody" / "corpus")
    train, _ = opened(folder, id="somebody/corpus")
    assert train[0].describe()["id"] is None  # The card links what is on the Hub.
    assert {file.path.parent.name for file in train[0].files} == {"train"}


def test_notes_and_tables_beside_a_corpus_are_left_out_with_warning(tmp_path, caplog):
    rows("train").to_json(tmp_path / "mine" / "a.jsonl")
    rows("more").to_parquet(tmp_path / "mine" / "b.parquet")
    (tmp_path / "mine" / "NOTES.md").write_text("How these texts were made.")
    (tmp_path / "mine" / "labels.csv").write_text("id,label\n1,good\n")
    train, held_out = opened(tmp_path, files="mine")
    assert {file.label for source in train + held_out for file in source.files} == {"a.jsonl", "b.parquet"}
    assert "NOTES.md, labels.csv, which are left out" in caplog.text
    assert "not read" not in caplog.text
    (tmp_path / "mine" / "page.html").write_text("<p>text")
    (tmp_path / "mine" / "more.tar.gz").write_text("")
    (tmp_path / "mine" / ".hidden").write_text("")
    opened(tmp_path, files="mine")
    assert "mine has files of kinds that are not read (.html: 1, .tar.gz: 1). Unpack or convert" in caplog.text
    (tmp_path / "words").mkdir()
    for number in range(20):
        (tmp_path / "words" / f"{number}.{'md' if number % 2 else 'txt'}").write_text(f"text {number}\n" * 50)
    train, held_out = opened(tmp_path, files="words")
    assert len({file.label for source in train + held_out for file in source.files}) == 20


@pytest.mark.parametrize(
    ("others", "read"), [({"notes.md"}, True), ({"a.md", "b.md", "c.md"}, False), ({"rows.jsonl"}, False)]
)
def test_a_folder_that_is_mostly_code_is_read_as_text(tmp_path, caplog, others, read):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("import os\n")
    for name in others:
        (tmp_path / name).write_text('{"text": "A row."}\n')
    found = {file.label for file in local_files(str(tmp_path), where="data", folder=None)}
    assert found == others | ({"a.py", "b.py"} if read else set())
    assert read or "(.py: 2)" in caplog.text
    assert len(local_files(str(tmp_path / "*.py"), where="data", folder=None)) == 2
