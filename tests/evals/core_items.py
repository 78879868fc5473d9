"""A small CORE bundle: items of every kind, of many lengths, some options of which begin or end alike."""

import json
import random
from pathlib import Path

from pipeline.evals.core_bundle import TASKS, CoreTask

WORDS = ["ab", "cde", "f", "ghij", "kl", "mnop", "qrstu", "v", "wx", "yz"]


def items_of(task: CoreTask, count: int, seed: int = 0) -> list[dict]:
    drawn = random.Random(f"{task.name}{seed}")

    def text(most: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))

    items: list[dict] = []
    for number in range(count):
        if task.kind == "language_modeling":
            # As in coqa: a text that goes on where the item before ended.
            before = f"{items[-1]['context']} {items[-1]['continuation']} " if number % 3 and task.shots == 0 else ""
            items.append({"context": f"{before}{text(12)} ", "continuation": drawn.choice(WORDS)})
            continue
        options = [text(4) for _ in range(drawn.choice([2, 4]))]
        if number % 5 == 0:
            options[1] = options[0] + " and more"
        gold = drawn.randrange(len(options))
        if task.kind == "multiple_choice":
            items.append({"query": text(12), "choices": options, "gold": gold})
        else:
            items.append({"context_options": options, "continuation": text(6), "gold": gold})
    return items


def write_bundle(folder: Path, count: int, tasks=TASKS) -> Path:
    for task in tasks:
        path = folder / "eval_data" / task.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items_of(task, count)))
    return folder
