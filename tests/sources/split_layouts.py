"""Trees of datasets: those of the documentation of `datasets` and of the Hub, and such as people publish.

Names and cards are the documentation's, with .jsonl for its .csv ("this works with any supported file format").
"""

from collections.abc import Iterable

CARD = "---\nconfigs:\n{}---\n# A dataset\n"


def tree(names: str | Iterable[str], configs: str = "", **contents: bytes) -> dict[str, bytes]:
    """A repository: the names, each with a row, and the card."""
    rows = {name: b'{"text": "%s"}\n' % name.encode() for name in (names.split() if isinstance(names, str) else names)}
    return {**rows, **contents, "README.md": CARD.format(configs).encode() if configs else b"# A dataset\n"}


def sharded(split: str, shards: int, ending: str = "jsonl") -> list[str]:
    return [f"data/{split}-{n:05d}-of-{shards:05d}.{ending}" for n in range(shards)]


# name: (files, configurations to ask for)
DOCUMENTED: dict[str, tuple[dict[str, bytes], list[str | None]]] = {
    "one-file": (tree("data.jsonl"), [None]),
    "file-names": (tree("train.jsonl test.jsonl validation.jsonl"), [None]),
    "files-in-data": (tree("data/train.jsonl data/test.jsonl data/validation.jsonl"), [None]),
    "inside-names": (tree("my_train_file.jsonl my_validation_file.jsonl test1.jsonl"), [None]),
    "keywords": (tree("data/training.jsonl data/eval.jsonl data/valid.jsonl"), [None]),
    "directories": (tree("data/train/bees.jsonl data/test/more_bees.jsonl data/validation/even_more_bees.jsonl"), [None]),
    "many-files": (tree([f"train_{n}.jsonl" for n in range(4)] + ["test_0.jsonl", "test_1.jsonl"]), [None]),
    "many-in-directories": (tree([f"data/train/shard_{n}.jsonl" for n in range(4)] + ["data/test/shard_0.jsonl", "data/test/shard_1.jsonl"]), [None]),
    "custom-names": (tree(sharded("train", 3) + sharded("test", 1) + sharded("random", 3)), [None]),
    "single-split": (tree("bees.jsonl more/bees.jsonl testfile.jsonl"), [None]),
    "yaml": (tree("data.jsonl holdout.jsonl", "- config_name: default\n  data_files:\n  - split: train\n    path: data.jsonl\n  - split: test\n    path: holdout.jsonl\n"), [None, "default"]),
    "yaml-lists": (tree("data/abc.jsonl data/def.jsonl data/left.jsonl holdout/ghi.jsonl", "- config_name: default\n  data_files:\n  - split: train\n    path:\n    - data/abc.jsonl\n    - data/def.jsonl\n  - split: test\n    path: holdout/ghi.jsonl\n"), [None]),
    "yaml-globs": (tree("data/abc.jsonl data/def.jsonl holdout/ghi.jsonl", '- config_name: default\n  data_files:\n  - split: train\n    path: "data/*.jsonl"\n  - split: test\n    path: "holdout/*.jsonl"\n'), [None]),
    "yaml-custom-split": (tree("directory1/bees.jsonl directory1bis/more_bees.jsonl directory2/even_more_bees.jsonl", '- config_name: default\n  data_files:\n  - split: random\n    path: ["directory1bis/*.jsonl"]\n  - split: train\n    path: ["directory1/*.jsonl"]\n  - split: test\n    path: ["directory2/*.jsonl"]\n'), [None]),
    "yaml-subsets": (tree("main_data.jsonl additional_data.jsonl", "- config_name: main_data\n  data_files: main_data.jsonl\n- config_name: additional_data\n  data_files: additional_data.jsonl\n"), [None, "main_data", "additional_data", "main-data"]),
    "yaml-default": (tree("main_data.jsonl additional_data.jsonl", "- config_name: additional_data\n  data_files: additional_data.jsonl\n- config_name: main_data\n  data_files: main_data.jsonl\n  default: true\n"), [None, "additional_data"]),
    "yaml-data-dir": (tree("one/train.jsonl one/test.jsonl two/a.jsonl", "- config_name: one\n  data_dir: one\n- config_name: two\n  data_dir: two\n"), [None, "one", "two"]),
    "yaml-pattern-list": (tree("en/a.jsonl en/b.jsonl de/a.jsonl", '- config_name: all\n  data_files: ["en/*", "de/a.jsonl"]\n'), [None]),
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, bytes], list[str | None]]] = {
    "ultrachat": (tree(sharded("train_sft", 1) + sharded("train_gen", 1) + sharded("test_sft", 1) + sharded("test_gen", 1)), [None]),
    "books-and-wiki": (tree(sharded("books", 2) + sharded("wiki", 2)), [None]),
    "folder-first": (tree("train/val_books.jsonl train/wiki.jsonl test/train_left.jsonl"), [None]),
    "fineweb-edu": (tree([f"data/CC-MAIN-2013-{dump}/train-{n:05d}-of-00003.jsonl" for dump in (20, 48) for n in range(3)] + [f"sample/10BT/{n:03d}_00000.jsonl" for n in range(3)], "- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n"), [None, "sample-10BT"]),
    "wikitext": (tree([f"{config}/{split}-00000-of-00001.jsonl" for config in ("wikitext-2-v1", "wikitext-103-v1") for split in ("test", "train", "validation")], "".join(f"- config_name: {config}\n  data_files:\n" + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("test", "train", "validation")) for config in ("wikitext-2-v1", "wikitext-103-v1"))), [None, "wikitext-103-v1"]),
    "compressed": (tree("en/c4-train.00000-of-00002.json.gz en/c4-train.00001-of-00002.json.gz en/c4-validation.00000-of-00001.json.gz"), [None]),
    "hidden": (tree("train.jsonl .cache/train.jsonl __pycache__/train.jsonl .train.jsonl config.json dataset_info.json sub/dataset_info.json sub/dev-1.jsonl"), [None]),
    "kinds-mixed": (tree("a.parquet b.parquet c.jsonl notes.txt"), [None]),
    "capitals": (tree("TRAIN.jsonl Test.jsonl"), [None]),
    "separators": (tree("corpus.train.jsonl corpus-dev.jsonl corpus_eval_2.jsonl pretrain.jsonl"), [None]),
    "one-known": (tree("a.jsonl b.jsonl", "- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\ndataset_info:\n  config_name: b\n  features:\n  - name: text\n    dtype: string\n"), [None, "a"]),
    "no-data": (tree("LICENSE script.sh"), [None]),
    "a-script": (tree("a-script.py train.jsonl"), [None]),
    "missing-file": (tree("a.jsonl", "- config_name: mine\n  data_files: b.jsonl\n"), [None]),
    "two-defaults": (tree("a.jsonl b.jsonl", "- config_name: default\n  data_files: a.jsonl\n- config_name: b\n  default: true\n  data_files: b.jsonl\n"), [None]),
    "outside": (tree("a.jsonl", "- config_name: mine\n  data_files: ../*.jsonl\n"), [None]),
}  # fmt: skip
LAYOUTS = DOCUMENTED | PUBLISHED
