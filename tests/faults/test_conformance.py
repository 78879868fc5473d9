"""The conformance program names what is wrong with a trainer that resumes wrongly on purpose, and nothing of one that is right."""

from pathlib import Path

import pytest

from faults.conformance.adapters import subject
from faults.conformance.cuts import BY_NAME
from faults.conformance.driver import Trainings

TRAINER = Path(__file__).with_name("counted_trainer.py")


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return {cut: word} of the trainer that is wrong in the given way."""

    def judged(wrong: str, *cuts: str) -> dict[str, str]:
        monkeypatch.setenv("WRONG", wrong)
        trainings = Trainings(subject(str(TRAINER)), tmp_path)
        try:
            return {name: trainings.verdict(BY_NAME[name]).word for name in cuts}
        finally:
            trainings.close()

    return judged


def test_a_trainer_that_goes_on_where_it_stopped_is_exact_in_every_cut(words):
    assert words("", *BY_NAME) == {**dict.fromkeys(BY_NAME, "exact"), "other_ranks": "rows exact"}


@pytest.mark.parametrize(
    ("wrong", "cut", "word"),
    [
        ("repeats the epoch's first rows", "once", "rows +20 -20"),  # the 5 batches of the checkpoint
        ("repeats the epoch's first rows", "second_epoch", "rows +16 -16"),
        ("repeats the epoch's first rows", "epoch_end", "exact"),
        ("skips a batch", "once", "rows +4 -4"),
        ("another order of the remaining rows", "once", "order"),
        ("optimizer", "across_epochs", "losses from step 7"),  # step 6 has its loss before the update
        ("takes a half-written checkpoint", "in_a_save", "restarted"),
        ("takes a half-written checkpoint", "twice", "exact"),
        ("reads a half-written checkpoint", "in_a_save", "error"),
        ("a step too many after the end", "after_the_end", "steps +1"),
        ("other weights at the end", "once", "weights"),
        ("refuses another number of workers", "other_workers", "refused"),
        ("refuses another number of workers", "workers", "exact"),
        (
            "other losses in each training",
            "once",
            "rows exact",
        ),  # no two uncut trainings agree: only rows can be judged
    ],
)
def test_what_a_trainer_does_wrong_is_named(words, wrong, cut, word):
    assert words(wrong, cut) == {cut: word}
