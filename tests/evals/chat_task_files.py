"""Small files of the chat tasks, as they are published."""

import gzip
import json
import random

NAMES = ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "spelling_bee"]
SUBJECTS = ["anatomy", "law"]


def arc_row(n):
    draw = random.Random(n)
    labels = ["1", "2", "3", "4"] if n % 7 == 0 else ["A", "B", "C", "D"][: 3 + (n % 5 > 0)]
    texts = [f"thing {draw.randrange(100)} of {n}" for _ in labels]
    return {
        "id": f"q{n}",
        "question": f"Which of the {n} things {'is it, really' * (n % 3)}?",
        "choices": {"text": texts, "label": labels},
        "answerKey": draw.choice(labels),
    }


def bundle_row(n):
    row = arc_row(n + 1000)
    labels = row["choices"]["label"]
    return {
        "query": f"Question: {row['question']}",
        "choices": row["choices"]["text"],
        "gold": labels.index(row["answerKey"]),
    }


def mmlu_row(n):
    draw = random.Random(f"mmlu {n}")
    choices = [f"{draw.randrange(10**4)}" for _ in "ABCD"]
    return {"question": f"What is {n}?", "choices": choices, "answer": draw.randrange(4), "subject": SUBJECTS[n % 2]}


def gsm8k_row(n):
    return {
        "question": f"I have {n:,} apples and eat {n % 9}. How many are left?",
        "answer": f"It is {n}-{n % 9}=<<{n}-{n % 9}={n - n % 9}>>{n - n % 9}.\n#### {n - n % 9:,}",
    }


def humaneval_row(n):
    return {
        "task_id": f"HumanEval/{n}",
        "prompt": f'from typing import List\n\n\ndef add_{n}(x: int) -> int:\n    """Add {n}."""\n',
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        "entry_point": f"add_{n}",
    }


def write_jsonl(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_all(folder, rows=12):
    """One file a task, and files of other splits beside them, which are not to be taken."""
    made = range(1, rows + 1)
    write_jsonl(folder / "ARC-Easy.jsonl", map(arc_row, made))
    write_jsonl(folder / "arc_challenge.jsonl", map(bundle_row, made))
    write_jsonl(folder / "mmlu_test.jsonl", map(mmlu_row, made))
    write_jsonl(folder / "mmlu_validation.jsonl", [{"not": "read"}])
    write_jsonl(folder / "gsm8k_test.jsonl", map(gsm8k_row, range(2000, 2000 + rows)))
    write_jsonl(folder / "gsm8k_train.jsonl", [{"not": "read"}])
    write_jsonl(folder / "HumanEval.jsonl.gz", map(humaneval_row, made))
    return str(folder)
