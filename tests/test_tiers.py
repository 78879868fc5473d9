"""The newcomer's tier: what it leaves out is there, and what it keeps of a heavy file too."""

from pathlib import Path

import pytest

from tests.tiers import KEPT, is_full


@pytest.mark.parametrize(("path", "kept"), KEPT.items(), ids=list(KEPT))
def test_a_heavy_file_and_the_tests_kept_of_it_are_there(path, kept):
    text = (Path(__file__).parent / path).read_text()
    assert [name for name in kept if f"def {name.partition('[')[0]}(" not in text] == []


def test_a_named_case_is_kept_and_its_siblings_are_full():
    name = "tests/contracts/test_plan_holds.py::test_parameters_steps_tokens_and_flops_are_those_planned"
    assert [is_full(f"{name}[{case}]") for case in ("modern-sft", "gpt2-pretrain")] == [False, True]
    assert not is_full("tests/test_tiers.py::test_a_file_that_is_not_named")
