"""Tandem's pretraining by its own command, which continues by itself; a row is the hash of its ids.

GPT-2 with dropout, AdamW, documents that carry their number. There are no loader workers: rows are a function of the
step.

packages: tandem-llm@REPOSITORY torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
offers: ranks
notes: A process of its own writes the checkpoints. In in_a_save that process meets the limit as an error of the disk,
    and the trainer is killed a step later; the next start takes the checkpoint before. The subject waits for the
    newest checkpoint at each step, as its steps take no time, and writes no report.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from transformers import TrainerCallback

from faults.conformance.subject import Journal, arguments
from pipeline import pretrain
from pipeline.data.rows import TrainingRows
from pipeline.run import finish
from pipeline.run_dir import failures

ROW_TOKENS = 64
WORDS = [
    "ash",
    "bay",
    "cup",
    "dew",
    "elm",
    "fog",
    "gum",
    "hay",
    "ivy",
    "jar",
    "kin",
    "log",
    "mud",
    "nut",
    "oak",
    "pen",
    "rug",
    "sun",
    "tar",
    "urn",
    "vat",
    "wax",
    "yam",
    "zip",
]
given = None
rows_by_step: dict[int, list[str]] = defaultdict(list)


def main() -> None:
    global given  # for the callback, which the run makes
    given = arguments()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")  # one thread: two that meet on a busy core wait for each other
    os.environ["TANDEM_CACHE"] = str(given.folder.parent / "cache")  # prepared once for all trainings
    texts = given.folder.parent / "texts"
    write_documents(texts, given.rows)
    record_rows()
    settings = [
        "run.name=run",
        f"run.directory={given.folder}",
        f"run.callbacks=[{__name__}:Follow]",
        "run.trust_code=true",
        "tokenizer.vocab_size=320",
        f"data.sources=[{{files: {texts / 'train.jsonl'}}}]",
        f"data.validation=[{{files: {texts / 'validation.jsonl'}}}]",
        f"data.row_tokens={ROW_TOKENS}",
        f"data.batch_tokens={ROW_TOKENS * given.batch}",
        f"train.max_steps={given.steps}",
        f"train.per_device_train_batch_size={given.rank_batch}",
        f"train.save_steps={given.save_every}",
        "train.torch_compile=false",
        "train.logging_steps=1",
        "train.eval_steps=1000",
        "model.n_layer=1",
        "model.n_embd=64",
        "model.n_head=2",
        "optimizer.type=adamw",
        "evals.bpb.at_start=false",
        "evals.bpb.tokens=1024",
        "evals.bpb.document_bytes=1000",
        "samples.every_steps=0",
        "monitor.trackers=[]",
    ]
    recipe = given.folder / "recipe.yaml"
    recipe.write_text("run: {stage: pretrain}\n")
    sys.argv = [pretrain.__file__, str(recipe), *settings]
    finish.write_report = lambda *run, **limit: (
        None
    )  # it is written behind the training, and takes longer than all of it
    failures.exit_with_status(pretrain.main)


def write_documents(folder: Path, num_documents: int) -> None:
    """Write as many documents as rows, each of which begins with its number and about fills a row."""
    folder.mkdir(exist_ok=True)
    for name, first in (("train", 0), ("validation", num_documents)):
        lines = []
        for number in range(first, first + num_documents):
            words = random.Random(number).choices(WORDS, k=ROW_TOKENS - 8)
            lines.append(json.dumps({"text": f"{number}: {' '.join(words)}."}) + "\n")
        path = folder / f"{name}.jsonl"
        if not path.exists():
            path.write_text("".join(lines))


def record_rows() -> None:
    """Have the rows of each step noted as they are read."""
    read = TrainingRows.micro_batch

    def micro_batch(self, step: int, micro_step: int, **how) -> dict:
        batch = read(self, step, micro_step, **how)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if bool((labels != -100).any()):  # others fill up the last step
                rows_by_step[step + 1].append(hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8])
        return batch

    TrainingRows.micro_batch = micro_batch


class Follow(TrainerCallback):
    """Keeps the journal. A step is noted when its loss is logged, which is before its checkpoint."""

    def __init__(self):
        self.journal = Journal(given.folder)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.journal.start(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        loss = (logs or {}).get("train/loss", (logs or {}).get("loss"))
        step = state.global_step
        if loss is None or not rows_by_step[step]:
            return
        self.wait_for_checkpoint((step - 2) // given.save_every * given.save_every)
        self.journal.step(step, rows_by_step.pop(step), loss)

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        self.journal.end(state.global_step, model)

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until this checkpoint is on the disk: a process of its own writes it, and a step here takes no time."""
        checkpoint = given.folder / "run" / "checkpoints" / f"checkpoint-{step}"
        ends = time.monotonic() + 60
        while step > 0 and not checkpoint.exists() and time.monotonic() < ends:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
