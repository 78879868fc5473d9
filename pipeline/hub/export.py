"""A model as other programs read it: GGUF for llama.cpp, ONNX for onnxruntime, safetensors in shards and in another type."""

import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import pipeline
from pipeline.evals.subject import Subject, find_subject, open_model
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError
from pipeline.process.storage import new_folder, read_json, write_text
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.encode import GPT2_PATTERN, split_pattern

# GGUF, the file that llama.cpp runs: of a GPT-2 whose tokenizer cuts text as GPT-2's does.

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
    """Return what of the config llama.cpp's GPT-2 has not; [] when it computes the same."""
    if config.get("model_type") != "gpt2":
        return [f"the model is written as {config.get('model_type')}, and of ours llama.cpp computes plain GPT-2 only"]
    return [
        f"{name} is {config[name]} and there it is always {value}"
        for name, value in FIXED.items()
        if config.get(name, value) != value
    ]


def why_not_cut(tokenizer: dict[str, Any]) -> list[str]:
    """Return why llama.cpp would give a text other ids; [] when it gives the same. tokenizer: the content of tokenizer.json."""
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


# ONNX, the graph that onnxruntime and others run: token ids and their mask in, logits out, of any batch and length.

TOLERANCE = 1e-3  # of a logit; seen: 2e-6


def write_onnx(model: Path, folder: Path, *, loaded: Any) -> None:
    """Write the loaded model of that folder as model.onnx, its fp32 weights beside it, and its configs; compared in onnxruntime.

    Rows may be padded on the left. There is no cache: every new token is computed from the whole text. Raises
    InputMissingError without the packages, RecipeError when the graph cannot be taken or onnxruntime gives other logits.
    """
    try:
        import onnxruntime
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()
    except ImportError:
        raise InputMissingError(
            "ONNX is written with the packages onnx and onnxscript and compared in onnxruntime, which are not all installed. "
            'Run: pip install "tandem-llm[onnx]"'
        ) from None
    loaded = loaded.eval()
    taken = {**_batch(loaded.config, lengths=(7, 12)), "use_cache": False}
    try:
        with redirect_stdout(sys.stderr):  # torch tells its stages; standard output is for what was written
            exported = exporter.export(loaded, taken, config=OnnxConfig(dynamic=True))
    except Exception as error:  # whatever tracing another architecture ends in
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeError(
            f"{model}: transformers cannot write this model as ONNX: {reason}. The folder itself runs in transformers."
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
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % config.vocab_size
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
    """Write the folder, whole or not at all; several runs stand side by side on the page.

    Raises InputMissingError when a run was not pushed, CannotWriteError when the folder is there already.
    """
    if output.exists():
        raise CannotWriteError(f"{output}: is there already. Remove it, or name another folder with --output.")
    published = [run.read_manifest().get("hub") or {} for run in runs]
    if waiting := [str(run.path) for run, hub in zip(runs, published, strict=True) if not hub.get("commit")]:
        raise InputMissingError(
            f"{', '.join(waiting)}: not published, so a Space has no model to load. Push first: python -m pipeline.hub push {waiting[0]}"
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
DTYPES = {"gguf": (*TORCH_DTYPES, "q8_0"), "onnx": ("f32",), "safetensors": tuple(TORCH_DTYPES)}


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

    to: gguf, one file; onnx, a folder with model.onnx; safetensors, a folder that from_pretrained loads, its weights in
    files of at most max_shard_size. dtype: of the weights, one of DTYPES[to]; default f16 for gguf, as they are for
    safetensors. output: default beside the model, where run and format name it. Raises RecipeError when this model cannot be written so, CannotWriteError
    when the output exists, InputMissingError when there is no such model or package, RecipeError for a model of code of its own (trust_code: run it).
    """
    subject = find_subject(name, trust_code=trust_code)
    if not Path(subject.path).is_dir():
        raise RecipeError(
            f"{name}: is not on this machine. Fetch it first: python -m pipeline.hub pull {name}, or hf download {name} --local-dir FOLDER."
        )
    if dtype is not None and dtype not in DTYPES[to]:
        raise RecipeError(f"--type {dtype}: {to} takes {', '.join(DTYPES[to])}. Name one of them.")
    target = Path(output) if output else _default(subject, to=to, dtype=dtype)
    if target.exists():
        raise CannotWriteError(f"{target}: exists and is not overwritten. Remove it, or name another --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if to == "gguf":
        _gguf(Path(subject.path), target, name=_name(subject), dtype=dtype or "f16")
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


def _gguf(model: Path, target: Path, *, name: str, dtype: str) -> None:

    unfinished = target.with_name(f".tmp-{target.name}")
    try:
        write_gguf(model, unfinished, name=name, dtype=dtype)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _folder(subject: Subject, target: Path, *, to: str, dtype: str | None, max_shard_size: str) -> None:
    import torch
    from transformers import AutoTokenizer

    from pipeline.model.export import save_model

    model = Path(subject.path)
    loaded = open_model(subject.path, code=subject.code)
    with new_folder(target) as folder:
        if to == "onnx":
            write_onnx(model, folder, loaded=loaded)
        else:
            torch_dtype = getattr(torch, TORCH_DTYPES[dtype]) if dtype else None
            save_model(loaded, folder, dtype=torch_dtype, max_shard_size=max_shard_size)
        AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)
