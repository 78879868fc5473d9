"""A model as other programs read it: GGUF for llama.cpp and Ollama, ONNX for onnxruntime, safetensors in shards and in another type."""

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
from pipeline.hub.gguf_file import QUANTIZED, modelfile, quantize_gguf, weights_of_gguf, write_gguf
from pipeline.process.commands import command
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, first_line
from pipeline.process.storage import new_folder, write_text
from pipeline.run_dir.run_directory import RunDirectory

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
        with redirect_stdout(sys.stderr):  # torch prints its stages; standard output is for what was written
            exported = exporter.export(loaded, taken, config=OnnxConfig(dynamic=True))
    except Exception as error:  # whatever tracing another architecture ends in
        reason = first_line(error)
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
    """Write the folder, whole or not at all; several runs are side by side on the page.

    Raises InputMissingError when a run was not pushed, CannotWriteError when the folder is there already.
    """
    if output.exists():
        raise CannotWriteError(f"{output}: is there already. Remove it, or name another folder with --output.")
    published = [run.read_manifest().get("hub") or {} for run in runs]
    if waiting := [str(run.path) for run, hub in zip(runs, published, strict=True) if not hub.get("commit")]:
        raise InputMissingError(
            f"{', '.join(waiting)}: not published, so a Space has no model to load. Push first: {command('hub', 'push', waiting[0])}"
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

    to: gguf, one file; ollama, a folder with that file and a Modelfile; onnx, a folder with model.onnx; safetensors, a folder
    that from_pretrained loads, its weights in files of at most max_shard_size. dtype: of the weights, one of DTYPES[to];
    default f16 for gguf and ollama, as they are for safetensors. What quantizing costs in bits per byte is printed for a run. output: default beside the model, where run and format name it. Raises RecipeError when this model cannot be written so, CannotWriteError
    when the output exists, InputMissingError when there is no such model or package, RecipeError for a model of code of its own (trust_code: run it).
    """
    subject = find_subject(name, trust_code=trust_code)
    if not Path(subject.path).is_dir():
        raise RecipeError(
            f"{name}: is not on this machine. Fetch it first: {command('hub', 'pull', name)}, or hf download {name} --local-dir FOLDER."
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
    model, unfinished, whole = Path(subject.path), target.with_name(f".tmp-{target.name}"), target.with_name(f".tmp-f32-{target.name}")  # fmt: skip
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
    """Return a line with the bits per byte of the model and of its quantized weights, on the run's first held-out rows."""
    from itertools import islice

    from pipeline.evals.bpb import bits_per_byte
    from pipeline.evals.subject import load
    from pipeline.evals.texts import held_out_rows
    from pipeline.process.errors import TandemError
    from pipeline.tokenizer.encode import byte_lengths

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
    model.load_state_dict(_in_this_form(model, weights_of_gguf(gguf, Path(subject.path))), strict=False)
    after = score()
    return (
        f"{dtype}: {after.bpb:.4f} bits per byte, {after.bpb - before.bpb:+.4f} beside the model's own {before.bpb:.4f} "
        f"(of {before.tokens:,} held-out tokens; weights alone)"
    )


def _in_this_form(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors under the names of the model in memory: a GPT-2 is loaded as Tandem, which has the same."""
    unknown = weights.keys() - model.state_dict().keys()
    assert not unknown, f"{sorted(unknown)[:3]} are no weights of a {type(model).__name__}"
    return weights


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
