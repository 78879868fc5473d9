#!/usr/bin/env bash
# Title: lm-eval takes a numeric answer for the index of a choice if the task says "{{answer}}" instead of answer.
# Packages: lm-eval==0.4.13 datasets==5.2.0
# Guess: doc_to_target: answer and doc_to_target: "{{answer}}" name the same column, so they give the same gold answer.
# Seen: with choices "1", "2", "3", "4" and the answer as text, the bare name is looked up among the choices (right),
#   while a rendered template of digits becomes an integer and counts as an index from 0: the gold answer of "1" is
#   "2". A model that always knows gets 1.0 with the bare name and 0.0 with braces; one that always says one more gets
#   0.75 (the answer "4" has no choice behind it). The few-shot examples hold the wrong answers, too; 2026-11-28,
#   Python 3.11, Linux, CPU.
# Costs: a score near or below chance for a good model on any task with small numbers as choices, without an error:
#   a warning comes only for answers beyond the last choice. Letters or words as choices are right both ways.
# Tandem: hands task files to the harness as they are (lm_eval:, docs/evals.md), so one's own files meet this there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 datasets==5.2.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home" TQDM_DISABLE=1
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import json

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

TASKS = TaskManager(include_defaults=False)  # without looking through the files of all public tasks

DIGITS, WORDS = ["1", "2", "3", "4"], ["one", "two", "three", "four"]
for name, choices in (("digits", DIGITS), ("words", WORDS)):
    with open(f"{name}.jsonl", "w") as file:
        for i in range(8):
            row = {"question": f"1 + {i % 4} =", "choices": choices, "answer": choices[i % 4]}
            file.write(json.dumps(row) + "\n")


class Calculator(LM):
    """Adds up; `off` is added to every result."""

    def __init__(self, choices, off):
        super().__init__()
        self.choices, self.off = choices, off

    def loglikelihood(self, requests):
        scores = []
        for request in requests:
            prompt, answer = request.args
            right = int(prompt.rsplit("+", 1)[-1].removesuffix("=")) + self.off
            scores.append((0.0 if self.choices.index(answer.strip()) == right else -1.0, False))
        return scores

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


def evaluate(name, target, off=0):
    """Return the accuracy and the first few-shot example that a prompt shows."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"rows": f"{name}.jsonl"}},
        "test_split": "rows",
        "fewshot_split": "rows",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 1,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": target,
        "metric_list": [{"metric": "acc"}],
    }
    model = Calculator(DIGITS if name == "digits" else WORDS, off)
    result = lm_eval.simple_evaluate(model, tasks=[task], task_manager=TASKS, bootstrap_iters=0, log_samples=True)
    example = result["samples"][name][1]["arguments"][0][0].split("\n\n")[0]
    return result["results"][name]["acc,none"], example


bare, braces = evaluate("digits", "answer"), evaluate("digits", "{{answer}}")
one_more = evaluate("digits", "{{answer}}", off=1)
print("digits, doc_to_target answer:      accuracy and example:", *bare)
print("digits, doc_to_target {{answer}}:  accuracy and example:", *braces)
print("the same, a model that says one more than it should:", one_more[0])
words = evaluate("words", "answer"), evaluate("words", "{{answer}}")
print("words, both ways:                  accuracy and example:", *words[0], *words[1])
assert bare == (1.0, "1 + 0 = 1"), "no longer holds: the bare name is an index as well"
assert braces == (0.0, "1 + 0 = 2") and one_more[0] == 0.75, "no longer holds: the template is taken as text"
assert words == ((1.0, "1 + 0 = one"),) * 2, "no longer holds: words are not right both ways"
PROGRAM
