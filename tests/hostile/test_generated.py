"""Generated inputs of every kind end in a result or a sentence; the large number is `python -m tests.hostile.generated`."""

import pytest

from tests.hostile.generated import KINDS, generate, kind_of

COUNT = 150


@pytest.mark.parametrize("name", KINDS)
def test_generated_inputs_end_in_a_result_or_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    outcome = generate(kind_of(name), count=COUNT, number=1, folder=tmp_path)
    assert not outcome.defects, "\n".join(f"{given}\n{text}" for given, text in outcome.defects.values())
    assert len(outcome.ended) > 1  # some are taken and some refused
