"""How many epochs a small corpus bears: bits per byte on held-out text after 1, 2, 4 ... passes over the same text.

    python benchmarks/epochs.py TEXT_FILE HELD_OUT_FILE [--epochs 1 2 4 8 16 32] [--seeds 1 2] [--layers 2] [--width 128]

Each run is a schedule of its own that ends with its last pass, on the values of recipes/own_text.yaml but the sizes, in bf16 where
the processor is fast in it, on one thread. One JSON line a run: `bpb` on the held-out text, `train_bpb` on as much of the trained.
"""

import argparse
import contextlib
import json
import time
from typing import Any

import numpy as np
import torch

from pipeline.evals.bpb import bits_per_byte
from pipeline.evals.texts import read_texts
from pipeline.hardware.device import decide_bf16
from pipeline.model.build import build_model
from pipeline.recipe.model_sizes import model_fields
from pipeline.recipe.reader import read_recipe
from pipeline.run.open_rows import resolve_warmup
from pipeline.tokenizer.encode import byte_lengths, plain_backend
from pipeline.tokenizer.train import train_bpe
from pipeline.training.build import build_optimizer
from pipeline.training.schedules import StepSchedule

IDS, ROW_TOKENS, ROWS, SCORED_ROWS = 2048, 128, 16, 256


def rows_of(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return rows of ROW_TOKENS + 1 ids of the texts, each behind a BOS."""
    backend, ids = plain_backend(tokenizer), []
    for text in texts:
        ids += [tokenizer.bos_token_id, *backend.encode(text, add_special_tokens=False).ids]
    rows = (len(ids) - 1) // ROW_TOKENS
    return torch.tensor(ids[: rows * ROW_TOKENS + 1]).unfold(0, ROW_TOKENS + 1, ROW_TOKENS)


def batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows[:, :-1], "shift_labels": rows[:, 1:]}


def score(
    options: argparse.Namespace, tokenizer: Any, train: torch.Tensor, held_out: torch.Tensor, *, epochs: int, seed: int
) -> dict[str, Any]:
    steps = epochs * (len(train) // ROWS)
    sizes = {"depth": options.layers, "aspect_ratio": options.width // options.layers, "head_dim": 64}
    recipe = read_recipe(
        [
            "recipes/own_text.yaml",
            "data.sources=[{files: none.txt}]",
            f"tokenizer.vocab_size={IDS}",
            f"data.row_tokens={ROW_TOKENS}",
            f"data.batch_tokens={ROWS * ROW_TOKENS}",
            *(f"model.{key}={value}" for key, value in sizes.items()),
            f"train.max_steps={steps}",
            "train.num_train_epochs=null",
            f"train.per_device_train_batch_size={ROWS}",
        ],
        stage="pretrain",
    )
    recipe = resolve_warmup(recipe)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": None, "pad_token_id": None}
    fields = model_fields(recipe.model, vocab_size=len(tokenizer), **ids)
    model: Any = build_model(recipe.model.type, fields, attn_implementation="sdpa", seed=seed)
    optimizer = build_optimizer(model, recipe)
    schedule = StepSchedule(optimizer, recipe.optimizer.schedule, steps)
    generator = np.random.default_rng(seed)
    bf16 = decide_bf16(recipe.train["bf16"])
    precision = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    started, loss = time.process_time(), torch.zeros(())
    for _ in range(epochs):
        order = generator.permutation(len(train))
        for first in range(0, len(train) // ROWS * ROWS, ROWS):
            given = batch(train[order[first : first + ROWS]])
            targets = torch.tensor(float(ROWS * ROW_TOKENS))
            with precision:
                loss = model(**given, labels=given["shift_labels"], num_items_in_batch=targets).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    cpu_s = time.process_time() - started
    bpb = {}
    for name, rows in (("bpb", held_out), ("train_bpb", train)):
        batches = (batch(rows[first : first + 16]) for first in range(0, min(SCORED_ROWS, len(rows)), 16))
        bpb[name] = round(bits_per_byte(model, batches, byte_lengths(tokenizer), device="cpu").bpb, 4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"epochs": epochs, "seed": seed, **bpb, "steps": steps, "cpu_s": round(cpu_s, 1), "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT_FILE", help="txt, jsonl or parquet")
    parser.add_argument("held_out", metavar="HELD_OUT_FILE")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="in heads of 64")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts, _ = read_texts([options.text], max_bytes=10**9)
    held_out_texts, _ = read_texts([options.held_out], max_bytes=10**9)
    tokenizer = train_bpe(texts, vocab_size=IDS, split_pattern="gpt2")
    train, held_out = rows_of(tokenizer, texts), rows_of(tokenizer, held_out_texts)
    print(
        f"{sum(len(text.encode()) for text in texts):,} bytes, {len(train) * ROW_TOKENS:,} tokens an epoch", flush=True
    )
    for seed in options.seeds:
        for epochs in options.epochs:
            print(json.dumps(score(options, tokenizer, train, held_out, epochs=epochs, seed=seed)), flush=True)


if __name__ == "__main__":
    main()
