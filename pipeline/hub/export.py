"""A model as other programs read it: GGUF for llama.cpp, ONNX for onnxruntime, safetensors in shards and in another type."""

import os
from pathlib import Path

from pipeline.artifacts.atomic import new_folder
from pipeline.artifacts.errors import CannotWriteError, RecipeError
from pipeline.evals.subject import Subject, find_subject, open_model

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
    step = f"-{Path(subject.path).name}" if subject.run and subject.name != "model/" else ""
    stem = f"{_name(subject)}{step}"
    return folder / (f"{stem}-{dtype or 'f16'}.gguf" if to == "gguf" else "-".join(filter(None, (stem, to, dtype))))


def _gguf(model: Path, target: Path, *, name: str, dtype: str) -> None:
    from pipeline.hub.gguf_file import write_gguf

    unfinished = target.with_name(f".tmp-{target.name}")
    try:
        write_gguf(model, unfinished, name=name, dtype=dtype)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _folder(subject: Subject, target: Path, *, to: str, dtype: str | None, max_shard_size: str) -> None:
    import torch
    from transformers import AutoTokenizer

    from pipeline.hub.onnx_folder import write_onnx
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
