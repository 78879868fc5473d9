"""GGUF, the file that llama.cpp and Ollama run: of models whose architecture and tokenizer both have."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import read_json
from pipeline.recipe.sizes import LLAMA_NAMES
from pipeline.tokenizer.encode import GPT2_PATTERN, split_pattern
from pipeline.tokenizer.train import SPLIT_PATTERNS

Config = dict[str, Any]  # config.json of a model


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp. fixed: fields of the config of which it knows one value only.

    rotates_neighbours: RoPE turns pairs of neighbouring dimensions there, and halves of a head in transformers.
    """

    name: str
    fixed: dict[str, Any] = field(default_factory=dict)
    rotates_neighbours: bool = False


ARCHITECTURES = {
    "gpt2": Architecture(
        name="gpt2",
        fixed={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
    ),
    "llama": Architecture(
        name="llama",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        rotates_neighbours=True,
    ),
    "mistral": Architecture(
        name="llama", fixed={"hidden_act": "silu", "sliding_window": None}, rotates_neighbours=True
    ),
    "qwen2": Architecture(name="qwen2", fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture(
        name="qwen3", fixed={"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
    ),
}
# llama.cpp's names (tokenizer.ggml.pre) of the patterns that cut text. Its llama-bpe also takes whole words that have
# an id without merging (ignore_merges); smaug-bpe is the same pattern without that.
PATTERNS = {GPT2_PATTERN: "gpt-2", SPLIT_PATTERNS["qwen2"]: "qwen2", SPLIT_PATTERNS["llama3"]: "smaug-bpe"}
# The same as the models of that name write them: alike but for U+017F, the long s, after an apostrophe.
PATTERNS |= {
    pattern.replace(
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    ): name
    for pattern, name in PATTERNS.items()
}


# Control tokens that llama.cpp ends at by their text, without a key (src/llama-vocab.cpp, special_eog_ids).
ENDS_BY_TEXT = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")


def write_gguf(model: Path, target: Path, *, name: str, dtype: str = "f16") -> None:
    """Write the model of that folder as one GGUF file; norms, biases and positions stay fp32.

    dtype: f32, f16, bf16 or q8_0, of the matrices; one whose rows q8_0 does not divide is f16. Raises RecipeError with
    the reason when llama.cpp cannot compute this model or cut its text, InputMissingError without the package gguf.
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
            f"{model}: no GGUF is written of this model: {'; '.join(reasons)}. llama.cpp's own convert_hf_to_gguf.py "
            "may know it; else train with model.preset portable."
        )
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]].name)
    try:
        _add_sizes(writer, config, name=name)
        _add_tokenizer(writer, model, tokenizer, ids=config["vocab_size"])
        _add_tensors(writer, model, config, wanted=gguf.GGMLQuantizationType[dtype.upper()])
        share = "ALL" if dtype == "f32" else "MOSTLY"  # norms and biases are fp32
        writer.add_file_type(gguf.LlamaFileType[f"{share}_{dtype.upper()}"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def why_not_computed(config: Config) -> list[str]:
    """Return what of the config llama.cpp has not; [] when it computes the same."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        return [f"the model is written as {kind}, and GGUF is written here of {', '.join(ARCHITECTURES)} only"]
    reasons = []
    for name, value in ARCHITECTURES[kind].fixed.items():
        if config.get(name, value) != value:
            reasons.append(f"{name} is {config[name]} and there it is always {value}")
    rope = _rope(config).get("rope_type", "default")
    if rope != "default":
        reasons.append(f"positions are scaled by {rope}, which this does not write")
    return reasons


def why_not_cut(tokenizer: dict[str, Any]) -> list[str]:
    """Return why llama.cpp would give a text other ids; [] when it gives the same. tokenizer: the content of
    tokenizer.json."""
    model, pattern = tokenizer["model"], split_pattern(tokenizer.get("pre_tokenizer"))
    whole_words = model.get("ignore_merges") and PATTERNS.get(pattern or "") != "smaug-bpe"
    if model["type"] != "BPE" or model.get("byte_fallback") or whole_words or tokenizer.get("normalizer"):
        return ["the tokenizer is no plain byte-level BPE"]
    if pattern not in PATTERNS:
        return ["the tokenizer cuts text by a pattern that llama.cpp has not; it has those of gpt2, qwen2 and llama3"]
    return []


def _rope(config: Config) -> dict[str, Any]:
    """Return the rotary settings, as transformers 5 or an older version wrote them."""
    old = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or old


def model_sizes(config: Config) -> dict[str, int]:
    def size(name: str) -> Any:
        return config[name] if name in config else config[LLAMA_NAMES[name]]

    width, heads = size("n_embd"), size("n_head")
    inner = config.get("n_inner") or 4 * width  # GPT-2's
    if config["model_type"] != "gpt2":
        inner = size("n_inner")
    return {
        "layers": size("n_layer"),
        "positions": size("n_positions"),
        "width": width,
        "inner": inner,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
    }


def _add_sizes(writer: Any, config: Config, *, name: str) -> None:
    sizes = model_sizes(config)
    writer.add_name(name)
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(sizes["positions"])
    writer.add_embedding_length(sizes["width"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_head_count(sizes["heads"])
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count_kv(sizes["kv_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope(config)["rope_theta"])


def _add_tokenizer(writer: Any, model: Path, tokenizer: dict[str, Any], *, ids: int) -> None:
    """Add the vocabulary. ids: rows of the embedding; those without a token are unused ones."""
    from gguf import TokenType
    from transformers import AutoTokenizer

    # 1. Every id has a token and a kind.
    tokens = {i: f"[PAD{i}]" for i in range(ids)}
    kinds = dict.fromkeys(range(ids), TokenType.UNUSED)
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], kinds[i] = token, TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[i] for i in range(ids)])
    writer.add_token_types([kinds[i] for i in range(ids)])

    # 2. How text is cut and merged.
    cut = PATTERNS[split_pattern(tokenizer["pre_tokenizer"]) or ""]
    if tokenizer["model"].get("ignore_merges"):
        cut = "llama-bpe"
    writer.add_tokenizer_pre(cut)
    merges = tokenizer["model"]["merges"]  # pairs, or texts with a blank in older files
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])

    # 3. Where a document begins and an answer ends. llama.cpp has keys for three ends, and knows some by their text.
    loaded = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    ends = ends_of(model, loaded)
    eos = loaded.eos_token_id
    if ends and eos not in ends:
        eos = ends[0]
    others = [end for end in ends if end != eos]
    others.sort(key=lambda end: tokens[end] in ENDS_BY_TEXT)  # last those that need no key
    if missed := [tokens[end] for end in others[2:] if tokens[end] not in ENDS_BY_TEXT]:
        print(f"{model}: llama.cpp has keys for three ends and will not end at {', '.join(missed)}", file=sys.stderr)
    if "<|end|>" in map(tokens.get, ends) and {"<|return|>", "<|call|>"} <= set(tokens.values()):
        raise RecipeError(
            f"{model}: the vocabulary holds <|return|> and <|call|>, under which llama.cpp does not end at <|end|>, "
            "so answers would run on. Take a tokenizer without them."
        )
    eom, eot = [*others, None, None][:2]
    for add, token_id in (
        (writer.add_bos_token_id, loaded.bos_token_id),
        (writer.add_eos_token_id, eos),
        (writer.add_eom_token_id, eom),
        (writer.add_eot_token_id, eot),
        (writer.add_pad_token_id, loaded.pad_token_id),
    ):
        if token_id is not None:
            add(token_id)
    writer.add_add_bos_token(loaded("a").input_ids[0] == loaded.bos_token_id)
    if loaded.chat_template:
        writer.add_chat_template(loaded.chat_template)


def ends_of(model: Path, tokenizer: Any) -> list[int]:
    """Return the ids that end what the model in that folder generates; the tokenizer's end token where it has no
    list."""
    generation = model / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    if ends is None:
        ends = tokenizer.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    return [end for end in dict.fromkeys(ends) if end is not None]


def _add_tensors(writer: Any, model: Path, config: Config, *, wanted: Any) -> None:
    from gguf import GGMLQuantizationType, QuantError, quants

    for name, array in _tensors(model, config):
        kind = GGMLQuantizationType.F32
        if array.ndim == 2 and not name.startswith("position_embd"):
            kind = wanted
        try:
            data = quants.quantize(array, kind)
        except QuantError:
            kind = GGMLQuantizationType.F16
            data = quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def _tensors(model: Path, config: Config) -> Iterator[tuple[str, Any]]:
    """Yield llama.cpp's name and the fp32 array of every tensor."""
    import torch

    from pipeline.model.saved import read_tensors

    sizes, names = model_sizes(config), gguf_names(config)
    architecture = ARCHITECTURES[config["model_type"]]
    tensors = read_tensors(model)
    table = next(tensor for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    for name, tensor in tensors.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # GPT-2's causal mask, in files of old versions
        # Whether it is the embedding's is what the weights say: transformers loads another head also where the config
        # ties it.
        if name == "lm_head.weight" and torch.equal(tensor, table):
            continue
        value = tensor.float()
        if ".c_" in name and value.ndim == 2:
            value = value.T  # GPT-2 stores (in, out)
        heads = rotated_heads(name, sizes)
        if architecture.rotates_neighbours and heads:
            # From [first half, second half] of a head to pairs of neighbours.
            value = value.view(heads, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        yield names(name), value.contiguous().numpy()


def gguf_names(config: Config) -> Any:
    """Return the function from transformers' name of a tensor to llama.cpp's, by gguf's own table."""
    import gguf

    kind = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[config["model_type"]].name)
    table = gguf.get_tensor_name_map(kind, model_sizes(config)["layers"])

    def named(name: str) -> str:
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RecipeError(
                f"{name}: llama.cpp has no such tensor in a {config['model_type']}, so it cannot run it."
            )
        return found

    return named


def rotated_heads(name: str, sizes: dict[str, int]) -> int:
    """Return how many heads the tensor turns by RoPE; 0 for one that is not turned."""
    return {"q_proj": sizes["heads"], "k_proj": sizes["kv_heads"]}.get(name.split(".")[-2], 0)
