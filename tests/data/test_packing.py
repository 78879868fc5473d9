from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.packing import PACKERS, ConversationPacker, PackedRows, best_fit

BOS, PAD = 1, 0
lengths_of_documents = st.lists(st.integers(1, 70), min_size=1, max_size=60)


def packer(name, *, row_tokens=16, documents=8):
    return PACKERS[name](row_tokens=row_tokens, bos=BOS, pad=PAD, dtype="uint16", documents=documents)


def documents(lengths):
    """Documents whose tokens are all different: 2, 3, 4 ..."""
    starts = np.cumsum([2, *lengths])
    return [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]


def pack(packer, texts):
    parts = []
    for i, ids in enumerate(texts):
        parts += packer.add([(ids, (0, i // 4, i))])
    return PackedRows.joined(parts + packer.finish())


def targets(rows):
    """The trained targets in row order, as the training batch masks them."""
    return [int(t) for row, used in zip(rows.input_ids, rows.used, strict=True) for t in row[1:used]]


@given(lengths_of_documents)
def test_cut_and_fit_makes_every_text_token_a_target_exactly_once(lengths):
    texts = documents(lengths)
    made = pack(packer("cut_and_fit"), texts)
    assert sorted(t for t in targets(made) if t != BOS) == sorted(np.concatenate(texts).tolist())
    assert (made.input_ids[:, 0] == BOS).all()
    assert all((row[used:] == PAD).all() for row, used in zip(made.input_ids, made.used, strict=True))


@given(lengths_of_documents)
def test_cut_and_fit_starts_every_piece_of_a_document_with_bos(lengths):
    texts = documents(lengths)
    ends = {int(ids[-1]) for ids in texts}
    made = pack(packer("cut_and_fit"), texts)
    for row, used in zip(made.input_ids, made.used, strict=True):
        for before, token in pairwise(row[:used].tolist()):
            assert (token == BOS and before in ends) or before == BOS or token == before + 1


def test_cut_and_fit_pads_under_half_a_percent_of_web_like_lengths():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(600), 1.0, 4096), 10, 50_000).astype(int)
    made = pack(packer("cut_and_fit", row_tokens=2048, documents=1024), [np.full(n, 7) for n in lengths])
    assert 1 - made.used.sum() / made.input_ids.size < 0.005


@given(st.lists(st.integers(2, 17), max_size=80))
def test_best_fit_bins_hold_every_piece_once_within_capacity(lengths):
    bins = best_fit(lengths, 17)
    assert sorted(i for numbers in bins for i in numbers) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in numbers) <= 17 for numbers in bins)


def linear_scan_best_fit_crop(texts, *, width, buffer_size):
    """The published loader's loop on one rank: scan the buffer for the largest that fits, else crop the shortest."""
    todo = [[BOS, *ids.tolist()] for ids in texts]
    buffer, rows = [], []
    while True:
        row = []
        while len(row) < width:
            while len(buffer) < buffer_size:
                if not todo:
                    return rows
                buffer.append(todo.pop(0))
            room = width - len(row)
            fitting = [i for i in range(len(buffer)) if len(buffer[i]) <= room]
            if fitting:
                row += buffer.pop(max(fitting, key=lambda i: (len(buffer[i]), -i)))
            else:
                row += buffer.pop(min(range(len(buffer)), key=lambda i: len(buffer[i])))[:room]
        rows.append(row)


@given(lengths_of_documents)
def test_best_fit_crop_takes_the_documents_that_a_linear_scan_takes(lengths):
    texts = documents(lengths)
    expected = linear_scan_best_fit_crop(texts, width=17, buffer_size=8)
    made = packer("best_fit_crop")
    rows = [
        row for i, ids in enumerate(texts) for part in made.add([(ids, (0, 0, i))]) for row in part.input_ids.tolist()
    ]
    assert rows == expected


@given(lengths_of_documents)
def test_best_fit_crop_rows_are_full_and_what_is_cropped_is_counted(lengths):
    texts = documents(lengths)
    crop = packer("best_fit_crop")
    made = pack(crop, texts)
    assert (made.used[:-1] == 17).all()
    assert (made.input_ids[:, 0] == BOS).all()
    assert sum(t != BOS for t in targets(made)) + crop.counts["cropped_tokens"] == sum(lengths)


@given(lengths_of_documents)
def test_concat_is_the_stream_of_documents_with_every_token_a_target_once(lengths):
    texts = documents(lengths)
    stream = np.concatenate([np.concatenate([[BOS], ids]) for ids in texts]).tolist()
    assert targets(pack(packer("concat"), texts)) == stream[1:]


@pytest.mark.parametrize("name", list(PACKERS))
@settings(deadline=None, max_examples=40)
@given(lengths=lengths_of_documents, cut=st.integers(0, 60))
def test_packing_continues_from_its_state_as_if_uninterrupted(name, lengths, cut):
    texts = documents(lengths)
    first, whole = packer(name), pack(packer(name), texts)
    parts = [part for i, ids in enumerate(texts[:cut]) for part in first.add([(ids, (0, i // 4, i))])]
    second = packer(name)
    second.restore({key: array.copy() for key, array in first.state().items()})
    parts += second.add([(ids, (0, i // 4, i)) for i, ids in enumerate(texts[cut:], start=cut)])  # all at once, too
    resumed = PackedRows.joined(parts + second.finish())
    for name_of_array in ("input_ids", "origins", "used"):
        np.testing.assert_array_equal(getattr(resumed, name_of_array), getattr(whole, name_of_array))


def test_packed_conversations_keep_their_masks_starts_and_order_over_a_resume():
    draw = np.random.default_rng(1)
    talks = [(draw.integers(2, 99, n).tolist(), (draw.random(n) < 0.5).tolist()) for n in draw.integers(2, 17, 50)]

    def packed(cut):
        settings = {"row_tokens": 16, "pad": PAD, "dtype": "uint16", "documents": 8}
        here, parts = ConversationPacker(**settings), []
        for i, (ids, trained) in enumerate(talks):
            if i == cut:
                state, here = here.state(), ConversationPacker(**settings)
                here.restore(state)
            parts += here.add(ids, trained, (0, 0, i))
        return PackedRows.joined(parts + here.finish())

    whole = packed(None)
    for name in ("input_ids", "origins", "used", "trained", "starts"):
        np.testing.assert_array_equal(getattr(packed(21), name), getattr(whole, name))
    found = []
    for row, used, trained, starts in zip(whole.input_ids, whole.used, whole.trained, whole.starts, strict=True):
        assert used == len(row) or starts[used]  # the padding is a segment of its own
        cuts = [*np.flatnonzero(starts[:used]), used]
        found += [(row[a:b].tolist(), trained[a:b].tolist()) for a, b in pairwise(cuts)]
    assert sorted(found) == sorted(talks)


def test_a_waiting_document_does_not_keep_its_whole_block_in_memory():
    packing = packer("best_fit_crop", row_tokens=16, documents=8)
    block = np.arange(300, dtype=np.uint16)
    packing.add([(block[:100], (0, 0, 0)), (block[100:103], (0, 0, 1)), (block[103:300], (0, 0, 2))])
    assert len(packing.buffer) == 3
    assert not any(np.shares_memory(ids, block) for ids, _ in packing.buffer.values())
    packing.add([(block[300 - 7 * n : 305 - 7 * n], (0, 1, n)) for n in range(1, 7)])
    assert packing.room < 17  # a row is begun
    assert not any(np.shares_memory(ids, block) for ids in packing.laid)
