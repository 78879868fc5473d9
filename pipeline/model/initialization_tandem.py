"""Initial weights. Every parameter is set here: after to_empty() nothing else would do it."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

# What transformers makes itself, when the vocabulary is resized.
NEW_ROWS = {nn.Embedding: "embedding", nn.Linear: "head"}


def with_role(module: Any, role: str) -> Any:
    """The module, marked with what it is for, which decides its initial weights.

    Marked on the module itself because transformers shows a model's leaves to _init_weights one by one, and passes
    over those of foreign classes that own no parameters (an attention, a block).
    """
    module.init_role = role
    return module


def init_module(module: Any, config) -> None:
    """Sets the parameters that this module itself owns (not those of its children)."""
    if role := getattr(module, "init_role", NEW_ROWS.get(type(module))):
        init_matrix = _init_nanochat if config.initialization == "nanochat" else _init_gpt2
        init_matrix(module.weight, role, config)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        init.ones_(module.weight)
        init.zeros_(module.bias)
    else:
        _init_scalars(module, config)


def _init_gpt2(weight, role: str, config) -> None:
    """Normal, with the outputs into the residual stream divided by the root of their number (GPT-2 paper)."""
    std = config.initializer_range
    init.normal_(weight, mean=0.0, std=std / math.sqrt(2 * config.n_layer) if role == "output" else std)


def _init_nanochat(weight, role: str, config) -> None:
    """nanochat's: blocks begin as the identity, the head near zero, the embedding wide."""
    bound = math.sqrt(3 / config.n_embd)  # of a uniform distribution with standard deviation 1 / sqrt(n_embd)
    if role == "output":
        init.zeros_(weight)
    elif role == "embedding" and not config.tie_word_embeddings:
        init.normal_(weight, mean=0.0, std=0.8)
    elif role in ("embedding", "position"):  # nanochat has neither a tied nor a position embedding: GPT-2's
        init.normal_(weight, mean=0.0, std=config.initializer_range)
    elif role == "head":
        init.normal_(weight, mean=0.0, std=0.001)
    elif role == "gate":
        init.uniform_(weight, 0.0, 0.02)
    elif role == "hidden":
        init.uniform_(weight, -0.4 * bound, 0.4 * bound)
    else:
        init.uniform_(weight, -bound, bound)


def _init_scalars(module, config) -> None:
    """The model's own scalars, alike under both initializations: the options are defined by where they begin."""
    own = dict(module.named_parameters(recurse=False))
    depth_L = torch.arange(config.n_layer, dtype=torch.float32) / max(config.n_layer - 1, 1)
    if "resid_lambdas" in own:
        init.copy_(own["resid_lambdas"], 1.15 - 0.10 * depth_L)
    if "x0_lambdas" in own:
        init.copy_(own["x0_lambdas"], 0.20 - 0.15 * depth_L)
    if "backout_lambda" in own:
        init.constant_(own["backout_lambda"], 0.2)
    if "smear_lambda" in own:
        init.zeros_(own["smear_lambda"])
