"""The chunked loss is the plain cross-entropy, its gradients too, and it honours num_items_in_batch."""

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TOKENS, random_ids, stirred, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from benchmarks.loss_head import bytes_per_logit, chunked_head
from pipeline.model import modeling_tandem as loss_tandem
from pipeline.model.build import PLAIN_HEADS, build_model
from pipeline.model.load import load_model
from pipeline.model.modeling_tandem import chunk_rows, summed_cross_entropy, token_nll
from pipeline.model.saved import save_model
from pipeline.training.model_checks import divides_by_num_items


def naive(hidden, weight, labels, softcap, reduction="sum"):
    logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=-100)


def problem(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(70, 32, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(50, 32, generator=generator)).requires_grad_()
    labels = torch.randint(0, 50, (70,), generator=generator)
    labels[torch.rand(70, generator=generator) < 0.3] = -100
    return hidden, weight, labels


@pytest.fixture(params=[10**9, 16 * 50, 1], ids=["one chunk", "chunks of 16", "row by row"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(loss_tandem.CHUNK_ELEMENTS, "cpu", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("softcap", [None, 15.0, 100.0])
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(softcap):
    hidden, weight, labels = problem()
    expected = naive(hidden, weight, labels, softcap)
    wanted = torch.autograd.grad(expected * 0.25, [hidden, weight])
    loss, nats = summed_cross_entropy(hidden, weight, labels, softcap=softcap)
    got = torch.autograd.grad(loss * 0.25, [hidden, weight])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    each = naive(hidden, weight, labels, softcap, reduction="none")
    assert not nats.requires_grad
    for found in (nats, token_nll(hidden, weight, labels, softcap=softcap)):
        torch.testing.assert_close(found.detach(), each.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("chunks")
def test_under_bf16_autocast_the_loss_is_fp32_and_close():
    hidden, weight, labels = problem()
    expected = naive(hidden, weight, labels, 15.0)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = summed_cross_entropy(hidden, weight, labels, softcap=15.0)
    got = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=3e-3, atol=0)
    for one, two in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - two).norm() <= 0.02 * two.norm()


def test_logits_far_beyond_the_caps_range_stay_finite():
    hidden, weight, labels = problem()
    for softcap in (15.0, 59.0, 61.0, 200.0, None):
        loss, _ = summed_cross_entropy(hidden * 1e3, weight, labels, softcap=softcap)
        gradients = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
        torch.testing.assert_close(loss, naive(hidden * 1e3, weight, labels, softcap), rtol=1e-5, atol=0)
        assert all(g.isfinite().all() for g in gradients)


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    hidden, weight, labels = problem()
    loss, _ = summed_cross_entropy(hidden, weight, labels.fill_(-100))
    assert loss.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, [hidden, weight]))
    model = tiny("modern")
    assert model(random_ids(2, 9), shift_labels=torch.full((2, 9), -100)).loss.item() == 0


@pytest.mark.full  # compiles
@pytest.mark.parametrize("softcap", [None, 15.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_head_gives_the_eager_loss_and_gradients(softcap, dtype, monkeypatch):
    monkeypatch.setitem(loss_tandem.CHUNK_ELEMENTS, "cpu", 40 * 50)  # two chunks
    hidden, weight, labels = problem(dtype)

    def head(hidden, weight, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return summed_cross_entropy(hidden, weight, labels, softcap=softcap)

    found = []
    for way in (head, torch.compile(head, fullgraph=True)):
        loss, nats = way(hidden, weight, labels)
        found.append([loss.detach(), nats, *torch.autograd.grad(loss, [hidden, weight])])
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2)  # one rounding of a gradient to bf16
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=rtol, atol=atol)


@pytest.mark.full  # compiles
@pytest.mark.parametrize(("softcap", "most"), [(15.0, 12.5), (None, 7.5)])
def test_a_compiled_head_moves_few_bytes_for_each_logit(softcap, most, monkeypatch):
    monkeypatch.setitem(loss_tandem.CHUNK_ELEMENTS, "cpu", 10**9)
    assert bytes_per_logit(chunked_head(softcap), rows=512, width=64, vocab=32_768) < most


def test_a_small_head_takes_one_chunk_and_a_large_one_equal_chunks():
    assert chunk_rows(16 * 256, 4096, "cuda") == 4096
    assert chunk_rows(16 * 2048, 32768, "cuda") == 1024
    assert chunk_rows(16 * 2048, 32768, "cuda", fused_bf16=True) == 2979  # 11 chunks of as many bytes
    assert chunk_rows(16 * 2048, 32768, "cpu") == 256
    assert chunk_rows(1000, 2**25, "cuda") == 1


def ragged(rows=8, length=24):
    ids, labels = random_ids(rows, length), random_ids(rows, length, seed=1)
    for row in range(rows):
        labels[row, : 2 * row] = -100  # from all targets to 10 of 24
    labels[3] = -100
    return ids, labels


def gradients(model, pieces, labels_name="shift_labels"):
    ids, labels = ragged()
    count = torch.tensor(int((labels != -100).sum()))
    model.zero_grad()
    total = 0.0
    for part_ids, part_labels in zip(ids.chunk(pieces), labels.chunk(pieces), strict=True):
        given = {"labels": part_labels, "shift_labels": part_labels, "num_items_in_batch": count}
        output = model(part_ids, **given)
        assert output.logits is None
        output.loss.backward()
        total += output.loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_accumulating_four_ragged_micro_batches_is_one_batch(model):
    model.train()
    loss, whole = gradients(model, 1)
    accumulated, parts = gradients(model, 4)
    assert accumulated == pytest.approx(loss, rel=1e-6)
    assert (parts - whole).norm() <= 1e-5 * whole.norm()


def test_the_loss_is_the_token_mean_and_shifts_labels_where_needed(model):
    ids, labels = ragged()
    logits = model(ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert model(ids, shift_labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert model(ids, labels=ids).loss.item() == pytest.approx(shifted.item(), rel=1e-5)
    assert torch.equal(model(ids, labels=ids).logits, logits)


def test_nats_per_token_sum_to_the_loss_and_unscored_ones_are_zero(model):
    ids, labels = ragged()
    nats = model.per_token_nll(ids, labels)
    assert nats.shape == ids.shape
    assert nats.dtype == torch.float32
    assert not nats[labels == -100].any()
    assert not nats.requires_grad
    expected = model(ids, shift_labels=labels, num_items_in_batch=1).loss.item()
    assert nats.sum().item() == pytest.approx(expected, rel=1e-5)
    packed = torch.arange(24).remainder(12)[None].expand(8, -1)
    halves = [model.per_token_nll(ids[:, part], labels[:, part]) for part in (slice(0, 12), slice(12, 24))]
    torch.testing.assert_close(model.per_token_nll(ids, labels, packed), torch.cat(halves, 1), rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(model):
    model.train()
    loss, plain = gradients(model, 2)
    model.activation_checkpointing_enable()
    again, checkpointed = gradients(model, 2)
    assert again == loss
    assert torch.equal(plain, checkpointed)


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_own_models_divide_by_the_given_number_and_a_mean_is_detected(name):
    model = tiny(name).train()
    model.config._attn_implementation = "flash_attention_2"  # which this CPU could not run
    assert divides_by_num_items(model)
    assert model.training
    assert model.config._attn_implementation == "flash_attention_2"
    forward = model.forward
    model.forward = lambda num_items_in_batch, **inputs: forward(**inputs)
    assert not divides_by_num_items(model)


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 101,
    "num_key_value_heads": 2,
}


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return made


def test_a_stock_model_never_holds_its_batch_of_logits_while_training(monkeypatch):
    monkeypatch.setitem(loss_tandem.CHUNK_ELEMENTS, "cpu", 16 * 1000)
    model = build_model("qwen3", SIZES | TOKENS | {"vocab_size": 1000}, seed=1).train()
    ids, _ = ragged()  # 192 positions
    found = {}
    for name, forward in (("chunked", model.forward), ("stock", type(model).forward.__get__(model))):
        with Largest() as largest:
            forward(
                ids, labels=ids, shift_labels=ids, num_items_in_batch=torch.tensor(192.0), use_cache=False
            ).loss.backward()
        found[name] = largest.elements
    assert found["stock"] == 192 * 1000
    assert found["chunked"] == 192 * 256  # its queries: two heads of 128
    model.eval()
    with Largest() as largest:
        model.per_token_nll(ids, ids)
    assert largest.elements == 192 * 256


@pytest.mark.parametrize("kind", sorted(PLAIN_HEADS))
def test_a_stock_model_trains_with_the_chunked_loss_and_its_own_gradients(kind, monkeypatch):
    monkeypatch.setitem(loss_tandem.CHUNK_ELEMENTS, "cpu", 16 * 101)
    model = stirred(build_model(kind, SIZES | TOKENS, seed=1)).train()
    stock = type(model)(model.config).train()
    stock.load_state_dict(model.state_dict())
    ids, labels = ragged()
    packed = torch.arange(24).remainder(12)[None].expand(8, -1)
    batch = {"input_ids": ids, "labels": labels, "shift_labels": labels, "position_ids": packed}
    batch |= {"num_items_in_batch": torch.tensor(7.0)}
    expected, output = stock(**batch, use_cache=False), model(**batch)
    each = F.cross_entropy(expected.logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.nats.flatten(), each.detach(), rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    output.loss.backward()
    for one, two in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.per_token_nll(ids, labels, packed), output.nats, rtol=1e-6, atol=1e-6)
    shifted = F.cross_entropy(stock(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, shifted, rtol=1e-6, atol=0)


def test_a_stock_model_with_chunked_loss_stays_stock_outside_training(tmp_path):
    model = stirred(build_model("qwen3", SIZES | TOKENS, seed=1)).eval()
    assert inspect.signature(model.forward) == inspect.signature(type(model)(model.config).forward)
    ids, labels = ragged()
    logits = type(model).forward(model, ids).logits
    output = model(ids, labels=labels, shift_labels=labels, num_items_in_batch=7.0)
    assert torch.equal(output.logits, logits)
    assert torch.equal(
        model(ids[:, :5], torch.ones_like(ids[:, :5]), logits_to_keep=1).logits, model(ids[:, :5]).logits[:, -1:]
    )
    assert model.generate(ids[:1], max_new_tokens=3, do_sample=False).shape == (1, 27)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert hasattr(load_model(tmp_path), "per_token_nll")


def test_a_class_whose_forward_may_do_more_computes_its_loss_itself():
    class Scaled(LlamaForCausalLM):
        pass

    for kind, fields in (
        ("granite", SIZES | {"logits_scaling": 4.0}),
        (Scaled, SIZES),
    ):
        model = build_model(kind, fields | TOKENS, seed=1)
        assert "forward" not in vars(model)
        assert not hasattr(model, "per_token_nll")
