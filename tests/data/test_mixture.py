import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.mixture import Mixture, SourceWeight, interleave, largest_remainder


def order(mixture, first=0, count=None):
    sources, ks = mixture.locate(first, mixture.total_rows - first if count is None else count)
    return list(zip(sources.tolist(), ks.tolist(), strict=True))


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 5000))
def test_slots_follow_the_weights_to_less_than_one_slot(weights, slots):
    counts = largest_remainder(weights, slots)
    assert sum(counts) == slots
    assert all(abs(n - w * slots / sum(weights)) < 1 for n, w in zip(counts, weights, strict=True))


def test_slots_of_a_source_are_evenly_spread():
    slots = interleave([30, 10, 2])
    for source, count in enumerate([30, 10, 2]):
        at = np.flatnonzero(slots == source)
        assert len(at) == count
        assert np.diff(at).max() <= np.ceil(42 / count) + 2


parts_of_mixtures = st.lists(
    st.builds(SourceWeight, weight=st.floats(0.1, 3), at_end=st.sampled_from(["repeat", "drop", "stop"])),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(parts_of_mixtures, st.integers(1, 9000), st.data())
def test_rows_anywhere_are_the_rows_of_the_whole_order(parts, total, data):
    mixture = Mixture(parts, total_rows=total)
    mixture.learn([data.draw(st.integers(1, 4000)) for _ in parts])
    whole = order(mixture)
    seen = [0] * len(parts)
    for source, k in whole:  # each source's rows come in order, none left out
        assert k == seen[source]
        seen[source] += 1
    assert mixture.used(mixture.total_rows) == seen
    first = data.draw(st.integers(0, mixture.total_rows))
    assert order(mixture, first) == whole[first:]
    assert mixture.used(first) == [sum(s == source for s, _ in whole[:first]) for source in range(len(parts))]
    for row in range(0, len(whole), 97):
        assert mixture.first_use(*whole[row]) == row


def test_a_source_that_ends_is_dropped_repeated_or_stops_the_run():
    def with_policy(at_end):
        mixture = Mixture([SourceWeight(1.0, at_end=at_end), SourceWeight(1.0)], total_rows=1000)
        mixture.learn([100, None])
        return mixture

    assert with_policy("repeat").used(1000) == [500, 500]
    dropped = with_policy("drop")
    assert dropped.used(1000) == [100, 900]
    assert [k for source, k in order(dropped, 0, 1000) if source == 1] == list(range(900))  # the other one goes on
    stopped = with_policy("stop")
    assert stopped.total_rows in (200, 201)
    assert stopped.used(stopped.total_rows)[0] == 100


def test_what_is_learned_of_a_later_end_does_not_change_earlier_rows():
    mixture = Mixture(
        [SourceWeight(1.0, at_end="drop"), SourceWeight(2.0, at_end="drop"), SourceWeight(1.0)], total_rows=3000
    )
    before = order(mixture, 0, 300)
    mixture.learn([None, 900, None])
    assert order(mixture, 0, 300) == before
    mixture.learn([150, 900, None])
    assert order(mixture, 0, 300) == before
    assert mixture.used(3000)[:2] == [150, 900]


def test_epochs_fix_the_rows_of_a_source_and_weights_share_others():
    mixture = Mixture([SourceWeight(None, epochs=2), SourceWeight(3.0), SourceWeight(1.0)], total_rows=10_000)
    assert not mixture.ready
    mixture.learn([7, None, None])
    assert mixture.used(10_000) == [14, 7490, 2496] or mixture.used(10_000) == [14, 7489, 2497]
    at = [i for i, (source, _) in enumerate(order(mixture)) if source == 0]
    assert max(np.diff(at)) < 10_000 / 14 * 1.2  # spread over the run


@pytest.mark.parametrize("epochs", [1.0, 2.0, 0.5])
def test_a_horizon_in_epochs_is_as_long_as_the_sources(epochs):
    mixture = Mixture([SourceWeight(None, epochs=1.0), SourceWeight(None, epochs=3.0)], epochs=epochs)
    mixture.learn([100, None])
    assert not mixture.ready
    mixture.learn([100, 40])
    assert mixture.total_rows == 220 * epochs
    assert mixture.used(mixture.total_rows) == [100 * epochs, 120 * epochs]


def test_a_tiny_weight_still_gets_rows():
    mixture = Mixture([SourceWeight(1.0), SourceWeight(1e-5)], total_rows=1_000_000)
    assert 1 <= mixture.used(1_000_000)[1] <= 20
