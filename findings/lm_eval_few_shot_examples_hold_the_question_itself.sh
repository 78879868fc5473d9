#!/usr/bin/env bash
# Title: lm-eval puts a question with its answer among its own few-shot examples unless the split is called test_split.
# Packages: lm-eval==0.4.13 datasets==5.2.0
# Guess: with fewshot_split equal to the split that is evaluated, the evaluated row is left out of its own examples.
# Seen: only where fewshot_split equals test_split. A task with validation_split: rows and fewshot_split: rows, or with
#   test_split alone (no fewshot_split), draws the row itself: 8 of 20 prompts (5 shots) hold their own answer, so a
#   "model" that can only copy an answer it sees rises from 0 to 0.4. The same file with test_split and
#   fewshot_split both named, or with validation_split alone, never does; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: the fewer rows and the more shots, the higher the score: small private task files (one split of own questions)
#   measure copying, and a comparison of 0 and 5 shots shows a gain that is not there. No warning in the first case.
# Tandem: its own CORE leaves the item out; `lm_eval:` names such a task (pipeline/evals/harness.py).
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

ROWS = 20
with open("rows.jsonl", "w") as file:
    for i in range(ROWS):
        file.write(json.dumps({"question": f"Code of item {i}0:", "choices": ["left", "right"], "answer": 1}) + "\n")


class Copier(LM):
    """Knows nothing: it prefers an answer only if the same question stands answered earlier in its prompt."""

    def loglikelihood(self, requests):
        scores = []
        for request in requests:
            prompt, answer = request.args
            question = prompt.rsplit("\n\n", 1)[-1]
            seen = f"{question}{answer}\n\n" in prompt
            scores.append((0.0 if seen else -1.0, False))
        return scores  # equal scores: the first choice is taken, which is always wrong here

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


def score(**splits):
    """Return how many prompts hold their own question answered, and the accuracy of the copier."""
    names = {name for key, name in splits.items()}
    task = {
        "task": "codes",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {name: "rows.jsonl" for name in names}},
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "num_fewshot": 5,
        "metric_list": [{"metric": "acc"}],
        **splits,
    }
    result = lm_eval.simple_evaluate(Copier(), tasks=[task], task_manager=TASKS, bootstrap_iters=0, log_samples=True)
    own = 0
    for sample in result["samples"]["codes"]:
        prompt = sample["arguments"][0][0]
        own += prompt.count(sample["doc"]["question"]) > 1
    return own, round(result["results"]["codes"]["acc,none"], 4)


validation_twice = score(validation_split="rows", fewshot_split="rows")
test_only = score(test_split="rows")
test_twice = score(test_split="rows", fewshot_split="rows")
validation_only = score(validation_split="rows")
print("validation_split and fewshot_split: own question in the prompt, accuracy:", *validation_twice)
print("test_split alone:                   own question in the prompt, accuracy:", *test_only)
print("test_split and fewshot_split:       own question in the prompt, accuracy:", *test_twice)
print("validation_split alone:             own question in the prompt, accuracy:", *validation_only)
for own, accuracy in (validation_twice, test_only):
    assert own > 0 and abs(accuracy - own / ROWS) < 1e-3, "no longer holds: the row is left out of its examples"
assert test_twice == (0, 0.0) and validation_only == (0, 0.0), "no longer holds: the control has the leak as well"
PROGRAM
