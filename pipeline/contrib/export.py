"""A model as other programs read it: GGUF and Ollama (contrib/gguf.py), ONNX for onnxruntime, safetensors in shards and
in another type."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.contrib.gguf import ends_of, model_sizes, write_gguf
from pipeline.evals.subject import Subject, find_subject, open_model
from pipeline.process.commands import command
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, first_line
from pipeline.process.storage import new_folder, read_json, write_text
from pipeline.tokenizer.encode import control_strings

# The built-in chat template (tokenizer/chat_template.jinja) without the document's start, which llama.cpp adds itself,
# and without tools. Ollama's language has no way to replace text, so a control token that a user spells is one there.
OLLAMA_TEMPLATE = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "assistant" }}<|assistant|>{{ .Content }}{{ if not $last }}<|end|>{{ end }}
{{- else }}<|{{ .Role }}|>{{ .Content }}<|end|>{{ if $last }}<|assistant|>{{ end }}
{{- end }}
{{- end }}"""


def modelfile(gguf: str, *, model: Path) -> str:
    """Return Ollama's Modelfile for the file `gguf` in the same folder, made of the model in that folder.

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
    lines.append(f"PARAMETER num_ctx {model_sizes(read_json(model / 'config.json'))['positions']}")
    return "\n".join(lines) + "\n"


TOLERANCE = 1e-3  # of a logit; seen: 2e-6


def write_onnx(model: Path, folder: Path, *, loaded: Any) -> None:
    """Write the loaded model of that folder as model.onnx, its fp32 weights, and its configs; compared in
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
    apart = []
    with torch.no_grad():
        for ids, logits, length in zip(batch["input_ids"], torch.from_numpy(found), lengths, strict=True):
            alone = loaded(ids[None, -length:]).logits[0]
            apart.append((alone - logits[-length:]).abs().max())
    return float(torch.stack(apart).max())  # NaN where one is


def _batch(config: Any, *, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return rows of any tokens, padded on the left to the longest."""
    import torch

    width = min(max(lengths), getattr(config, "max_position_embeddings", None) or max(lengths))
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % config.get_text_config().vocab_size
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
GGUF_DTYPES = (*TORCH_DTYPES, "q8_0")
DTYPES = {"gguf": GGUF_DTYPES, "ollama": GGUF_DTYPES, "onnx": ("f32",), "safetensors": tuple(TORCH_DTYPES)}


def export(
    name: str,
    *,
    to: str,
    output: str | None = None,
    dtype: str | None = None,
    max_shard_size: str,
    merge: bool = False,
    trust_code: bool = False,
) -> Path:
    """Write the model that `name` means (run, checkpoint, folder) whole or not at all; returns what was written.

    to: gguf, one file; ollama, a folder with that file and a Modelfile; onnx, a folder with model.onnx; safetensors, a
    folder that from_pretrained loads, its weights in files of at most max_shard_size. dtype: of the weights, one of
    DTYPES[to]; default f16 for gguf and ollama, as they are for safetensors. output: default next to the model, where
    run and format name it. merge: write an adapter as the whole model that it makes of its base.

    Raises RecipeError when this model cannot be written so, CannotWriteError when the output exists, InputMissingError
    when there is no such model or package, RecipeError for a model of code of its own (trust_code: run it).
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
    is_adapter = (Path(subject.path) / "adapter_config.json").is_file()
    if is_adapter and not merge:
        raise RecipeError(f"{name}: is an adapter, and others read whole models. Add --merge to write one.")
    if merge and not is_adapter:
        raise RecipeError(f"{name}: is a whole model, so there is nothing to merge. Leave out --merge.")
    with _merged(subject) if merge else nullcontext(subject) as subject:
        _write(subject, target, to=to, dtype=dtype, max_shard_size=max_shard_size)
    return target


@contextmanager
def _merged(subject: Subject) -> Iterator[Subject]:
    """Yield the adapter merged into its base, as a folder next to it that is removed afterwards; of a run its name
    stays."""
    from transformers import AutoTokenizer

    from pipeline.model.adapter import merge_adapter
    from pipeline.model.saved import save_model

    model = merge_adapter(open_model(subject.path, code=subject.code))
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=Path(subject.path).resolve().parent) as temporary:
        folder = Path(temporary) / _name(subject)
        save_model(model, folder)
        AutoTokenizer.from_pretrained(subject.path, trust_remote_code=False).save_pretrained(folder)
        yield replace(subject, path=str(folder))


def _write(subject: Subject, target: Path, *, to: str, dtype: str | None, max_shard_size: str) -> None:
    if to == "gguf":
        _gguf(subject, target, dtype=dtype or "f16")
    elif to == "ollama":
        file = f"{_name(subject)}-{dtype or 'f16'}.gguf"
        with new_folder(target) as folder:
            write_text(folder / "Modelfile", modelfile(file, model=Path(subject.path)))
            _gguf(subject, folder / file, dtype=dtype or "f16")
    else:
        _folder(subject, target, to=to, dtype=dtype, max_shard_size=max_shard_size)


def _name(subject: Subject) -> str:
    return subject.run.name if subject.run else Path(subject.path).resolve().name


def _default(subject: Subject, *, to: str, dtype: str | None) -> Path:
    """Return RUN/export/NAME-..., for a checkpoint with its step; of a folder that is no run's a place next to it."""
    folder, stem = Path(subject.path).resolve().parent, _name(subject)
    if subject.run:
        folder = subject.run.path / "export"
        if subject.name != "model/":
            stem += f"-{Path(subject.path).name}"
    if to == "gguf":
        return folder / f"{stem}-{dtype or 'f16'}.gguf"
    return folder / "-".join(filter(None, (stem, to, dtype)))


def _gguf(subject: Subject, target: Path, *, dtype: str) -> None:
    unfinished = target.with_name(f".tmp-{target.name}")
    try:
        write_gguf(Path(subject.path), unfinished, name=_name(subject), dtype=dtype)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


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
