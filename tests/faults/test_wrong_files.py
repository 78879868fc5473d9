"""Every wrong file of the matrix is told before step 1, with its name and row, and never gives a row of nothing."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.artifacts.errors import DataError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from tests.faults.wrong_files import good_file, wrong_files
from tests.sources.dataset_hub import HubServer

ROOT = Path(__file__).parents[2]
CASES = list(wrong_files())


def sources(folder, kind, *, max_bad_rows=0):
    recipe = Recipe(path=str(folder / "recipe.yaml"))
    recipe.data.cache_dir = str(folder / "cache")
    recipe.data.sources = [Source(files=str(folder / "data"))]
    recipe.data.max_bad_rows = max_bad_rows
    return open_sources(recipe, kind=kind)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_wrong_file_among_good_ones_is_told_with_its_row_and_gives_no_row_of_nothing(case, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a-good.jsonl").write_bytes(good_file(case.kind))
    (tmp_path / "data" / case.file).write_bytes(case.content)
    (tmp_path / "data" / "z-good.jsonl").write_bytes(good_file(case.kind, first=2000))
    with pytest.raises(DataError) as caught:
        sources(tmp_path, case.kind)
    told = str(caught.value)
    assert f"{case.file}{case.row}" in told, told
    assert case.said in told, told
    assert "Traceback" not in told
    assert "-good.jsonl" not in told
    if case.row:
        train, validation = sources(tmp_path, case.kind, max_bad_rows=1)
        blocks = [block for source in train + validation for block in source.read()]
        items = [item.text if case.kind == "text" else item.messages for block in blocks for item in block.items]
        assert all(items)
        assert len(items) == 20 + 99 + 20
        assert len([bad for block in blocks for bad in block.bad_rows]) == 1


STREAM = """
import json, sys
from pipeline.artifacts.errors import TandemError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
for number, kind in enumerate(json.loads(sys.stdin.read())):
    recipe = Recipe(path="recipe.yaml")
    recipe.data.cache_dir = sys.argv[1]
    recipe.data.sources = [Source(id=f"faults/case-{number}")]
    recipe.data.max_bad_rows = 200
    told, items, when = [], [], "start"
    try:
        train, validation = open_sources(recipe, kind=kind)
        when = "reading"
        for source in train + validation:
            for block in source.read():
                told += block.bad_rows
                items += [item.text if kind == "text" else item.messages for item in block.items]
    except TandemError as error:
        told.append(str(error))
    print(json.dumps([when, told, sum(not item for item in items)]))
"""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """What is told of each case when it lies in a dataset of a Hub, between two good files: (when, lines, items of nothing)."""
    server, folder = HubServer(), tmp_path_factory.mktemp("streamed")
    for number, case in enumerate(CASES):
        good = {
            name: good_file(case.kind, first=first) for name, first in (("a-good.jsonl", 1000), ("z-good.jsonl", 2000))
        }
        server.others[f"faults/case-{number}"] = {**good, case.file: case.content}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-c", STREAM, str(folder / "cache")]
    kinds = json.dumps([case.kind for case in CASES])
    done = subprocess.run(
        command, input=kinds, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].id)
def test_a_wrong_file_of_a_hub_is_told_with_its_row_and_gives_no_row_of_nothing(streamed, number):
    case, (_, lines, nothing) = CASES[number], streamed[number]
    told = "\n".join(lines)
    assert f"{case.file}{case.row}" in told, told
    assert case.said in told, told
    assert "-good.jsonl" not in told
    assert nothing == 0


# What only the whole file shows: compressed content, and a parquet footer or page that is there and is wrong.
LATE = ("jsonl.gz-", "parquet-", "a_column_of_null", "a_column_of_empty_texts", "only_questions")


def test_what_the_ends_of_a_file_show_is_told_before_any_file_of_the_hub_is_fetched(streamed):
    late = [case.id for case, (when, *_) in zip(CASES, streamed, strict=True) if when != "start" and not case.row]
    assert not [name for name in late if not any(word in name for word in LATE)]
    assert not {"jsonl.gz-text-not_compressed", "parquet-text-truncated", "parquet-text-HTML_page"} & set(late)


def test_the_matrix_is_as_large_as_it_says():
    for kind in ("jsonl", "parquet"):
        assert len({case.id for case in CASES if case.file.endswith(kind)}) >= 30
    assert len({case.id for case in CASES}) == len(CASES)
