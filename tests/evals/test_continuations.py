"""Rows scored in batches, with prefixes forwarded once: the numbers of one row at a time."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.evals import core as continuations
from pipeline.evals.core import ROWS_OF_A_PREFIX, batches_of, groups_of, score_rows
from pipeline.model.load import load_model
from pipeline.monitor.heartbeat import beats
from tests.model.tiny_models import tiny


def one_at_a_time(model, rows):
    """Summed nats and whether all targets are the likeliest, a row by itself, with all logits."""
    nats, greedy = [], []
    with torch.no_grad():
        for ids, start in rows:
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
            targets = torch.from_numpy(ids[start:])
            nats.append(F.cross_entropy(logits[start - 1 : len(ids) - 1], targets, reduction="sum").item())
            greedy.append(bool((logits[start - 1 : len(ids) - 1].argmax(-1) == targets).all()))
    return np.array(nats), np.array(greedy)


@pytest.fixture(scope="module")
def rows():
    """Rows with long shared beginnings, rows within rows, equal rows, and rows that share nothing."""
    generator = np.random.default_rng(0)

    def ids(length):
        return generator.integers(3, 101, length)

    found = []
    for _ in range(6):
        prefix = ids(generator.integers(12, 40))
        for _ in range(generator.integers(2, 5)):
            found.append((np.concatenate([prefix, ids(generator.integers(1, 9))]), len(prefix)))
    chain = ids(8)
    for _ in range(4):
        longer = np.concatenate([chain, ids(5)])
        found.append((longer, len(chain)))
        chain = longer
    found += [(ids(generator.integers(2, 50)), 1) for _ in range(9)]
    return [*found, found[0], found[1]]


@pytest.mark.parametrize("name", ["gpt2", "modern"])
@pytest.mark.parametrize("batch_tokens", [1, 100, 4096])
def test_batched_rows_have_the_scores_of_single_ones(name, batch_tokens, rows):
    model = tiny(name)
    nats, greedy = one_at_a_time(model, rows)
    scores = score_rows(model, rows, device="cpu", batch_tokens=batch_tokens)
    np.testing.assert_allclose(scores.nats, nats, rtol=2e-5)
    assert scores.greedy.tolist() == greedy.tolist()


def test_a_target_that_is_the_likeliest_is_distinguished_from_others():
    model = tiny("gpt2")
    ids = [5]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 101]
    assert score_rows(model, [(np.array(ids), 1), (np.array(other), 1)], device="cpu").greedy.tolist() == [True, False]


def assert_as_one_at_a_time(model, rows):
    nats, greedy = one_at_a_time(model, rows)
    scores = score_rows(model, rows, device="cpu")
    np.testing.assert_allclose(scores.nats, nats, rtol=2e-5)
    assert scores.greedy.tolist() == greedy.tolist()


# In the order of ids, the next row shares less with the last one, or more.
@pytest.mark.parametrize("parted", [10, 90])
def test_rows_that_part_at_several_places_score_as_when_alone(parted):
    generator = np.random.default_rng(2)
    trunk = generator.integers(40, 60, 40)
    depths = (27, 30, 32, 35, 38)
    ids = [np.concatenate([trunk[:d], [parted], generator.integers(3, 101, 44 - d)]) for d in depths]
    assert_as_one_at_a_time(tiny("gpt2"), [(some, 42) for some in ids])


def test_a_row_within_another_may_be_scored_from_an_earlier_token_on():
    generator = np.random.default_rng(3)
    trunk = generator.integers(3, 101, 40)
    ids = [np.concatenate([trunk, generator.integers(3, 101, 5)]) for _ in range(3)]
    assert_as_one_at_a_time(tiny("gpt2"), [(ids[0], 40), (ids[1], 40), (ids[2], 40), (ids[1][:38], 30)])


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_a_shared_prefix_is_forwarded_once(name):
    generator = np.random.default_rng(1)
    prefix = generator.integers(3, 101, 40)
    rows = [(np.concatenate([prefix, generator.integers(3, 101, 4)]), 40) for _ in range(4)]
    model, shapes = tiny(name), []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[:2]))
    scores = score_rows(model, rows, device="cpu")
    # After a look at what is kept of a position; the prefix's last token gives each row the first target's logits.
    assert shapes == [(1, 1), (1, 39), (4, 5)]
    np.testing.assert_allclose(scores.nats, one_at_a_time(tiny(name), rows)[0], rtol=2e-5)


def test_a_model_without_a_cache_is_scored_without_sharing(rows):
    class Uncached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.device = tiny("gpt2"), torch.device("cpu")

        def forward(self, input_ids):
            return self.inner(input_ids=input_ids, use_cache=False)

    scores = score_rows(Uncached().eval(), rows, device="cpu")
    np.testing.assert_allclose(scores.nats, one_at_a_time(tiny("gpt2"), rows)[0], rtol=2e-5)


def test_groups_hold_every_row_once_and_batches_every_group(rows):
    groups = groups_of(rows)
    assert sorted(number for group in groups for number in group.numbers) == list(range(len(rows)))
    for group in groups:
        first = rows[group.numbers[0]][0][: group.shared].tolist()
        for ids, start in (rows[number] for number in group.numbers):
            assert ids[: group.shared].tolist() == first
            assert start > group.shared
        assert group.longest == max(len(rows[number][0]) for number in group.numbers)
    batches = batches_of(groups, batch_tokens=200, cached_tokens=150)
    assert sorted(map(id, (g for b in batches for g in b))) == sorted(map(id, groups))
    for batch in batches:
        num_rows = sum(len(group.numbers) for group in batch)
        kept, longest = min(g.shared for g in batch), max(g.longest for g in batch)
        assert len(batch) == 1 or num_rows * (longest - kept) <= 200
        assert len(batch) == 1 or not kept or num_rows * longest <= 150


def test_a_long_row_is_not_padding_for_short_ones_and_comes_first():
    rows = [(np.arange(n, n + length), 1) for n, length in enumerate([10] * 9 + [500])]
    batches = batches_of(groups_of(rows), batch_tokens=10_000, cached_tokens=0)
    assert [[group.longest for group in batch] for batch in batches] == [[500], [10] * 9]


def test_a_prefix_is_dealt_out_to_so_many_rows_at_most():
    rows = [(np.append(np.arange(20), number), 20) for number in range(40)]
    assert sorted(len(group.numbers) for group in groups_of(rows)) == [8, ROWS_OF_A_PREFIX, ROWS_OF_A_PREFIX]


def test_a_batch_keeps_no_more_than_the_memory_for_kept_prefixes(monkeypatch):
    generator = np.random.default_rng(4)
    prefixes = [generator.integers(3, 101, 20) for _ in range(2)]
    rows = [(np.append(prefix, number), 20) for prefix in prefixes for number in (5, 6)]
    for limit, known in ((continuations.CACHE_BYTES, 1), (1, 2)):
        monkeypatch.setattr(continuations, "CACHE_BYTES", limit)
        batches: list = []
        score_rows(tiny("gpt2"), rows, device="cpu", watched=lambda some, seen=batches: seen.extend(some) or some)
        assert len(batches) == known


def test_ids_of_large_vocabularies_are_distinguished():
    rows = [(np.array([1, 2, 70_000]), 2), (np.array([1, 2, 70_000 - 65_536]), 2)]
    assert sum(len(group.numbers) for group in groups_of(rows)) == 2


def test_losses_use_fp32_logits_for_any_number_of_targets_at_once(monkeypatch):
    ids = np.random.default_rng(3).integers(3, 101, 40)
    model = tiny("gpt2").bfloat16()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].float()
    known = F.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none").double().sum().item()
    for at_once in (continuations.TARGETS_AT_ONCE, 7):
        monkeypatch.setattr(continuations, "TARGETS_AT_ONCE", at_once)
        assert score_rows(model, [(ids, 1)], device="cpu").nats == pytest.approx([known], rel=1e-6)


def test_the_reference_weights_are_scored_alike_in_batches(rows, stories):
    model = load_model(stories, dtype=torch.float32)
    nats, greedy = one_at_a_time(model, rows)
    scores = score_rows(model, rows, device="cpu")
    np.testing.assert_allclose(scores.nats, nats, rtol=2e-5)
    assert scores.greedy.tolist() == greedy.tolist()


def test_a_training_model_is_scored_without_dropout_and_keeps_its_mode(rows):
    model = tiny("gpt2", resid_pdrop=0.5).train()
    graphs = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: graphs.append(output.grad_fn))
    before = beats()
    scores = score_rows(model, rows, device="cpu", batch_tokens=100)
    assert model.training
    assert not any(graphs)
    assert beats() - before > 3  # a sign of life for each batch
    np.testing.assert_allclose(scores.nats, one_at_a_time(tiny("gpt2"), rows)[0], rtol=2e-5)
