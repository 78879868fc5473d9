"""A checkpoint's files: the model that from_pretrained loads, and all that an exact continuation needs. No pickle.

model.safetensors config.json ...   the model, its code and the tokenizer (fp32 masters)
optimizer.safetensors               keys <parameter>/<state>
scheduler.json                      schedule, gradient scaler and the optimizer's settings
trainer_state.json                  transformers' TrainerState
rng-<rank>.safetensors              random state of each rank
position.json                       what the next step reads, the meter, and what was trained and not yet logged
MANIFEST.json                       sha256 of all, written last (artifacts/checkpoints.py)
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts.atomic import read_json
from pipeline.artifacts.errors import DataError
from pipeline.model.export import saved_form, saved_weights

MODEL, OPTIMIZER, SCHEDULER, POSITION = "model.safetensors", "optimizer.safetensors", "scheduler.json", "position.json"


def rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


class ModelFiles:
    """What from_pretrained loads, but for the weights: config, code, tokenizer. Made once: it never changes in a run."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.form: Any = None
        self.contents: dict[str, bytes] = {}

    def write(self, model: Any, folder: Path) -> dict[str, torch.Tensor]:
        """Write the files into the empty folder, and give the weights for model.safetensors."""
        if self.form is None:
            self.form = saved_form(model, folder)
            self.form.save_pretrained(folder, state_dict={})
            self.tokenizer.save_pretrained(folder)
            self.contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        else:
            for name, content in self.contents.items():
                (folder / name).write_bytes(content)
        return saved_weights(self.form, model)


def write_training_state(
    folder: Path,
    *,
    settings: Any,
    schedule: dict,
    scaler: dict | None,
    rng: list[dict[str, torch.Tensor]],
    position: dict,
) -> None:
    """Write everything beside the model and the optimizer's tensors; rng: one state per rank, in rank order."""
    (folder / SCHEDULER).write_text(
        json.dumps({"schedule": schedule, "scaler": scaler, "optimizer": settings}, indent=2)
    )
    for rank, state in enumerate(rng):
        save_file(state, folder / rng_file(rank))
    (folder / POSITION).write_text(json.dumps(position, indent=2))


def read_optimizer(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The optimizer's tensors and scheduler.json; DataError when the checkpoint cannot be continued from."""
    missing = [name for name in (OPTIMIZER, SCHEDULER, POSITION) if not (folder / name).exists()]
    if missing:
        raise DataError(
            f"{folder}: {', '.join(missing)} missing, so the run cannot go on exactly. Use model.start_from to start a new run from its weights."
        )
    return load_file(folder / OPTIMIZER), read_json(folder / SCHEDULER)


def read_rng(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    """This rank's random state, or None when the checkpoint was written by fewer ranks."""
    path = folder / rng_file(rank)
    return load_file(path) if path.exists() else None


def read_position(folder: Path) -> dict[str, Any]:
    return read_json(folder / POSITION)
