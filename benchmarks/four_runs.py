"""The numbers of four small runs to the last digit: whether a change of the code has changed what a training computes.

    python benchmarks/four_runs.py --save FILE.json [--only NAME ...]
    python benchmarks/four_runs.py --compare FILE.json        # runs again; status 1 at the first number that differs

60 steps each in fp32, one thread a rank: the quickstart's model with Muon, chat SFT from it, GPT-2 with AdamW and dropout,
and the first one's model on two gloo ranks over a mixture. Text and recipes stand here, so that a change of the shipped
recipes or of the built-in text moves nothing. Compared are every step's loss and gradient norm, every evaluation's score, and
the sha256 of the final weights. Equal numbers need the same machine, Python and libraries: what differs of these is said.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
STEPS = 60
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")
# Of a row of metrics.jsonl everything that the arithmetic alone decides; times, rates and memory are the machine's.
COMPARED = ("train/", "val/", "sft/", "optim/", "data/epoch")
NOT_COMPARED = ("_s", "per_s")  # seconds and rates among them

MODERN = {
    "model": {
        **{"preset": "modern", "n_layer": 4, "n_embd": 128, "n_head": 4, "attn_implementation": "eager"},
        "options": {"window_pattern": "SL", "sliding_window": 64},
    },
    "optimizer": {
        "type": "muon_adamw",
        "groups": {"embeddings": {"learning_rate": 0.2}, "matrices": {"learning_rate": 0.02}},
        "schedule": {"warmup_steps": 10, "decay_fraction": 0.5, "momentum_warmup_steps": 30},
    },
}
GPT2 = {
    "model": {"preset": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4},  # with its dropout: the random state counts
    "optimizer": {"type": "trainer"},  # transformers' own AdamW and scheduler, as recipes/gpt2_124m.yaml has them
    "train": {
        **{"optim": "adamw_torch_fused", "learning_rate": 6.0e-4, "adam_beta2": 0.95, "weight_decay": 0.1},
        **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 10},
    },
}


def documents(seed: int, count: int) -> list[str]:
    """Return made-up prose: sentences of a small vocabulary, in which the word before says what may follow."""
    draw = random.Random(seed)
    letters = random.Random(0)  # the same words for every seed
    words = ["".join(letters.choices("aeioubdfglmnprst", k=letters.randint(2, 9))) for _ in range(600)]
    texts = []
    for _ in range(count):
        word, sentences = draw.randrange(len(words)), []
        for _ in range(draw.randint(1, 12)):
            chosen = []
            for _ in range(draw.randint(3, 14)):
                word = (word * 7 + draw.randrange(12)) % len(words)
                chosen.append(words[word])
            sentences.append(" ".join(chosen).capitalize() + ".")
        texts.append(" ".join(sentences))
    return texts


def write_data(folder: Path) -> str:
    """Write the data files; return the sha256 of all of them."""
    whole = hashlib.sha256()
    for name, seed, count in (("text-a", 1, 1500), ("text-b", 2, 500), ("text-held", 3, 200)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents(seed, count)))
    for name, seed, count in (("chat", 4, 1200), ("chat-held", 5, 100)):
        texts, lines = documents(seed, count), []
        for number, text in enumerate(texts):
            sentences = text.split(". ")
            messages = []
            for turn in range(1 + number % 3):
                answer = sentences[turn % len(sentences)]
                messages.append({"role": "user", "content": f"Which words come after {answer.split()[0]}?"})
                messages.append({"role": "assistant", "content": answer})
            lines.append(json.dumps({"messages": messages}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for path in sorted(folder.glob("*.jsonl")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recipe of each run by its name."""

    def made(stage: str, sources: list[dict], held: str, **sections: Any) -> dict[str, Any]:
        data = {
            "sources": [{**source, "files": str(folder / source["files"])} for source in sources],
            "validation": [{"files": str(folder / held)}],
            **{"row_tokens": 128, "batch_tokens": 1024, "shard_rows": 256, "cache_dir": str(folder / "cache")},
        }
        return {
            "run": {"stage": stage, "directory": str(folder / "runs")},
            "tokenizer": {"vocab_size": 1024, "train_chars": 300_000},
            "data": data,
            "train": {
                **{"max_steps": STEPS, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8},
                **{"bf16": False, "torch_compile": False, "max_grad_norm": 1.0, "seed": 7},
                **{"logging_steps": 1, "eval_steps": 20, "save_steps": 30},
                **sections.pop("train", {}),
            },
            "evals": {"bpb": {"tokens": 8192, "document_bytes": 8000}},
            "samples": {"every_steps": 0},
            "monitor": {"trackers": []},
            **sections,
        }

    text, chat = [{"files": "text-a.jsonl"}], [{"files": "chat.jsonl"}]
    mixture = [{"files": "text-a.jsonl", "weight": 0.7}, {"files": "text-b.jsonl", "weight": 0.3}]
    sft = made("sft", chat, "chat-held.jsonl", **MODERN)
    sft["model"] = {"start_from": str(folder / "runs" / "pretrain" / "model")}
    sft["optimizer"] = {**MODERN["optimizer"], "rate_scale": 0.5}
    del sft["tokenizer"]  # the model's own
    return {
        "pretrain": made("pretrain", text, "text-held.jsonl", **MODERN),
        "sft": sft,
        "gpt2": made("pretrain", text, "text-held.jsonl", **GPT2),
        "two_ranks": made("pretrain", mixture, "text-held.jsonl", **MODERN),
    }


def train(name: str, recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run it as a user does; return its numbers by step and the hash of its weights."""
    ranks = 2 if name == "two_ranks" else 1
    path = folder / f"{name}.yaml"
    recipe["run"]["name"] = name
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    config = ROOT / "accelerate_configs" / ("cpu_2.yaml" if ranks == 2 else "cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += [str(ROOT / "pipeline" / f"{recipe['run']['stage']}.py"), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    cores = sorted(os.sched_getaffinity(0))[-ranks:]  # the run shares its cores out: one a rank, one thread each
    started = time.monotonic()
    ended = subprocess.run(
        command,
        **{"env": environment, "cwd": folder, "capture_output": True, "text": True},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}")
    directory = folder / "runs" / name
    rows: dict[str, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "event" not in row:
            known = rows.setdefault(str(row["step"]), {})
            known |= {k: v for k, v in row.items() if k.startswith(COMPARED) and not k.endswith(NOT_COMPARED)}
    weights = sum_of_weights(directory / "model" / "model.safetensors")
    losses = [row["train/loss"] for row in rows.values() if "train/loss" in row]
    assert len(losses) == STEPS, f"{name} logged {len(losses)} losses"
    print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f} in {time.monotonic() - started:.0f} s, weights {weights[:12]}")
    return {"rows": rows, "weights": weights}


def sum_of_weights(path: Path) -> str:
    """Return the sha256 of all tensors by their names; not of the file, whose order and metadata may change."""
    whole = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        whole.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        whole.update(np.ascontiguousarray(tensor).tobytes())
    return whole.hexdigest()


def first_difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return where two results of one run differ first, in the order of steps; None when nowhere."""
    steps = sorted({*before["rows"], *after["rows"]}, key=int)
    for step in steps:
        old, new = before["rows"].get(step, {}), after["rows"].get(step, {})
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                return f"step {step}, {key}: {old.get(key)!r} before, {new.get(key)!r} now"
    if before["weights"] != after["weights"]:
        return f"the final weights: {before['weights'][:12]} before, {after['weights'][:12]} now"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="numbers of an earlier call")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("pretrain", "sft", "gpt2", "two_ranks"),
        help="these runs; sft trains pretrain too",
    )
    options = parser.parse_args()
    before = json.loads(options.compare.read_text()) if options.compare else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": cpu_model()}
        facts |= {library: version(library) for library in LIBRARIES} | {"data": write_data(folder)}
        wanted = {*options.only, *(["pretrain"] if "sft" in options.only else [])} if options.only else None
        runs = {
            name: train(name, recipe, folder)
            for name, recipe in recipes(folder).items()
            if wanted is None or name in wanted
        }
    if options.save:
        options.save.write_text(json.dumps({"facts": facts, "runs": runs}, indent=1))
    if before is None:
        return 0
    for name, old in before["facts"].items():
        if old != facts[name]:
            print(f"note: {name} is {facts[name]}, and was {old}")
    status = 0
    for name, after in runs.items():
        difference = first_difference(before["runs"][name], after)
        status |= difference is not None
        print(f"{name}: {difference or 'identical to the last digit'}")
    return int(status)


def cpu_model() -> str:
    """Return the processor's name: another one may sum in another order."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    sys.exit(main())
