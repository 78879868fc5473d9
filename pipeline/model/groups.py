"""Roles of parameters: the optimizer group that it belongs to, and whether it may be stored in another dtype."""

from typing import Any, Literal

Group = Literal["embeddings", "value_embeddings", "head", "matrices", "scalars", "x0_lambdas", "gates"]

# The names that transformers' causal LMs give their token and position tables, and their output head.
EMBEDDINGS = {"wte", "wpe", "embed_tokens", "embed_positions", "embed_in", "word_embeddings", "position_embeddings"}
EMBEDDINGS |= {"tok_embeddings", "embeddings", "embedding"}
HEADS = {"lm_head", "embed_out", "output", "output_projection"}


def parameter_group(name: str, parameter) -> Group:
    """Return the group of the parameter called `name` in named_parameters() of a Tandem, GPT-2 or other causal LM.

    A head tied to the embedding is one parameter under the embedding's name: `embeddings`. Everything with fewer than
    two dimensions is `scalars`, but for the scalars that mix: x0_lambdas, and smear's and backout's, which are
    `gates`.
    """
    for part in (".modules_to_save.default", ".token_adapter.trainable_tokens_delta.default"):  # as PEFT names them
        if part in name:
            name = name.replace(part, "").removesuffix(".weight") + ".weight"
    path = name.split(".")
    owner = path[-2] if len(path) > 1 else ""
    if path[-1] == "x0_lambdas":
        return "x0_lambdas"
    if owner == "value_embedding":
        return "value_embeddings"
    if owner == "bigram_embedding":
        return "embeddings"
    if owner == "smear_gate" or path[-1] in ("smear_lambda", "backout_lambda"):
        return "gates"
    if parameter.ndim < 2:
        return "scalars"
    if owner in EMBEDDINGS:
        return "embeddings"
    # A head is at the end of the model; inside the blocks `output` is an ordinary matrix.
    if owner in HEADS and not any(part.isdigit() for part in path):
        return "head"
    return "matrices"


def store_embeddings(model: Any, dtype: Any) -> None:
    """Keep a Tandem's token, bigram and value embeddings in `dtype` from now on, with their gradients; positions stay
    as they are.

    They are looked up, not multiplied: what is looked up is computed with in the dtype of the other weights, as
    before.
    """
    for module in model.modules():
        if getattr(module, "init_role", None) in ("embedding", "value_embedding", "bigram_embedding"):
            module.to(dtype)
    model.transformer.stream_dtype = model.lm_head.weight.dtype
