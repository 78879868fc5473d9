"""Files of text that `evals bpb --text` is given."""

import random

import pytest

from pipeline.evals.texts import read_texts
from pipeline.process.errors import DataError


@pytest.mark.parametrize("name", ["noise.parquet", "noise.arrow", "noise.jsonl.gz"])
def test_a_file_that_cannot_be_read_is_named_with_the_option(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1" + random.Random(1).randbytes(3000) + b"PAR1")
    with pytest.raises(DataError, match=rf"^--text: .*{name}"):
        read_texts([str(tmp_path / name)], max_bytes=1000)
