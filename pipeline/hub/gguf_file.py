"""GGUF, the file that llama.cpp and Ollama run: of models whose architecture and tokenizer both have."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError
from pipeline.process.storage import read_json
from pipeline.tokenizer.encode import GPT2_PATTERN, split_pattern
from pipeline.tokenizer.train import SPLIT_PATTERNS

# What llama.cpp computes, by the model_type of transformers.


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp. fixed: fields of the config of which it knows one value only.

    rotates_neighbours: RoPE turns pairs of neighbouring dimensions there, and halves of a head in transformers.
    norms_add_one: transformers multiplies by 1 + the weight of a norm, and llama.cpp by what is written.
    """

    name: str
    fixed: dict[str, Any] = field(default_factory=dict)
    rotates_neighbours: bool = False
    norms_add_one: bool = False


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
    "gemma3_text": Architecture(
        name="gemma3",
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        norms_add_one=True,
    ),
}
GEMMA3_PERIOD, GEMMA3_LOCAL_THETA = 6, 10_000.0  # every sixth layer sees all; the others turn by this base
# llama.cpp's names (tokenizer.ggml.pre) of the patterns that cut text. Its llama-bpe also takes whole words that have an id
# without merging (ignore_merges); smaug-bpe is the same pattern without that.
PATTERNS = {
    GPT2_PATTERN: "gpt-2",
    SPLIT_PATTERNS["qwen2"]: "qwen2",
    SPLIT_PATTERNS["llama3"]: "smaug-bpe",
}
# The same as the models of that name write them: alike but for U+017F, the long s, after an apostrophe.
WRITTEN_BY_OTHERS = {
    pattern.replace(r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"): name
    for pattern, name in PATTERNS.items()
}
PATTERNS |= WRITTEN_BY_OTHERS


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
            f"{model}: llama.cpp cannot run this model: {'; '.join(reasons)}. Train with model.preset portable, or model.type gpt2 and "
            "tokenizer.split_pattern gpt2, for GGUF; the folder itself runs in transformers."
        )
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]].name)
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
    """Return what of the config llama.cpp has not; [] when it computes the same."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        return [f"the model is written as {kind}, and GGUF is written here of {', '.join(ARCHITECTURES)} only"]
    reasons = [
        f"{name} is {config[name]} and there it is always {value}"
        for name, value in ARCHITECTURES[kind].fixed.items()
        if config.get(name, value) != value
    ]
    ropes = _rope(config)
    if kind == "gemma3_text":
        reasons += _why_not_gemma3(config, ropes)
        ropes = ropes.get("full_attention", {})
    if (rope := ropes.get("rope_type", "default")) != "default":
        reasons.append(f"positions are scaled by {rope}, which this does not write")
    return reasons


def _why_not_gemma3(config: dict[str, Any], ropes: dict[str, Any]) -> list[str]:
    reasons = []
    layers = config["num_hidden_layers"]
    kinds = [("full" if (i + 1) % GEMMA3_PERIOD == 0 else "sliding") + "_attention" for i in range(layers)]
    if config.get("layer_types", kinds) != kinds:
        reasons.append(f"its windows are not those of every layer but each {GEMMA3_PERIOD}th (layer_types)")
    if ropes.get("sliding_attention", {}).get("rope_theta") != GEMMA3_LOCAL_THETA or "full_attention" not in ropes:
        reasons.append(f"rope_theta of its windowed layers is not {GEMMA3_LOCAL_THETA:.0f} (rope_parameters)")
    if config["query_pre_attn_scalar"] != config["head_dim"]:
        reasons.append("query_pre_attn_scalar is not head_dim")
    return reasons


def why_not_cut(tokenizer: dict[str, Any]) -> list[str]:
    """Return why llama.cpp would give a text other ids; [] when it gives the same. tokenizer: the content of tokenizer.json."""
    model, pattern = tokenizer["model"], split_pattern(tokenizer.get("pre_tokenizer"))
    whole_words = model.get("ignore_merges") and PATTERNS.get(pattern or "") != "smaug-bpe"
    if model["type"] != "BPE" or model.get("byte_fallback") or whole_words or tokenizer.get("normalizer"):
        return ["the tokenizer is no plain byte-level BPE"]
    if pattern not in PATTERNS:
        return ["the tokenizer cuts text by a pattern that llama.cpp has not; it has those of gpt2, qwen2 and llama3"]
    return []


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, as transformers 5 or an older version wrote them."""
    old = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or old


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        return {
            "layers": config["n_layer"],
            "positions": config["n_positions"],
            "width": width,
            "inner": config.get("n_inner") or 4 * width,
            "heads": config["n_head"],
        }
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "positions": config["max_position_embeddings"],
        "width": config["hidden_size"],
        "inner": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


def _add_sizes(writer: Any, config: dict[str, Any], *, name: str) -> None:
    sizes = _sizes(config)
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
    ropes = _rope(config)
    if config["model_type"] == "gemma3_text":
        ropes = ropes["full_attention"]
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(ropes["rope_theta"])


def _add_tokenizer(writer: Any, model: Path, tokenizer: dict[str, Any], *, ids: int) -> None:
    """Add the vocabulary. ids: rows of the embedding; those without a token are unused ones."""
    from gguf import TokenType
    from transformers import AutoTokenizer

    special = {token["id"]: token["special"] for token in tokenizer["added_tokens"]}
    tokens = {**{i: token for token, i in tokenizer["model"]["vocab"].items()}}
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    kinds = {i: TokenType.CONTROL if special[i] else TokenType.USER_DEFINED for i in special}
    cut = PATTERNS[split_pattern(tokenizer["pre_tokenizer"]) or ""]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if tokenizer["model"].get("ignore_merges") else cut)
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

    for name, array in _tensors(model, config):
        kind = wanted if array.ndim == 2 and not name.startswith("position_embd") else GGMLQuantizationType.F32
        try:
            data = quants.quantize(array, kind)
        except QuantError:
            kind = GGMLQuantizationType.F16
            data = quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def _tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield llama.cpp's name and the fp32 array of every tensor."""
    from pipeline.model.export import read_tensors

    sizes, names = _sizes(config), _names(config)
    architecture = ARCHITECTURES[config["model_type"]]
    for name, tensor in read_tensors(model).items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # GPT-2's causal mask, in files of old versions
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        value = tensor.float()
        if ".c_" in name and value.ndim == 2:
            value = value.T  # GPT-2 stores (in, out)
        if architecture.rotates_neighbours and (heads := _turned_heads(name, sizes)):
            value = value.view(heads, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        if architecture.norms_add_one and value.ndim == 1:
            value = value + 1
        yield names(name), value.contiguous().numpy()


def _names(config: dict[str, Any]) -> Any:
    """Return the function from transformers' name of a tensor to llama.cpp's, by gguf's own table."""
    import gguf

    kind = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[config["model_type"]].name)
    table = gguf.get_tensor_name_map(kind, _sizes(config)["layers"])

    def named(name: str) -> str:
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RecipeError(f"{name}: llama.cpp has no such tensor in a {config['model_type']}, so it cannot run it.")
        return found

    return named


def _turned_heads(name: str, sizes: dict[str, int]) -> int:
    """Return how many heads the tensor turns by RoPE; 0 for one that is not turned."""
    return {"q_proj": sizes["heads"], "k_proj": sizes.get("kv_heads", 0)}.get(name.split(".")[-2], 0)


# Quantized by llama.cpp itself, and what that costs.

# Values of llama_ftype in llama.h.
QUANTIZED = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
QUANTIZE = """
import sys
import llama_cpp

source, target, kind = sys.argv[1:]
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype = int(kind)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings))
"""


def quantize_gguf(source: Path, target: Path, *, dtype: str) -> None:
    """Let llama.cpp write the f32 file `source` as `target`, quantized: llama-quantize on the PATH, else llama-cpp-python.

    Matrices whose rows 256 does not divide get llama.cpp's next type for them. Raises InputMissingError when neither is there.
    """
    if tool := shutil.which("llama-quantize"):
        command = [tool, str(source), str(target), dtype.upper()]
    else:
        command = [sys.executable, "-c", QUANTIZE, str(source), str(target), str(QUANTIZED[dtype])]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named 'llama_cpp'" in done.stderr:
        raise InputMissingError(
            f"--type {dtype}: is quantized by llama.cpp, and there is neither its llama-quantize on the PATH nor the package llama-cpp-python. "
            "Install one of them, or take q8_0, which needs neither."
        )
    if done.returncode or not target.exists():
        raise CannotWriteError(
            f"{source}: llama.cpp did not quantize it (status {done.returncode}): {done.stderr.strip()[-500:]}"
        )


def weights_of_gguf(path: Path, model: Path) -> dict[str, Any]:
    """Return the tensors of a GGUF file that write_gguf or llama.cpp made of that folder, dequantized, under transformers' names."""
    import torch
    from gguf import GGUFReader, quants

    from pipeline.model.export import read_tensors

    config = read_json(model / "config.json")
    sizes, named, architecture = _sizes(config), _names(config), ARCHITECTURES[config["model_type"]]
    written = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = {}
    for name, own in read_tensors(model).items():
        if (tensor := written.get(named(name))) is None:
            continue  # a tied head
        value = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if architecture.rotates_neighbours and (heads := _turned_heads(name, sizes)):
            value = value.view(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        if architecture.norms_add_one and value.ndim == 1:
            value = value - 1
        weights[name] = value.T if ".c_" in name and value.ndim == 2 else value.view(own.shape)
    return weights


# What Ollama wants beside the file: how a conversation becomes a prompt, in its template language (Go's text/template).

# The built-in chat template (tokenizer/chat_template.jinja) without the document's start, which llama.cpp adds itself, and
# without tools. Ollama's language has no way to replace text, so a control token that a user spells is one there.
OLLAMA_TEMPLATE = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "assistant" }}<|assistant|>{{ .Content }}{{ if not $last }}<|end|>{{ end }}
{{- else }}<|{{ .Role }}|>{{ .Content }}<|end|>{{ if $last }}<|assistant|>{{ end }}
{{- end }}
{{- end }}"""


def modelfile(gguf: str, *, model: Path) -> str:
    """Return Ollama's Modelfile for the file `gguf` beside it, written of the model in that folder.

    Raises RecipeError for a chat template that is not the built-in one: it would have to be written in another language.
    """
    from transformers import AutoTokenizer

    from pipeline.tokenizer.chat import built_in_template
    from pipeline.tokenizer.encode import control_strings

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    lines = [f"FROM ./{gguf}"]
    if tokenizer.chat_template == built_in_template(control_strings(tokenizer)):
        lines.append(f'TEMPLATE """{OLLAMA_TEMPLATE}"""')
    elif tokenizer.chat_template:
        raise RecipeError(
            f"{model}: its chat template is not the built-in one, and Ollama's templates are of another language, so none is written. "
            "Write the GGUF alone (--to gguf) and a Modelfile with a TEMPLATE of your own."
        )
    generation = model / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else tokenizer.eos_token_id
    for end in dict.fromkeys(ends if isinstance(ends, list) else [ends]):
        if end is not None:
            lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"')
    lines.append(f"PARAMETER num_ctx {_sizes(read_json(model / 'config.json'))['positions']}")
    return "\n".join(lines) + "\n"
