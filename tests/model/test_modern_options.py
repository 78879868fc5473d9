"""Each option of `modern`, alone and with the others, against its definition spelt out token by token."""

import pytest
import torch
from tiny_models import MODERN, NANOCHAT, random_ids, tiny

ON = {"value_embeddings": True, "residual_lambdas": True, "backout": True, "smear": True, "qk_norm_scale": 1.2}
WINDOW = {"window_pattern": "SSSL", "sliding_window": 9}
BIGRAMS = {"bigram_embeddings": 53}  # of no preset
OFF = {name: type(value)() for name, value in ON.items()} | {"qk_norm_scale": 1.0} | dict.fromkeys(WINDOW)
CASES = {name: {name: value} for name, value in ON.items()} | {
    "windows": WINDOW,
    "bigrams": BIGRAMS,
    "all": ON | WINDOW | BIGRAMS,
}


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(vector, position):
    half = vector.shape[-1] // 2
    angles = position * 100000.0 ** (-torch.arange(half) / half)
    a, b = vector[..., :half], vector[..., half:]
    return torch.cat([a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()], -1)


def spelt_out(model, ids):
    """Logits (T, V) of one row, from the weights by name."""
    config, w = model.config, {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    heads, kv_heads, width = config.n_head, config.n_kv_head, config.head_dim
    x = norm(w["wte.weight"][ids])
    if config.smear:
        gates = w["smear_lambda"] * torch.sigmoid(x[:, :24] @ w["smear_gate.weight"].T)
        x = torch.stack([x[0], *(x[t] + gates[t] * x[t - 1] for t in range(1, len(ids)))])
    if config.bigram_embeddings:
        pairs = zip(ids[1:].tolist(), ids[:-1].tolist(), strict=True)
        rows = [52, *(((36313 * token) ^ (27191 * before)) % 52 for token, before in pairs)]
        bigrams = w["bigram_embedding.weight"][rows]
    first, middle = x, None
    for i in range(config.n_layer):
        h = f"h.{i}."
        if config.bigram_embeddings:
            x = x + w["bigram_lambdas"][i] * bigrams
        if config.residual_lambdas:
            x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * first
        y = norm(x)
        query = (y @ w[h + "attn.c_q.weight"].T).view(-1, heads, width)
        key = (y @ w[h + "attn.c_k.weight"].T).view(-1, kv_heads, width)
        value = (y @ w[h + "attn.c_v.weight"].T).view(-1, kv_heads, width)
        if config.value_embeddings and (config.n_layer - 1 - i) % 2 == 0:
            gate = 3 * torch.sigmoid(y[:, :12] @ w[h + "attn.value_gate.weight"].T)
            value = value + gate[..., None] * w[h + "attn.value_embedding.weight"][ids].view(-1, kv_heads, width)
        query = torch.stack([norm(turned(q, t)) * config.qk_norm_scale for t, q in enumerate(query)])
        key = torch.stack([norm(turned(k, t)) * config.qk_norm_scale for t, k in enumerate(key)])
        window = config.sliding_window if config.window_pattern and i < config.n_layer - 1 else len(ids)
        mixed = torch.zeros(len(ids), heads, width)
        for t in range(len(ids)):
            seen = slice(max(0, t + 1 - window), t + 1)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                weights = torch.softmax(key[seen, shared] @ query[t, head] / width**0.5, 0)
                mixed[t, head] = weights @ value[seen, shared]
        x = x + mixed.view(len(ids), -1) @ w[h + "attn.c_proj.weight"].T
        inner = torch.relu(norm(x) @ w[h + "mlp.c_fc.weight"].T).square()
        x = x + inner @ w[h + "mlp.c_proj.weight"].T
        if i == config.n_layer // 2:
            middle = x
    if config.backout:
        x = x - w["backout_lambda"] * middle
    logits = norm(x) @ w["lm_head.weight"][: config.vocab_size].T
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize("case", CASES)
def test_an_option_computes_what_it_says(case):
    ids = random_ids(1, 24)
    model = tiny("modern", **OFF | CASES[case])
    with torch.no_grad():
        logits = model(ids).logits[0]
    assert (logits - spelt_out(model, ids[0])).abs().max() <= 1e-5
    assert (logits - spelt_out(tiny("modern", **OFF), ids[0])).abs().max() > 1e-3  # the option is not asleep


def test_every_option_of_modern_has_its_case():
    assert set(MODERN) - set(NANOCHAT) == set(OFF) | {"initialization", "vocab_multiple"}
