"""A model as other programs read it: GGUF for llama.cpp and Ollama, ONNX for onnxruntime, safetensors in shards and in
another type."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import pipeline
from pipeline.evals.subject import Subject, find_subject, load, open_model
from pipeline.process.commands import command
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, TandemError, first_line
from pipeline.process.storage import new_folder, read_json, write_text
from pipeline.recipe.sizes import LLAMA_NAMES
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.encode import GPT2_PATTERN, byte_lengths, control_strings, split_pattern
from pipeline.tokenizer.train import SPLIT_PATTERNS

# GGUF, the file that llama.cpp and Ollama run: of models whose architecture and tokenizer both have.

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
    """Return why llama.cpp would give a text other ids; [] when it gives the same. tokenizer: the content of
    tokenizer.json."""
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
    def size(name: str) -> Any:
        return config[name] if name in config else config[LLAMA_NAMES[name]]

    is_gpt2, width, heads = config["model_type"] == "gpt2", size("n_embd"), size("n_head")
    return {
        "layers": size("n_layer"),
        "positions": size("n_positions"),
        "width": width,
        "inner": (config.get("n_inner") or 4 * width) if is_gpt2 else size("n_inner"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
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
    tokens = {i: token for token, i in tokenizer["model"]["vocab"].items()}
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
    ends = ends_of(model, loaded)
    eos = loaded.eos_token_id if loaded.eos_token_id in ends or not ends else ends[0]
    others = [end for end in ends if end != eos]
    others.sort(key=lambda end: tokens[end] in ENDS_BY_TEXT)  # last those that need no key
    if missed := [tokens[end] for end in others[2:] if tokens[end] not in ENDS_BY_TEXT]:
        print(f"{model}: llama.cpp has keys for three ends and will not end at {', '.join(missed)}", file=sys.stderr)
    if "<|end|>" in map(tokens.get, ends) and {"<|return|>", "<|call|>"} <= set(tokens.values()):
        raise RecipeError(
            f"{model}: the vocabulary holds <|return|> and <|call|>, under which llama.cpp does not end at <|end|>, "
            "so answers would run on. Take a tokenizer without them."
        )
    for add, token in (
        (writer.add_bos_token_id, loaded.bos_token_id),
        (writer.add_eos_token_id, eos),
        (writer.add_eom_token_id, others[0] if others else None),
        (writer.add_eot_token_id, others[1] if len(others) > 1 else None),
        (writer.add_pad_token_id, loaded.pad_token_id),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(loaded("a").input_ids[0] == loaded.bos_token_id)
    if loaded.chat_template:
        writer.add_chat_template(loaded.chat_template)


def ends_of(model: Path, tokenizer: Any) -> list[int]:
    """Return the ids that end what the model in that folder generates; the tokenizer's end token where it has no
    list."""
    generation = model / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    ends = tokenizer.eos_token_id if ends is None else ends
    return [end for end in dict.fromkeys(ends if isinstance(ends, list) else [ends]) if end is not None]


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
    import torch

    from pipeline.model.saved import read_tensors

    sizes, names = _sizes(config), _names(config)
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
            raise RecipeError(
                f"{name}: llama.cpp has no such tensor in a {config['model_type']}, so it cannot run it."
            )
        return found

    return named


def _turned_heads(name: str, sizes: dict[str, int]) -> int:
    """Return how many heads the tensor turns by RoPE; 0 for one that is not turned."""
    return {"q_proj": sizes["heads"], "k_proj": sizes["kv_heads"]}.get(name.split(".")[-2], 0)


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
    """Let llama.cpp write the f32 file `source` as `target`, quantized: llama-quantize on the PATH, else
    llama-cpp-python.

    Matrices whose rows 256 does not divide get llama.cpp's next type for them. Raises InputMissingError when neither
    is there.
    """
    if tool := shutil.which("llama-quantize"):
        command = [tool, str(source), str(target), dtype.upper()]
    else:
        command = [sys.executable, "-c", QUANTIZE, str(source), str(target), str(QUANTIZED[dtype])]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named 'llama_cpp'" in done.stderr:
        raise InputMissingError(
            f"--type {dtype}: is quantized by llama.cpp, and there is neither its llama-quantize on the PATH nor the "
            "package llama-cpp-python. Install one of them, or take q8_0, which needs neither."
        )
    if done.returncode or not target.exists():
        raise CannotWriteError(
            f"{source}: llama.cpp did not quantize it (status {done.returncode}): {done.stderr.strip()[-500:]}"
        )


def weights_of_gguf(path: Path, model: Path) -> dict[str, Any]:
    """Return the tensors of a GGUF file that write_gguf or llama.cpp made of that folder, dequantized, under
    transformers' names."""
    import torch
    from gguf import GGUFReader, quants

    from pipeline.model.saved import read_tensors

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


# What Ollama wants beside the file: how a conversation becomes a prompt, in its template language (Go's
# text/template).

# The built-in chat template (tokenizer/chat_template.jinja) without the document's start, which llama.cpp adds itself,
# and without tools. Ollama's language has no way to replace text, so a control token that a user spells is one there.
OLLAMA_TEMPLATE = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "assistant" }}<|assistant|>{{ .Content }}{{ if not $last }}<|end|>{{ end }}
{{- else }}<|{{ .Role }}|>{{ .Content }}<|end|>{{ if $last }}<|assistant|>{{ end }}
{{- end }}
{{- end }}"""


def modelfile(gguf: str, *, model: Path) -> str:
    """Return Ollama's Modelfile for the file `gguf` beside it, written of the model in that folder.

    Raises RecipeError for a chat template that is not the built-in one: it would have to be written in another
    language.
    """
    from transformers import AutoTokenizer

    from pipeline.tokenizer.chat import built_in_template

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    lines = [f"FROM ./{gguf}"]
    if tokenizer.chat_template == built_in_template(control_strings(tokenizer)):
        lines.append(f'TEMPLATE """{OLLAMA_TEMPLATE}"""')
    elif tokenizer.chat_template:
        raise RecipeError(
            f"{model}: its chat template is not the built-in one, and Ollama's templates are of another language, so "
            "none is written. Write the GGUF alone (--to gguf) and a Modelfile with a TEMPLATE of your own."
        )
    lines += [f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"' for end in ends_of(model, tokenizer)]
    lines.append(f"PARAMETER num_ctx {_sizes(read_json(model / 'config.json'))['positions']}")
    return "\n".join(lines) + "\n"


# ONNX, the graph that onnxruntime and others run: token ids and their mask in, logits out, of any batch and length.

TOLERANCE = 1e-3  # of a logit; seen: 2e-6


def write_onnx(model: Path, folder: Path, *, loaded: Any) -> None:
    """Write the loaded model of that folder as model.onnx, its fp32 weights beside it, and its configs; compared in
    onnxruntime.

    Rows may be padded on the left. There is no cache: every new token is computed from the whole text. Raises
    InputMissingError without the packages, RecipeError when the graph cannot be taken or onnxruntime gives other
    logits.
    """
    try:
        import onnxruntime
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()
    except ImportError:
        raise InputMissingError(
            "ONNX is written with the packages onnx and onnxscript and compared in onnxruntime, which are not all "
            'installed. Run: pip install "tandem-llm[onnx]"'
        ) from None
    loaded = loaded.eval()
    taken = {**_batch(loaded.config, lengths=(7, 12)), "use_cache": False}
    try:
        with redirect_stdout(sys.stderr):  # torch prints its stages; standard output is for what was written
            exported = exporter.export(loaded, taken, config=OnnxConfig(dynamic=True))
    except Exception as error:  # whatever tracing another architecture ends in
        raise RecipeError(
            f"{model}: transformers cannot write this model as ONNX: {first_line(error)}. The folder itself runs in "
            "transformers."
        ) from error
    exported.config = None  # the folder's own is copied: the model is loaded as ours also where it is written as GPT-2
    exported.save_pretrained(folder)
    for file in (model / "config.json", model / "generation_config.json", *model.glob("*.py")):
        if file.exists():
            shutil.copyfile(file, folder / file.name)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    apart = _apart(loaded, session)
    if not apart <= TOLERANCE:
        raise RecipeError(f"{model}: onnxruntime gives logits that are {apart:.2g} off, so nothing is kept.")


def _apart(loaded: Any, session: Any) -> float:
    """Return how far onnxruntime's logits of a padded batch are from the model's of each row alone, at most."""
    import torch

    lengths = (3, 31, 17)
    batch = _batch(loaded.config, lengths=lengths)
    (found,) = session.run(["logits"], {given.name: batch[given.name].numpy() for given in session.get_inputs()})
    with torch.no_grad():
        rows = zip(batch["input_ids"], torch.from_numpy(found), lengths, strict=True)
        return max(
            float((loaded(ids[None, -length:]).logits[0] - logits[-length:]).abs().max())
            for ids, logits, length in rows
        )


def _batch(config: Any, *, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return rows of any tokens, padded on the left to the longest."""
    import torch

    width = min(max(lengths), getattr(config, "max_position_embeddings", None) or max(lengths))
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % config.get_text_config().vocab_size
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


# A Space's folder: the chat page for published models, with this program, which runs it there.

GRADIO = "6.31.0"  # The page was looked at with this one, and a Space installs the version that its README names.
PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "tiktoken", "jinja2", "markdown-it-py", "pyyaml", "psutil",
)  # fmt: skip

APP = '''"""The chat page of {names}."""

from pipeline.run_dir.failures import exit_with_status
from pipeline.chat.__main__ import main

MODELS = {models}

if __name__ == "__main__":
    exit_with_status(lambda _: main([*MODELS, "--web"]))
'''


def write_space(runs: list[RunDirectory], *, output: Path) -> None:
    """Write the folder, whole or not at all; several runs are side by side on the page.

    Raises InputMissingError when a run was not pushed, CannotWriteError when the folder is there already.
    """
    if output.exists():
        raise CannotWriteError(f"{output}: is there already. Remove it, or name another folder with --output.")
    published = [run.read_manifest().get("hub") or {} for run in runs]
    if waiting := [str(run.path) for run, hub in zip(runs, published, strict=True) if not hub.get("commit")]:
        raise InputMissingError(
            f"{', '.join(waiting)}: not published, so a Space has no model to load. Push first: "
            f"{command('hub', 'push', waiting[0])}"
        )
    ids = [hub["id"] for hub in published]
    pinned = [f"{hub['id']}@{hub['commit']}" for hub in published]
    versions = [f"{name}=={version(name).split('+')[0]}" for name in PACKAGES]  # +cpu is a build, not a version
    with new_folder(output) as folder:
        write_text(folder / "app.py", APP.format(names=", ".join(ids), models=json.dumps(pinned, indent=4)))
        write_text(folder / "requirements.txt", "\n".join([f"gradio=={GRADIO}", *versions]) + "\n")
        write_text(folder / "README.md", _readme(ids))
        shutil.copytree(
            Path(pipeline.__file__).parent, folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )


def _readme(ids: list[str]) -> str:
    front = {
        "title": ids[0].split("/")[-1],
        "sdk": "gradio",
        "sdk_version": GRADIO,
        "python_version": "3.11",
        "app_file": "app.py",
        "models": ids,
    }
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\nTalks to {', '.join(ids)}. `app.py` names the commits; "
        "`pipeline/` is the program that trained them. A private model needs a secret HF_TOKEN that may read it.\n"
    )


TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
GGUF_DTYPES = (*TORCH_DTYPES, "q8_0", *QUANTIZED)
DTYPES = {"gguf": GGUF_DTYPES, "ollama": GGUF_DTYPES, "onnx": ("f32",), "safetensors": tuple(TORCH_DTYPES)}


def export(
    name: str,
    *,
    to: str,
    output: str | None = None,
    dtype: str | None = None,
    max_shard_size: str,
    trust_code: bool = False,
) -> Path:
    """Write the model that `name` means (run, checkpoint, folder) whole or not at all; returns what was written.

    to: gguf, one file; ollama, a folder with that file and a Modelfile; onnx, a folder with model.onnx; safetensors, a
    folder that from_pretrained loads, its weights in files of at most max_shard_size. dtype: of the weights, one of
    DTYPES[to]; default f16 for gguf and ollama, as they are for safetensors. What quantizing costs in bits per byte is
    printed for a run. output: default beside the model, where run and format name it. Raises RecipeError when this
    model cannot be written so, CannotWriteError when the output exists, InputMissingError when there is no such model
    or package, RecipeError for a model of code of its own (trust_code: run it).
    """
    subject = find_subject(name, trust_code=trust_code)
    if not Path(subject.path).is_dir():
        raise RecipeError(
            f"{name}: is not on this machine. Fetch it first: {command('hub', 'pull', name)}, or hf download {name} "
            "--local-dir FOLDER."
        )
    if dtype is not None and dtype not in DTYPES[to]:
        raise RecipeError(f"--type {dtype}: {to} takes {', '.join(DTYPES[to])}. Name one of them.")
    target = Path(output) if output else _default(subject, to=to, dtype=dtype)
    if target.exists():
        raise CannotWriteError(f"{target}: exists and is not overwritten. Remove it, or name another --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if to == "gguf":
        _gguf(subject, target, dtype=dtype or "f16")
    elif to == "ollama":
        file = f"{_name(subject)}-{dtype or 'f16'}.gguf"
        with new_folder(target) as folder:
            write_text(folder / "Modelfile", modelfile(file, model=Path(subject.path)))
            _gguf(subject, folder / file, dtype=dtype or "f16")
    else:
        _folder(subject, target, to=to, dtype=dtype, max_shard_size=max_shard_size)
    return target


def _name(subject: Subject) -> str:
    return subject.run.name if subject.run else Path(subject.path).resolve().name


def _default(subject: Subject, *, to: str, dtype: str | None) -> Path:
    folder = subject.run.path / "export" if subject.run else Path(subject.path).resolve().parent
    if subject.run:
        subject.run.refuse_links(folder)
    step = f"-{Path(subject.path).name}" if subject.run and subject.name != "model/" else ""
    stem = f"{_name(subject)}{step}"
    return folder / (f"{stem}-{dtype or 'f16'}.gguf" if to == "gguf" else "-".join(filter(None, (stem, to, dtype))))


def _gguf(subject: Subject, target: Path, *, dtype: str) -> None:
    model, unfinished, whole = (
        Path(subject.path),
        target.with_name(f".tmp-{target.name}"),
        target.with_name(f".tmp-f32-{target.name}"),
    )
    try:
        if dtype in QUANTIZED:
            write_gguf(model, whole, name=_name(subject), dtype="f32")
            quantize_gguf(whole, unfinished, dtype=dtype)
        else:
            write_gguf(model, unfinished, name=_name(subject), dtype=dtype)
        if dtype not in TORCH_DTYPES:
            print(_cost_of_quantizing(subject, unfinished, dtype=dtype), file=sys.stderr, flush=True)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
        whole.unlink(missing_ok=True)


SCORED_TOKENS, SCORED_ROWS = 65_536, 8  # of the run's held-out rows, and rows of one forward pass


def _cost_of_quantizing(subject: Subject, gguf: Path, *, dtype: str) -> str:
    """Return a line with the bits per byte of the model and of its quantized weights, on the run's first held-out
    rows."""
    from pipeline.evals.bpb import bits_per_byte
    from pipeline.evals.texts import held_out_rows

    if subject.run is None:
        return f"{dtype}: what it costs in bits per byte is not known, since a folder has no held-out text"
    try:
        model, tokenizer = load(subject, device="cpu")
        rows = held_out_rows(subject.run, tokenizer, trust_code=subject.trust_code)
    except TandemError as error:
        return f"{dtype}: what it costs in bits per byte is not known: {error}"

    def score() -> Any:
        first = next(iter(rows.batches(rows=1)))["input_ids"].shape[-1]
        batches = islice(rows.batches(rows=SCORED_ROWS), max(1, SCORED_TOKENS // (SCORED_ROWS * first)))
        return bits_per_byte(model, batches, byte_lengths(tokenizer), device="cpu")

    before = score()
    weights = weights_of_gguf(gguf, Path(subject.path))  # a GPT-2 is loaded as Tandem, which has the same names
    unknown = weights.keys() - model.state_dict().keys()
    assert not unknown, f"{sorted(unknown)[:3]} are no weights of a {type(model).__name__}"
    model.load_state_dict(weights, strict=False)
    del weights  # as large as the model
    after = score()
    return (
        f"{dtype}: {after.bpb:.4f} bits per byte, {after.bpb - before.bpb:+.4f} beside the model's own "
        f"{before.bpb:.4f} (of {before.tokens:,} held-out tokens; weights alone)"
    )


def _folder(subject: Subject, target: Path, *, to: str, dtype: str | None, max_shard_size: str) -> None:
    import torch
    from transformers import AutoTokenizer

    from pipeline.model.saved import save_model

    model = Path(subject.path)
    loaded = open_model(subject.path, code=subject.code)
    with new_folder(target) as folder:
        if to == "onnx":
            write_onnx(model, folder, loaded=loaded)
        else:
            torch_dtype = getattr(torch, TORCH_DTYPES[dtype]) if dtype else None
            save_model(loaded, folder, dtype=torch_dtype, max_shard_size=max_shard_size)
        AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)
