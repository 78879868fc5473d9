"""The two models that every contract is tested on: plain GPT-2 and `modern` with windows shorter than the row."""

import torch

SIZES = {"vocab_size": 101, "n_positions": 64, "n_embd": 48, "n_layer": 4, "n_head": 4}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = SIZES | TOKENS | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# What `modern` shares with transformers' nanochat.
NANOCHAT = GPT2 | {
    "normalization": "rms_norm",
    "layer_norm_epsilon": 1e-6,
    "position_embedding": "rope",
    "rope_theta": 100000.0,
    "use_bias": False,
    "qk_norm": True,
    "embedding_norm": True,
    "activation_function": "relu2",
    "tie_word_embeddings": False,
    "final_logit_softcapping": 15.0,
    "n_kv_head": 2,
}
MODERN = NANOCHAT | {
    "qk_norm_scale": 1.2,
    "value_embeddings": True,
    "residual_lambdas": True,
    "backout": True,
    "smear": True,
    "window_pattern": "SSSL",
    "sliding_window": 9,
    "initialization": "nanochat",
    "vocab_multiple": 64,
}
FIELDS = {"gpt2": GPT2, "modern": MODERN, "bigrams": MODERN | {"bigram_embeddings": 53}}


def stirred(model, scale=0.1):
    """The model with noise on every weight: at its initial zeros much of it computes nothing."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def random_ids(rows, length, seed=0, vocab_size=101):
    return torch.randint(3, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(step, batch, *, model):
    """Of a training step by `step`: the model itself, or what torch.compile made of it."""
    model.zero_grad()
    loss = step(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def tiny(name, seed=1, **changes):
    """One of the two, weights stirred, evaluating."""
    from pipeline.model.build import build_model

    return stirred(build_model("tandem", FIELDS[name] | changes, seed=seed)).eval()
