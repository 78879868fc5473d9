"""What is put onto a finished model: more ids, an adapter around the head."""

import pytest
import torch
from tiny_models import random_ids, tiny
from torch import nn

from pipeline.model.load import load_model
from pipeline.model.saved import save_model


class Adapted(nn.Module):
    """A head with a low-rank part, as PEFT wraps it: `weight` is the old head's."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head, self.low = head, nn.Parameter(torch.full((4, head.in_features), 0.03))

    @property
    def weight(self):
        return self.head.weight

    def forward(self, x):
        return (
            self.head(x)
            + (x @ self.low.t())
            .repeat_interleave(self.head.out_features // 4, dim=-1)
            .cumsum(-1)[..., : self.head.out_features]
        )


def test_an_adapter_around_the_head_joins_the_loss_and_gets_gradients(name):
    model = tiny(name, vocab_size=128)
    ids = random_ids(2, 20)
    plain = model(ids, labels=ids).loss
    model.lm_head = Adapted(model.lm_head)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert model.lm_head.low.grad.abs().sum() > 0
    model.eval()
    out = model(ids, labels=ids)
    expected = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(expected - plain) > 1e-3
    torch.testing.assert_close(torch.stack([loss, out.loss]), expected.expand(2), rtol=1e-6, atol=0)
    shifted = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    nats = model.per_token_nll(ids, shifted)
    torch.testing.assert_close(nats.sum() / (shifted != -100).sum(), expected, rtol=1e-6, atol=0)


@pytest.fixture
def one_thread():
    """Products of 192 and of 150 rows are cut at other places by several threads, and on Zen 5 then add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("asked", "multiple", "vocab_size"),
    [(104, None, 104), (150, None, 150), (104, 8, 104), (None, 8, 104), (64, None, 64)],
)
def test_changing_the_number_of_ids_keeps_the_others_and_reloads(
    name, tied, asked, multiple, vocab_size, tmp_path, one_thread
):
    model = tiny(name, tie_word_embeddings=tied)
    ids = random_ids(2, 20, vocab_size=64)
    before = model(ids).logits
    torch.manual_seed(0)
    model.resize_token_embeddings(asked, pad_to_multiple_of=multiple)
    after = model(ids).logits
    assert after.shape[-1] == vocab_size == model.config.vocab_size
    both = min(vocab_size, 101)
    torch.testing.assert_close(after[..., :both], before[..., :both], rtol=0, atol=1e-6)
    new = torch.full((1, 5), vocab_size - 1)
    assert torch.isfinite(model.train()(new, labels=new).loss)
    model.eval().save_pretrained(tmp_path / "theirs")
    save_model(model, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        loaded = load_model(tmp_path / folder)
        # Out of the mapped file: at its uneven addresses MKL may add in another order.
        loaded.load_state_dict({name: tensor.clone() for name, tensor in loaded.state_dict().items()}, assign=True)
        assert torch.equal(loaded(new).logits, model(new).logits)


def test_a_new_id_gets_the_mean_of_trained_rows_without_padding():
    model = tiny("modern")
    with torch.no_grad():
        for module in [model.transformer.wte, model.lm_head, model.transformer.h[3].attn.value_embedding]:
            module.weight[:101], module.weight[101:] = 7.0, 1000.0
    model.resize_token_embeddings(103)
    for module in [model.transformer.wte, model.lm_head, model.transformer.h[3].attn.value_embedding]:
        assert module.weight.shape[0] == 128
        assert (module.weight - 7).abs().max() < 0.1


def test_without_the_mean_new_rows_begin_as_a_new_model_does():
    model = tiny("gpt2", position_embedding="rope", tie_word_embeddings=False)
    model.resize_token_embeddings(4101, mean_resizing=False)
    for module in (model.transformer.wte, model.lm_head):
        assert module.weight[101:].std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
