"""Every wrong file of the matrix is told before step 1, with its name and row, and never gives a row of nothing."""

import pytest

from pipeline.artifacts.errors import DataError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from tests.faults.wrong_files import good_file, wrong_files

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


def test_the_matrix_is_as_large_as_it_says():
    for kind in ("jsonl", "parquet"):
        assert len({case.id for case in CASES if case.file.endswith(kind)}) >= 30
    assert len({case.id for case in CASES}) == len(CASES)
