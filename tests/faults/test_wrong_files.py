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


# What the first and last bytes show: other content than the name says, or an end that is missing.
SHOWN_BY_AN_END = (
    "-empty", "-HTML_page", "-HTML_page_after_a_byte_order_mark", "-XML_error_page", "-S3_error_without_a_head",
    "-git-lfs_pointer", "-UTF-16", "-gzip", "-zip_archive", "-parquet", "-Arrow", "-PDF", "-zeros", "-Excel", "-encrypted",
    "-not_compressed", "parquet-text-truncated", "parquet-text-jsonl", "parquet-text-CSV", "arrow-text-jsonl",
    "-file_truncated", "-file_without_its_footer's_end",
)  # fmt: skip


def test_faults_at_the_ends_of_a_file_are_reported_before_any_fetching(streamed):
    late = {case.id for case, (when, *_) in zip(CASES, streamed, strict=True) if when != "start" and not case.row}
    shown = {case.id for case in CASES if case.id.endswith(SHOWN_BY_AN_END)}
    assert not [end for end in SHOWN_BY_AN_END if not any(name.endswith(end) for name in shown)]
    assert len(shown) >= 40
    assert not late & shown


def test_the_matrix_is_as_large_as_it_says():
    for kind, least in (("jsonl", 60), ("parquet", 50), ("json", 15), ("csv", 20), ("arrow", 15)):
        assert len({case.id for case in CASES if case.file.endswith(f".{kind}")}) >= least
    assert len({case.id for case in CASES}) == len(CASES)
