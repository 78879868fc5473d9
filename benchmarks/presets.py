"""The price of a preset: bits per byte on held-out text and CPU time a step, side by side at equal steps.

    python benchmarks/presets.py TEXT_FILE ... [--seeds 3] [--steps 250] [--layers 4] [--width 128] [--only modern portable]

modern, modern without smear, and portable (with nanochat's and with transformers' initial weights), on the same rows in the same order,
with the quickstart's rates, in fp32 on one thread. The last file is held out. All share one tokenizer of the gpt2 pattern, so that
they differ in the model alone. CPU time a step, not wall time: other programs on the machine do not count. One JSON line a run.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.evals.bpb import bits_per_byte
from pipeline.evals.texts import read_texts
from pipeline.model.build import build_model
from pipeline.recipe.reader import read_recipe
from pipeline.recipe.sizes import model_fields
from pipeline.tokenizer.encode import byte_lengths, plain_backend
from pipeline.tokenizer.load import train_bpe
from pipeline.training.optimizer import build_optimizer
from pipeline.training.schedules import StepSchedule

ROW_TOKENS, ROWS, VALIDATION_ROWS, IDS = 128, 8, 192, 2048
RECIPE = """
run: {stage: pretrain}
tokenizer: {vocab_size: IDS, split_pattern: gpt2}
data: {sources: [{files: none.txt}], row_tokens: 128, batch_tokens: 1024}
model: {n_layer: LAYERS, n_embd: WIDTH, n_head: HEADS, attn_implementation: eager}
optimizer:
  type: muon_adamw
  groups:
    embeddings: {learning_rate: 0.2}
    value_embeddings: {learning_rate: 0.1}
    head: {learning_rate: 0.008}
    matrices: {learning_rate: 0.02, weight_decay: 0.0}
  schedule: {warmup_steps: 40, momentum_warmup_steps: 100}
train: {max_steps: STEPS, per_device_train_batch_size: 8}
"""
MODERN = ("model.preset=modern", "model.options.window_pattern=L")
VARIANTS: dict[str, tuple[tuple[str, ...], bool]] = {  # overrides, and whether blocks begin as the identity
    "modern": (MODERN, False),
    "modern_without_smear": ((*MODERN, "model.options.smear=false"), False),
    "portable": (("model.preset=portable",), True),
    "portable_transformers_init": (("model.preset=portable",), False),
}


def encoded(tokenizer: Any, texts: list[str], most: int) -> torch.Tensor:
    """Return the first `most` ids of the texts, each behind a BOS."""
    backend, ids = plain_backend(tokenizer), []
    for text in texts:
        ids += [tokenizer.bos_token_id, *backend.encode(text, add_special_tokens=False).ids]
        if len(ids) >= most:
            return torch.tensor(ids[:most])
    raise SystemExit(f"the text has {len(ids):,} tokens, and {most:,} are needed: name more files, or fewer --steps")


def batch(ids: torch.Tensor, number: int, rows: int) -> dict[str, torch.Tensor]:
    part = ids[number * rows * ROW_TOKENS : (number + 1) * rows * ROW_TOKENS + 1]
    return {"input_ids": part[:-1].view(rows, ROW_TOKENS), "shift_labels": part[1:].view(rows, ROW_TOKENS)}


def score(name: str, options: argparse.Namespace, data: dict[str, Any], *, seed: int) -> dict[str, Any]:
    overrides, identity_blocks = VARIANTS[name]
    recipe = read_recipe([str(data["recipe"]), *overrides], stage="pretrain")
    ids = {"bos_token_id": data["tokenizer"].bos_token_id, "eos_token_id": None, "pad_token_id": None}
    fields = model_fields(recipe, vocab_size=len(data["tokenizer"]), **ids)
    model: Any = build_model(
        recipe.model.type, fields, attn_implementation="eager", seed=seed, identity_blocks=identity_blocks
    )
    optimizer = build_optimizer(model, recipe)
    schedule = StepSchedule(optimizer, recipe.optimizer.schedule, options.steps)
    order = np.random.default_rng(seed).permutation(options.steps)
    started = time.process_time()
    for number in order:
        given = batch(data["train"], int(number), ROWS)
        loss = model(
            **given, labels=given["shift_labels"], num_items_in_batch=torch.tensor(float(ROWS * ROW_TOKENS))
        ).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    cpu_ms = 1000 * (time.process_time() - started) / options.steps
    batches = (batch(data["validation"], number, 16) for number in range(VALIDATION_ROWS // 16))
    bpb = bits_per_byte(model, batches, byte_lengths(data["tokenizer"]), device="cpu").bpb
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "seed": seed, "bpb": bpb, "cpu_ms_a_step": cpu_ms, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="TEXT_FILE", help="txt, jsonl or parquet; the last is held out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="in heads of 64")
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    if len(options.files) < 2:
        parser.error("one file to train on and one that is held out are needed")
    torch.set_num_threads(1)
    texts, _ = read_texts(options.files[:-1], max_bytes=40_000_000)
    held_out, _ = read_texts(options.files[-1:], max_bytes=2_000_000)
    tokenizer = train_bpe((text[:5000] for text in texts[:600]), vocab_size=IDS, split_pattern="gpt2")
    recipe = RECIPE.replace("IDS", str(IDS)).replace("LAYERS", str(options.layers)).replace("STEPS", str(options.steps))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "presets.yaml"
        path.write_text(recipe.replace("WIDTH", str(options.width)).replace("HEADS", str(options.width // 64)))
        data = {
            **{"recipe": path, "tokenizer": tokenizer},
            "train": encoded(tokenizer, texts, options.steps * ROWS * ROW_TOKENS + 1),
            "validation": encoded(tokenizer, held_out, VALIDATION_ROWS * ROW_TOKENS + 1),
        }
        rows = []
        for seed in range(1, options.seeds + 1):
            for name in options.only:
                rows.append(score(name, options, data, seed=seed))
                print(json.dumps(rows[-1]), flush=True)
    for name in options.only:
        bpbs = [row["bpb"] for row in rows if row["name"] == name]
        spread = math.sqrt(sum((bpb - sum(bpbs) / len(bpbs)) ** 2 for bpb in bpbs) / max(1, len(bpbs) - 1))
        cpu_ms = sum(row["cpu_ms_a_step"] for row in rows if row["name"] == name) / len(bpbs)
        print(
            f"{name:<28} {sum(bpbs) / len(bpbs):.4f} bits per byte (sd {spread:.4f}, {len(bpbs)} seeds), {cpu_ms:.0f} ms of CPU a step"
        )


if __name__ == "__main__":
    main()
