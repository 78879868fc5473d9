"""Bits per byte: the definition, and that nothing about how the rows are dealt out moves the value."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from pipeline.evals import bpb
from pipeline.evals.bpb import bits_per_byte, compiled_nll
from pipeline.evals.metric import BitsPerByte
from tests.model.tiny_models import tiny
from tests.ranks import printed_on_ranks

V, T, BOS = 97, 24, 0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=V, n_positions=T, n_layer=2, n_embd=32, n_head=2, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def rows():
    """11 rows of a training batch with ragged masks, padding and special targets, and the byte length of each id."""
    generator = torch.Generator().manual_seed(2)
    row = torch.randint(0, V, (11, T + 1), generator=generator)
    labels = row[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, :4] = torch.tensor([BOS, 96, 5, 96])  # specials
    labels[3, 5:] = -100  # padding
    labels[7] = -100  # a filler row
    byte_lengths = torch.randint(1, 9, (V,), generator=generator)
    byte_lengths[[BOS, 96]] = 0
    return {"input_ids": row[:, :-1], "shift_labels": labels}, byte_lengths


def cut(batch, size):
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, len(batch["input_ids"]), size)]


def numbers(result):
    return dataclasses.astuple(result)[:5]  # without those of each source


def by_hand(model, batch, byte_lengths):
    """The definition, one target at a time."""
    nats, num_bytes, all_nats, tokens = 0.0, 0, 0.0, 0
    with torch.no_grad():
        for ids, labels in zip(batch["input_ids"], batch["shift_labels"], strict=True):
            log_p = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            for t, label in enumerate(labels.tolist()):
                if label == -100:
                    continue
                all_nats, tokens = all_nats - log_p[t, label].item(), tokens + 1
                if byte_lengths[label] > 0:
                    nats, num_bytes = nats - log_p[t, label].item(), num_bytes + int(byte_lengths[label])
    return nats / num_bytes / math.log(2), all_nats / tokens, nats, num_bytes, tokens


@pytest.mark.full
def test_bpb_is_nats_of_text_targets_over_ln2_times_their_bytes(model, rows):
    batch, byte_lengths = rows
    expected = by_hand(model, batch, byte_lengths)
    got = bits_per_byte(model, cut(batch, 4), byte_lengths.numpy(), device="cpu")
    assert numbers(got) == pytest.approx(expected, rel=1e-6)
    assert (got.bytes, got.tokens) == expected[3:]


@pytest.mark.full
def test_loss_counts_special_targets_and_bpb_does_not(model, rows):
    batch, byte_lengths = rows
    only_special = {
        **batch,
        "shift_labels": torch.where(
            byte_lengths[batch["shift_labels"].clamp(min=0)] == 0, batch["shift_labels"], -100
        ),
    }
    with_special = bits_per_byte(model, [batch], byte_lengths, device="cpu")
    without = {**batch, "shift_labels": torch.where(only_special["shift_labels"] == -100, batch["shift_labels"], -100)}
    plain = bits_per_byte(model, [without], byte_lengths, device="cpu")
    assert (with_special.bpb, with_special.bytes) == (plain.bpb, plain.bytes)
    assert with_special.tokens > plain.tokens
    assert with_special.loss != plain.loss


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 3, 11])
def test_bpb_is_the_same_for_any_batch_size_and_padding(model, rows, size, monkeypatch):
    batch, byte_lengths = rows
    monkeypatch.setattr(bpb, "LOGITS_AT_ONCE", 2 * T * V)  # two rows of logits at a time
    monkeypatch.setattr(bpb, "TARGETS_AT_ONCE", 7)
    whole = bits_per_byte(model, [batch], byte_lengths, device="cpu")
    filler = {"input_ids": torch.full((2, T), BOS), "shift_labels": torch.full((2, T), -100)}
    got = bits_per_byte(model, [*cut(batch, size), filler], byte_lengths, device="cpu")
    assert numbers(got) == pytest.approx(numbers(whole), rel=1e-6)


@pytest.mark.full
def test_the_sources_of_a_mixture_have_the_bpb_of_their_rows_alone(model, rows):
    batch, byte_lengths = rows
    source = torch.tensor([0, 2, 2, 0, 0, 2, 0, 1, -1, 2, 0])  # row 7, the only one of source 1, has no target
    alone = [bits_per_byte(model, [_of(batch, source == n)], byte_lengths, device="cpu") for n in (0, 2)]
    kept = _of({**batch, "source": source}, source >= 0)  # a row of -1 is a filler, whose targets are all ignored
    for size in (1, 4, 11):
        got = bits_per_byte(model, cut(kept, size), byte_lengths, device="cpu", sources=3)
        assert got.of_sources[1] is None
        assert [got.of_sources[0], got.of_sources[2]] == pytest.approx([one.bpb for one in alone], rel=1e-6)
        assert got.nats == pytest.approx(sum(one.nats for one in alone), rel=1e-6)
        assert got.bytes == sum(one.bytes for one in alone)
    assert bpb.by_source("val/bpb", got, ["a", "b", "c"]) == {
        "val/bpb/a": got.of_sources[0],
        "val/bpb/c": got.of_sources[2],
    }
    assert bpb.by_source("val/bpb", alone[0], []) == {}


def _of(batch, kept):
    return {name: tensor[kept] for name, tensor in batch.items()}


@pytest.mark.full
def test_an_infinite_loss_at_an_ignored_target_does_not_reach_the_sums(rows):
    class Overconfident(torch.nn.Module):
        def per_token_nll(self, input_ids, shift_labels, position_ids=None):
            return torch.where(shift_labels == BOS, torch.inf, 1.0)

    batch, byte_lengths = rows
    got = bits_per_byte(Overconfident(), [batch], byte_lengths, device="cpu")
    assert got.nats == ((batch["shift_labels"] != -100) & (byte_lengths[batch["shift_labels"].clamp(min=0)] > 0)).sum()
    assert got.loss == math.inf


@pytest.mark.full
def test_target_bytes_replace_the_bytes_of_ids_and_their_zero_still_costs(model, rows):
    batch, byte_lengths = rows
    spans = torch.where(batch["shift_labels"] == -100, 5, byte_lengths[batch["shift_labels"].clamp(min=0)])
    spans[batch["shift_labels"] == BOS] = -1
    got = bits_per_byte(model, [{**batch, "target_bytes": spans}], None, device="cpu")
    by_id = bits_per_byte(model, [batch], byte_lengths, device="cpu")
    assert got.bytes == by_id.bytes
    assert got.nats > by_id.nats  # id 96 covers 0 bytes here and is text all the same


@pytest.mark.full
def test_position_ids_isolate_documents_as_two_separate_rows_would(model):
    row = torch.randint(1, V, (1, T), generator=torch.Generator().manual_seed(5))
    half = T // 2
    labels = row.roll(-1, 1)
    positions = torch.arange(T)[None] % half
    packed = {"input_ids": row, "shift_labels": labels, "position_ids": positions}
    apart = {"input_ids": row.view(2, half), "shift_labels": labels.view(2, half)}
    lengths = torch.ones(V)
    assert bits_per_byte(model, [packed], lengths, device="cpu").nats == pytest.approx(
        bits_per_byte(model, [apart], lengths, device="cpu").nats, rel=1e-6
    )


@pytest.mark.full
def test_scoring_leaves_the_training_mode_as_it_was(model, rows):
    batch, byte_lengths = rows
    model.train()
    try:
        trained = bits_per_byte(model, [batch], byte_lengths, device="cpu")  # dropout must be off inside
        assert model.training
    finally:
        model.eval()
    assert trained == bits_per_byte(model, [batch], byte_lengths, device="cpu")


@pytest.mark.full
def test_nothing_scored_is_an_error_and_no_number(model, rows):
    batch, byte_lengths = rows
    with pytest.raises(ValueError, match="no byte of text"):
        bits_per_byte(model, [], byte_lengths, device="cpu")
    with pytest.raises(ValueError, match="no byte of text"):
        bits_per_byte(model, [batch], torch.zeros(V), device="cpu")


def run_ranks(folder, rows_per_batch):
    printed = printed_on_ranks(Path(__file__).with_name("bpb_rank.py"), folder, rows_per_batch)
    return [json.loads(output) for output in printed]


@pytest.mark.full
def test_bpb_on_two_gloo_ranks_equals_one_process(model, rows, tmp_path):
    batch, byte_lengths = rows
    batch = {**batch, "source": torch.arange(11) % 3}
    model.save_pretrained(tmp_path / "model")
    torch.save({"batch": batch, "byte_lengths": byte_lengths, "sources": 3}, tmp_path / "data.pt")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    one = bits_per_byte(saved, [batch], byte_lengths, device="cpu", sources=3)
    first, second = run_ranks(tmp_path, rows_per_batch=3)
    assert first == second
    assert first.pop("of_sources") == pytest.approx(one.of_sources, rel=1e-6)
    assert list(first.values()) == pytest.approx(numbers(one), rel=1e-6)


def test_a_rank_without_any_text_still_takes_part(model, rows, tmp_path):
    batch, byte_lengths = rows
    model.save_pretrained(tmp_path / "model")
    batch = {**batch, "shift_labels": batch["shift_labels"].clone()}
    batch["shift_labels"][1::2] = -100  # all of rank 1
    torch.save({"batch": batch, "byte_lengths": byte_lengths}, tmp_path / "data.pt")
    first, second = run_ranks(tmp_path, rows_per_batch=2)
    assert first == second
    assert first["bytes"] == bits_per_byte(model, [batch], byte_lengths, device="cpu").bytes


@pytest.mark.full
@pytest.mark.parametrize(("preset", "options"), [("gpt2", {}), ("modern", {}), ("modern", {"bigram_embeddings": 970})])
def test_our_model_scores_the_same_through_its_loss_and_its_logits(rows, preset, options):
    from pipeline.model.build import build_model
    from pipeline.recipe.sizes import PRESETS

    batch, byte_lengths = rows
    sizes = {
        "vocab_size": V,
        "n_positions": T,
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 2,
        "bos_token_id": BOS,
        "eos_token_id": 96,
    }
    ours = build_model("tandem", {**sizes, **PRESETS[preset], **options}, seed=4).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)))
    got = bits_per_byte(ours, cut(batch, 4), byte_lengths, device="cpu")
    assert numbers(got) == pytest.approx(by_hand(ours, batch, byte_lengths), rel=1e-5)


@pytest.mark.full
def test_the_compiled_model_matches_eager_with_one_graph_per_batch_kind(rows):
    batch, byte_lengths = rows
    batch = {name: value[:8] for name, value in batch.items()}
    packed = {**batch, "position_ids": torch.arange(T).remainder(7)[None].expand(8, -1).contiguous()}
    model = tiny("modern", vocab_size=V).train()
    counter = CompileCounterWithBackend("aot_eager")
    nll = compiled_nll(model, backend=counter)
    for _ in range(2):  # evaluations, with training between them
        for one in (batch, packed):
            eager = bits_per_byte(model, cut(one, 4), byte_lengths, device="cpu")
            got = bits_per_byte(model, cut(one, 4), byte_lengths, device="cpu", nll=nll)
            assert (got.bytes, got.tokens) == (eager.bytes, eager.tokens)
            assert got.nats == pytest.approx(eager.nats, rel=1e-5)
            assert model.training
        model(**batch).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert counter.frame_count == 2


@pytest.mark.full
def test_another_model_than_ours_is_scored_by_its_logits_whatever_is_compiled(model):
    assert compiled_nll(model, backend="aot_eager") is bpb.per_token_nll


@pytest.mark.full
def test_the_evaluate_metric_gives_the_bits_per_byte_of_the_evaluation(model, rows):
    batch, byte_lengths = rows
    nats, lengths = [], []
    with torch.no_grad():
        log_p_BTV = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    for row, column in (batch["shift_labels"] != -100).nonzero().tolist():
        label = batch["shift_labels"][row, column].item()
        nats.append(-log_p_BTV[row, column, label].item())
        lengths.append(int(byte_lengths[label]) or -1)
    metric = BitsPerByte()
    for part in (slice(0, 50), slice(50, None)):
        metric.add_batch(predictions=nats[part], references=lengths[part])
    expected = bits_per_byte(model, cut(batch, 4), byte_lengths.numpy(), device="cpu")
    assert metric.compute()["bits_per_byte"] == pytest.approx(expected.bpb, rel=1e-6)
    with pytest.raises(ValueError, match="no byte of text"):
        BitsPerByte().compute(predictions=[1.0], references=[-1])
