"""The price of a preset: bits per byte on held-out text at equal steps, and the ratio of their step times.

    python benchmarks/presets.py TEXT_FILE ... [--seeds 1,2,3] [--steps 250] [--layers 4] [--width 128] [--only modern,portable]
    python benchmarks/presets.py TEXT_FILE ... --pairs 20 [--compile]         processor time alone, each against the first, in turns

modern, modern without smear, modern_bigram, portable (with nanochat's and with transformers' initial weights) and Llama's shape, on the same
rows of 128 tokens in the same order, 8 rows a step, with the quickstart's rates. The last file is held out. All share one tokenizer of the
gpt2 pattern, so that they differ in the model alone. For equal time give the faster one as many more --steps as the ratio says. One JSON line a run.
--set KEY=VALUE ... makes every run again with these keys; given several times, with each of these sets. --bf16: autocast, as train.bf16.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import compared

from pipeline.evals.bpb import bits_per_byte
from pipeline.evals.texts import read_texts
from pipeline.model.build import build_model, use_chunked_loss
from pipeline.recipe.model_sizes import model_fields
from pipeline.recipe.reader import read_recipe
from pipeline.tokenizer.encode import byte_lengths, plain_backend
from pipeline.tokenizer.train import train_bpe
from pipeline.training.build import build_optimizer
from pipeline.training.schedules import StepSchedule

ROW_TOKENS, ROWS, VALIDATION_ROWS, IDS = 128, 8, 192, 2048
STEPS_A_TURN = 5
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
    "modern_bigram": (("model.preset=modern_bigram", "model.options.window_pattern=L"), False),
    "portable": (("model.preset=portable",), True),
    "portable_transformers_init": (("model.preset=portable",), False),
    "llama": (("model.type=llama", "model.options.tie_word_embeddings=false"), True),  # portable without QK norm
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


class Training:
    """A model of one variant in training, a step at a time."""

    def __init__(self, name: str, options: argparse.Namespace, data: dict[str, Any], *, seed: int, keys: list[str]):
        overrides, identity_blocks = VARIANTS[name]
        recipe = read_recipe([str(data["recipe"]), *overrides, *keys], stage="pretrain")
        ids = {"bos_token_id": data["tokenizer"].bos_token_id, "eos_token_id": None, "pad_token_id": None}
        fields = model_fields(recipe.model, vocab_size=len(data["tokenizer"]), **ids)
        self.model: Any = build_model(
            recipe.model.type, fields, attn_implementation="eager", seed=seed, identity_blocks=identity_blocks
        )
        use_chunked_loss(self.model)
        self.model.config.use_cache = False  # as transformers.Trainer
        self.forward = torch.compile(self.model, dynamic=False) if options.compile else self.model
        self.optimizer = build_optimizer(self.model, recipe)
        self.schedule = StepSchedule(self.optimizer, recipe.optimizer.schedule, options.steps)
        self.order = np.random.default_rng(seed).permutation(options.steps)
        self.options, self.data, self.done = options, data, 0

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.options.bf16)

    def steps(self, count: int) -> float:
        """Train and return the processor's seconds that it took: one thread, so that other programs count less than on the clock."""
        started = time.process_time()
        self.model.train()
        for number in self.order[self.done : self.done + count]:
            given = batch(self.data["train"], int(number), ROWS)
            targets = torch.tensor(float(ROWS * ROW_TOKENS))
            with self.autocast():
                loss = self.forward(**given, labels=given["shift_labels"], num_items_in_batch=targets).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.done += count
        return time.process_time() - started

    def bpb(self) -> float:
        batches = (batch(self.data["validation"], number, 16) for number in range(VALIDATION_ROWS // 16))
        dtype = torch.bfloat16 if self.options.bf16 else None
        lengths = byte_lengths(self.data["tokenizer"])
        return bits_per_byte(self.model, batches, lengths, device="cpu", autocast_dtype=dtype).bpb


def scores(options: argparse.Namespace, data: dict[str, Any]) -> None:
    bpbs: dict[tuple[str, str], list[float]] = {}
    for seed in options.seeds:
        for name, keys in itertools.product(options.only, [[], *options.set]):
            started = time.process_time()
            training = Training(name, options, data, seed=seed, keys=keys)
            training.steps(options.steps)
            bpbs.setdefault((name, " ".join(keys)), []).append(training.bpb())
            row = {
                "name": name,
                "keys": keys,
                "seed": seed,
                "steps": options.steps,
                "bpb": bpbs[name, " ".join(keys)][-1],
            }
            row["parameters"] = sum(parameter.numel() for parameter in training.model.parameters())
            print(json.dumps(row | {"cpu_s": time.process_time() - started}), flush=True)
    for (name, keys), of_seeds in bpbs.items():
        spread = statistics.stdev(of_seeds) if len(of_seeds) > 1 else math.nan
        print(
            f"{name:<28} {statistics.mean(of_seeds):.4f} bits per byte (sd {spread:.4f}, {len(of_seeds)} seeds) {keys}"
        )


def times(options: argparse.Namespace, data: dict[str, Any]) -> None:
    trainings = {name: Training(name, options, data, seed=1, keys=[]) for name in options.only}
    for training in trainings.values():
        training.steps(2 * STEPS_A_TURN)  # compiles, and warms up
    turns = []
    for turn in range(options.pairs):
        names = list(trainings)[:: -1 if turn % 2 else 1]
        turns.append({name: trainings[name].steps(STEPS_A_TURN) / STEPS_A_TURN for name in names})
    for name in options.only:
        print(json.dumps({"name": name, **compared([(turn[name], turn[options.only[0]]) for turn in turns])}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="TEXT_FILE", help="txt, jsonl or parquet; the last is held out")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="in heads of 64")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pairs", type=int, default=0, help="measure times alone, in so many turns")
    options = parser.parse_args()
    if len(options.files) < 2:
        parser.error("one file to train on and one that is held out are needed")
    if unknown := set(options.only) - VARIANTS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(VARIANTS)}")
    if options.pairs:
        options.steps = (options.pairs + 2) * STEPS_A_TURN
    torch.set_num_threads(1)
    texts, _ = read_texts(options.files[:-1], max_bytes=40_000_000)
    held_out, _ = read_texts(options.files[-1:], max_bytes=2_000_000)
    tokenizer = train_bpe((text[:5000] for text in texts[:600]), vocab_size=IDS, split_pattern="gpt2")
    recipe = (
        RECIPE.replace("IDS", str(IDS)).replace("LAYERS", str(options.layers)).replace("STEPS", str(options.steps))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "presets.yaml"
        path.write_text(recipe.replace("WIDTH", str(options.width)).replace("HEADS", str(options.width // 64)))
        data = {
            **{"recipe": path, "tokenizer": tokenizer},
            "train": encoded(tokenizer, texts, options.steps * ROWS * ROW_TOKENS + 1),
            "validation": encoded(tokenizer, held_out, VALIDATION_ROWS * ROW_TOKENS + 1),
        }
        (times if options.pairs else scores)(options, data)


if __name__ == "__main__":
    main()
