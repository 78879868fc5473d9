"""Every wrong file of the matrix is reported before step 1, with its name and row, and never gives a row of nothing."""

import pytest

from faults.wrong_files import wrong_files
from faults.wrong_inputs import is_reported, lay, sources, stream
from pipeline.process.errors import DataError

pytestmark = pytest.mark.full

CASES = list(wrong_files())


# A file with nothing in it is no reason to refuse the others: it is left out, with a line.
NOTHING = ("-empty", "-blank_lines", "-empty_inside", "-no_rows", "-header_alone")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_wrong_files_are_reported_by_row_and_give_no_empty_rows(case, tmp_path, caplog):
    lay(case, tmp_path)
    if case.id.endswith(NOTHING):
        train, validation = sources(tmp_path, case.kind)
        items = [item for source in train + validation for block in source.read() for item in block.items]
        texts = [item.text if case.kind == "text" else item.messages for item in items]
        assert texts
        assert all(str(text).strip() for text in texts)
        assert f"{case.file} has nothing in it" in caplog.text
        return
    with pytest.raises(DataError) as caught:
        sources(tmp_path, case.kind)
    message = str(caught.value)
    assert is_reported(case, message), message
    if case.row:
        train, validation = sources(tmp_path, case.kind, max_bad_rows=1)
        blocks = [block for source in train + validation for block in source.read()]
        items = [item.text if case.kind == "text" else item.messages for block in blocks for item in block.items]
        assert all(str(item).strip() for item in items)
        assert len(items) == 20 + 99 + 20
        assert len([bad for block in blocks for bad in block.bad_rows]) == 1


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    return stream(CASES, tmp_path_factory.mktemp("streamed"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].id)
def test_wrong_hub_files_are_reported_by_row_and_give_no_empty_rows(streamed, number):
    _, message, nothing = streamed[number]
    assert is_reported(CASES[number], message), message
    assert nothing == 0


def test_faults_at_the_ends_of_a_file_are_reported_before_any_fetching(streamed):
    late = {case.id for case, (when, *_) in zip(CASES, streamed, strict=True) if when != "start" and not case.row}
    seen = ("HTML_page", "XML_error_page", "git-lfs_pointer", "gzip", "zip_archive", "truncated", "encrypted")
    shown_by_an_end = {case.id for case in CASES if case.id.startswith("parquet-") and case.id.endswith(seen)}
    assert len(shown_by_an_end) > 5
    assert not late & (shown_by_an_end | {"jsonl.gz-text-not_compressed", "jsonl-text-HTML_page"})


def test_the_matrix_is_as_large_as_it_says():
    for kind, least in (("jsonl", 60), ("parquet", 50), ("json", 15), ("csv", 20), ("arrow", 15)):
        assert len({case.id for case in CASES if case.file.endswith(f".{kind}")}) >= least
    assert len({case.id for case in CASES}) == len(CASES)
