"""GGUF, the file that llama.cpp runs: of a GPT-2 whose tokenizer cuts text as GPT-2's does.

llama.cpp knows its architectures and its ways of cutting text by name, and among them GPT-2's; a model with other parts, or
another way of cutting, would load and write nonsense, so it is refused with the reason.
"""

import json
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import read_json
from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.tokenizer.tiktoken_twin import GPT2_PATTERN, split_pattern

ARCHITECTURE = "gpt2"
# What llama.cpp's GPT-2 always computes.
FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def write_gguf(model: Path, target: Path, *, name: str, dtype: str = "f16") -> None:
    """Write the model of that folder as one GGUF file; norms, biases and positions stay fp32.

    dtype: f32, f16, bf16 or q8_0, of the matrices; one whose rows q8_0 does not divide is f16. Raises RecipeError with the
    reason when llama.cpp cannot compute this model or cut its text, InputMissingError without the package gguf.
    """
    try:
        import gguf
    except ImportError:
        raise InputMissingError(
            "GGUF files are written by the package gguf, which is not installed. Run: pip install gguf"
        ) from None
    config, tokenizer = read_json(model / "config.json"), json.loads((model / "tokenizer.json").read_text("utf-8"))
    if reasons := [*why_not_computed(config), *why_not_cut(tokenizer)]:
        raise RecipeError(
            f"{model}: llama.cpp cannot run this model: {'; '.join(reasons)}. Train with model.type gpt2 and tokenizer.split_pattern gpt2 "
            "for GGUF; the folder itself runs in transformers."
        )
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    try:
        _add_sizes(writer, config, name=name)
        _add_tokenizer(writer, model, tokenizer, ids=config["vocab_size"])
        _add_tensors(writer, model, config, wanted=gguf.GGMLQuantizationType[dtype.upper()])
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'f32' else 'MOSTLY'}_{dtype.upper()}"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def why_not_computed(config: dict[str, Any]) -> list[str]:
    """What of the config llama.cpp's GPT-2 has not; [] when it computes the same."""
    if config.get("model_type") != "gpt2":
        return [f"the model is written as {config.get('model_type')}, and of ours llama.cpp computes plain GPT-2 only"]
    return [
        f"{name} is {config[name]} and there it is always {value}"
        for name, value in FIXED.items()
        if config.get(name, value) != value
    ]


def why_not_cut(tokenizer: dict[str, Any]) -> list[str]:
    """Why llama.cpp would give a text other ids; [] when it gives the same. tokenizer: the content of tokenizer.json."""
    model = tokenizer["model"]
    other = model.get("byte_fallback") or model.get("ignore_merges") or tokenizer.get("normalizer")
    if model["type"] != "BPE" or other:
        return ["the tokenizer is no plain byte-level BPE"]
    if split_pattern(tokenizer.get("pre_tokenizer")) != GPT2_PATTERN:
        return ["the tokenizer cuts text by another pattern than GPT-2's, the only one of ours that llama.cpp has"]
    return []


def _add_sizes(writer: Any, config: dict[str, Any], *, name: str) -> None:
    writer.add_name(name)
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_tokenizer(writer: Any, model: Path, tokenizer: dict[str, Any], *, ids: int) -> None:
    """ids: rows of the embedding; those without a token are unused ones."""
    from gguf import TokenType
    from transformers import AutoTokenizer

    special = {token["id"]: token["special"] for token in tokenizer["added_tokens"]}
    tokens = {**{i: token for token, i in tokenizer["model"]["vocab"].items()}}
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    kinds = {i: TokenType.CONTROL if special[i] else TokenType.USER_DEFINED for i in special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(ids)])
    writer.add_token_types([kinds.get(i, TokenType.NORMAL if i in tokens else TokenType.UNUSED) for i in range(ids)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    loaded = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    for add, token in (
        (writer.add_bos_token_id, loaded.bos_token_id),
        (writer.add_eos_token_id, loaded.eos_token_id),
        (writer.add_eom_token_id, loaded.bos_token_id),  # ends a text as well: another one begins
        (writer.add_pad_token_id, loaded.pad_token_id),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(loaded("a").input_ids[0] == loaded.bos_token_id)
    if loaded.chat_template:
        writer.add_chat_template(loaded.chat_template)


def _add_tensors(writer: Any, model: Path, config: dict[str, Any], *, wanted: Any) -> None:
    from gguf import GGMLQuantizationType, QuantError, quants

    from pipeline.model.export import read_weights

    for name, tensor in read_weights(model).items():
        value = tensor.float()
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask, in files of old versions
        if ".c_" in name and value.ndim == 2:
            value = value.T  # GPT-2 stores (in, out)
        array = value.contiguous().numpy()
        kind = wanted if value.ndim == 2 and "wpe" not in name else GGMLQuantizationType.F32
        try:
            data = quants.quantize(array, kind)
        except QuantError:
            kind = GGMLQuantizationType.F16
            data = quants.quantize(array, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)


def gguf_name(name: str) -> str:
    """transformer.h.3.attn.c_attn.weight -> blk.3.attn_qkv.weight"""
    if name == "lm_head.weight":
        return "output.weight"
    part, _, kind = name.removeprefix("transformer.").rpartition(".")
    block = ""
    if part.startswith("h."):
        _, number, part = part.split(".", 2)
        block = f"blk.{number}."
    return f"{block}{NAMES[part]}.{kind}"
