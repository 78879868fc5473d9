"""Generated data files give rows or sentences; `python -m tests.hostile.generated_rows 20000` runs many."""

import pytest

from tests.hostile.generated_rows import run


def test_odd_rows_are_read_or_named_and_never_end_in_tracebacks():
    found = run(count=150, seed=0)
    assert not found["defects"], "\n\n".join(found["defects"][:3])
    assert min(found["read"], found["bad"], found["refused"]) > 0


@pytest.mark.slow
def test_thousands_of_odd_rows():
    assert not run(count=5_000, seed=1)["defects"]
