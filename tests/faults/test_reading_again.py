"""Files that cannot be read at once: read again, counted, and in the end named. Real errors of the C library's read()."""

import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from faults.injector import build, compiler
from tests.runner import ROOT, Runner

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler, which makes the library that fails")
LIBRARY = ROOT / "faults" / "read_fails.c"
SHORT = {
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
}


@pytest.fixture
def runner(tmp_path, text_files, chat_files):
    """Its sources are read for every run, in parquet too."""
    files = [tmp_path / f"{path.stem}.parquet" for path in text_files]
    for old, new in zip(text_files, files, strict=True):
        texts = [json.loads(line)["text"] for line in old.read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), new, row_group_size=64)
    return Runner(tmp_path, tmp_path / "cache", [text_files[0], files[1], text_files[2]], chat_files)


ROWS_AND_RETRIES = """
import json
import sys
from pathlib import Path
from pipeline.process.network import retries
from pipeline.sources.source import _blocks
texts, before = [], []
for number, rows in _blocks(Path(sys.argv[1]), 0, None):
    texts += [value["text"] for _, _, value in rows]
    before.append(retries())
print(json.dumps({"texts": texts, "retries_by_block": before}))
"""


@pytest.mark.parametrize(("suffix", "behind"), [(".jsonl", 2), (".parquet", 4)])
def test_a_file_is_read_on_where_reading_failed(tmp_path, suffix, behind):
    path, texts = tmp_path / f"long{suffix}", [f"{n} " + "long " * 150 for n in range(4000)]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)
    faults = {"READ_FAILS": "2", "READ_FAILS_AT": suffix, "READ_FAILS_BEHIND": str(behind)}
    ended = subprocess.run(
        [sys.executable, "-c", ROWS_AND_RETRIES, path],
        cwd=ROOT,
        env=os.environ | faults | {"LD_PRELOAD": str(build(tmp_path, [LIBRARY]))},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(ended.stdout)
    assert result["texts"] == texts
    assert (result["retries_by_block"][0], result["retries_by_block"][-1]) == (0, 2)  # in the middle of the file


def train(runner, name, *, status=0, **environment):
    """A run whose data nothing has prepared before."""
    recipe = runner.recipe(name, "gpt2", train=SHORT)
    return runner.train(recipe, f"data.cache_dir={runner.folder / name}", status=status, **environment)


@pytest.mark.slow  # four runs from nothing
def test_what_is_read_at_the_third_try_changes_nothing_but_the_count(runner, tmp_path):
    plain, library = train(runner, "plain"), str(build(tmp_path, [LIBRARY]))
    assert set(plain.values("data/retries").values()) == {0}
    for where in (".jsonl", ".parquet", ".safetensors"):
        # Twice in the training, and twice in the process that prepares, which only writes the shards.
        run = train(runner, where[1:], LD_PRELOAD=library, READ_FAILS="2", READ_FAILS_AT=where)
        assert run.values("data/retries")[3] == (2 if where == ".safetensors" else 4), where
        assert "Input/output error, reading it again in 0.5 s (2 of 4)" in run.output
        assert run.values("train/loss") == plain.values("train/loss")


@pytest.mark.slow
def test_what_cannot_be_read_at_all_is_named_with_what_to_do(runner, tmp_path):
    library = str(build(tmp_path, [LIBRARY]))
    run = train(runner, "broken", status=65, LD_PRELOAD=library, READ_FAILS="99", READ_FAILS_AT=".parquet")
    assert "part-1.parquet: cannot be read (Input/output error) in 4 attempts" in run.output
