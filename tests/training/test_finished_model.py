"""model/ of an earlier start that was cut off at its end: kept when it is this one, else written anew."""

import os
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from pipeline.model.build import build_model
from pipeline.run_dir.checkpoints import problems
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import write_finished_model

TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None)
FIELDS = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 8,
    "vocab_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def damage(weights):
    with open(weights, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("dtype", "harm", "kept"),
    [("float32", None, True), ("bfloat16", None, False), ("float32", damage, False)],
)
def test_an_existing_model_is_kept_only_when_whole_and_correctly_typed(tmp_path, dtype, harm, kept):
    run, model = RunDirectory(tmp_path), build_model("tandem", FIELDS, seed=0)
    write_finished_model(run, model, TOKENIZER, dtype="float32", step=5)
    weights = run.model / "model.safetensors"
    if harm:
        harm(weights)
    os.utime(weights, (1, 1))
    write_finished_model(run, model, TOKENIZER, dtype=dtype, step=5)
    assert (weights.stat().st_mtime == 1) == kept
    assert problems(run.model) == []
    assert {str(tensor.dtype) for tensor in load_file(weights).values()} == {f"torch.{dtype}"}
