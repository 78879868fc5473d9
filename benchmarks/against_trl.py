"""SFT speed beside TRL's SFTTrainer with packing: the same start weights, tokenizer, conversations and positions a step.

    python benchmarks/against_trl.py --chat 'train/*.jsonl' [--layers 4] [--width 256] [--steps 60] [--pairs 3]

Needs trl. The model is a GPT-2 without dropout, which both can train, with transformers' default AdamW at one rate,
constant; rows of --row-tokens, --rows of them a step. Both train on what the assistant says. TRL lays the rows of a
micro-batch end to end, which costs attention the square of their length where no flash kernel runs: it gets --trl-rows at a
time and accumulates. Else each is run as it comes: ours in one micro-batch, compiled where a compiler is at hand, TRL's not
compiled. Compared are targets a second: trained tokens, which is what a row is for; the mean of a step's over its median
time, in the last two thirds of the steps. loss: nats a target, the mean of the same steps. Each pair is a run of each, in
turns.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, TRAIN_ONLY, compared, show

RATE = 5e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--trl-rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--bf16", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows % options.trl_rows:
        parser.error("--trl-rows must divide --rows, or the two would train on steps of different sizes.")
    if options.role:
        train_with_trl(options, *map(Path, options.role))
        return
    with tempfile.TemporaryDirectory() as folder:
        start = first_model(options, Path(folder))
        times, rows = [], []
        for pair in range(options.pairs):
            runs = [lambda n=pair: ours(options, Path(folder), start, f"ours{n}"), lambda: trl(options, start)]
            own, other = (run() for run in runs) if pair % 2 == 0 else [run() for run in runs[::-1]][::-1]
            rows.append({"pair": pair, **prefixed("ours", own), **prefixed("trl", other)})
            times.append((1 / own["targets_per_s"], 1 / other["targets_per_s"]))
    found = compared(times)
    ratios = {"ratio": 1 / found["ratio"], "ratio_p10": 1 / found["ratio_p90"], "ratio_p90": 1 / found["ratio_p10"]}
    show(options, [*rows, {"pair": "all", **ratios}])


def prefixed(name: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{name}_{key}": value for key, value in values.items()}


def overrides(options: argparse.Namespace, folder: Path, name: str, **more: object) -> list[str]:
    given = {
        "run.name": name,
        "run.directory": folder / "runs",
        "data.cache_dir": folder / "cache",
        "data.sources": f"[{{files: '{options.chat}'}}]",
        "data.row_tokens": options.row_tokens,
        "data.batch_tokens": options.rows * options.row_tokens,
        "optimizer.type": "trainer",
        "train.learning_rate": RATE,
        "train.lr_scheduler_type": "constant",
        "train.per_device_train_batch_size": options.rows,
        "train.bf16": options.bf16,
        "train.torch_compile": "auto",
        "train.logging_steps": 1,
        "monitor.trackers": "[]",
        **more,
    }
    return [*TRAIN_ONLY, *(f"{key}={value}" for key, value in given.items())]


def run(options: argparse.Namespace, command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *command], check=True, env=environment, stdout=sys.stderr)


def sft(options: argparse.Namespace, given: list[str], folder: Path) -> None:
    recipe = folder / "sft.yaml"
    recipe.write_text("run: {stage: sft}\n")
    run(options, [str(ROOT / "pipeline" / "sft.py"), str(recipe), *given])


def first_model(options: argparse.Namespace, folder: Path) -> Path:
    """A model of one step with its tokenizer, in a format of transformers' own."""
    sizes = {"model.n_layer": options.layers, "model.n_embd": options.width, "model.n_head": options.width // 64}
    more = {
        **sizes,
        "model.preset": "gpt2",
        "model.options": "{attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0}",
        "tokenizer.vocab_size": options.vocab_size,
        "train.max_steps": 1,
    }
    sft(options, overrides(options, folder, "start", **more), folder)
    return folder / "runs" / "start" / "model"


def ours(options: argparse.Namespace, folder: Path, start: Path, name: str) -> dict[str, float]:
    more = {"model.start_from": start, "train.max_steps": options.steps}
    sft(options, overrides(options, folder, name, **more), folder)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/step_s" in row]
    targets = [after["data/tokens"] - before["data/tokens"] for before, after in itertools.pairwise(rows)]
    return speeds([row["perf/step_s"] for row in rows[1:]], targets, [row["train/loss"] for row in rows[1:]])


def speeds(seconds: list[float], targets: list[int], losses: list[float]) -> dict[str, float]:
    late = len(seconds) // 3
    step_s, mean_targets = statistics.median(seconds[late:]), statistics.mean(targets[late:])
    speed = {"step_s": step_s, "targets": mean_targets, "targets_per_s": mean_targets / step_s}
    return speed | {"loss": statistics.mean(losses[late:])}


def trl(options: argparse.Namespace, start: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        run(options, [__file__, *sys.argv[1:], "--role", str(start), str(result)])
        return json.loads(result.read_text())


def train_with_trl(options: argparse.Namespace, start: Path, result: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from pipeline.hardware.device import decide_bf16, device_info

    data = load_dataset("json", data_files=options.chat, split="train").select_columns(["messages"])
    tokenizer = AutoTokenizer.from_pretrained(start)
    args = SFTConfig(
        output_dir=str(result.parent),
        max_length=options.row_tokens,
        packing=True,
        assistant_only_loss=True,
        per_device_train_batch_size=options.trl_rows,
        gradient_accumulation_steps=options.rows // options.trl_rows,
        max_steps=options.steps,
        gradient_checkpointing=False,  # ours does without as well
        bf16=decide_bf16(options.bf16),
        use_cpu=device_info().kind == "cpu",
        logging_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
    )
    targets: list[int] = []
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[Ends()])
    collate = trainer.data_collator

    def counting(examples):
        batch = collate(examples)
        targets.append(int((batch["labels"] != -100).sum()))
        return batch

    trainer.data_collator = counting
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    each = options.rows // options.trl_rows
    of_steps = [sum(targets[i : i + each]) for i in range(each, each * len(ends), each)]
    result.write_text(json.dumps(speeds(seconds, of_steps, losses[1:])))


if __name__ == "__main__":
    main()
