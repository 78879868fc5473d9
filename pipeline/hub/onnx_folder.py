"""ONNX, the graph that onnxruntime and others run: token ids and their mask in, logits out, of any batch and length."""

import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import InputMissingError, RecipeError

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
    """How far onnxruntime's logits of a padded batch are from the model's of each row alone, at most."""
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
    """Rows of any tokens, padded on the left to the longest."""
    import torch

    width = min(max(lengths), getattr(config, "max_position_embeddings", None) or max(lengths))
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % config.vocab_size
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}
