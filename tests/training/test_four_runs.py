"""benchmarks/four_runs.py finds the first number in which two results differ."""

from benchmarks.four_runs import documents, first_difference

BEFORE = {"rows": {"9": {"train/loss": 2.5}, "10": {"train/loss": 2.25, "val/bpb": 1.5}}, "weights": "ab"}


def test_the_first_difference_is_at_the_lowest_step_to_the_last_digit():
    assert first_difference(BEFORE, BEFORE) is None
    last_digit = {"10": {"train/loss": 2.2500000000000004, "val/bpb": 1.5}, "9": {"train/loss": 2.0}}
    assert first_difference(BEFORE, BEFORE | {"rows": last_digit}) == "step 9, train/loss: 2.5 before, 2.0 now"
    last_digit["9"] = {"train/loss": 2.5}
    assert first_difference(BEFORE, BEFORE | {"rows": last_digit}).startswith("step 10, train/loss: 2.25 before, 2.25")


def test_missing_or_new_numbers_and_other_weights_are_differences():
    without = {"9": {"train/loss": 2.5}, "10": {"train/loss": 2.25}}
    assert first_difference(BEFORE, BEFORE | {"rows": without}) == "step 10, val/bpb: 1.5 before, None now"
    assert first_difference(BEFORE | {"rows": without}, BEFORE) == "step 10, val/bpb: None before, 1.5 now"
    assert "step 10" in first_difference(BEFORE, BEFORE | {"rows": {"9": {"train/loss": 2.5}}})
    assert first_difference(BEFORE, BEFORE | {"weights": "cd"}) == "the final weights: ab before, cd now"


def test_the_made_up_text_is_a_function_of_the_seed():
    assert documents(1, 3) == documents(1, 5)[:3] != documents(2, 3)
