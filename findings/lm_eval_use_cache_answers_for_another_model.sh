#!/usr/bin/env bash
# Title: lm-eval's two caches answer for another model, other rows and other few-shot seeds without a word.
# Packages: lm-eval==0.4.13 datasets==5.2.0
# Guess: what is kept under use_cache belongs to the model, and what cache_requests keeps to the task, rows and seed.
# Seen: the first key is the request's text alone, the second the task's name, number of shots and tokenizer name.
#   A second checkpoint evaluated with the same use_cache path is never called and gets the first one's accuracy
#   (1.0 for one that knows nothing). With cache_requests=True, three few-shot seeds give one and the same set of
#   prompts, and rows.jsonl with other rows gives the questions of the old file; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a loop over checkpoints that passes one cache path draws a flat line; the spread over seeds is zero; a mended
#   task file shows no change. Only an info line ("Loading ... from cache ... where possible") tells.
# Tandem: calls the harness without either cache (pipeline/evals/harness.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 datasets==5.2.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home" TQDM_DISABLE=1 LM_HARNESS_CACHE_PATH="$folder/requests"
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import json

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

TASKS = TaskManager(include_defaults=False)  # without looking through the files of all public tasks


def write(path, word):
    with open(path, "w") as file:
        for i in range(5):
            file.write(json.dumps({"question": f"{word} {i}:", "choices": ["no", "yes"], "answer": 1}) + "\n")


class Checkpoint(LM):
    """Always prefers one answer, and counts what it is asked."""

    def __init__(self, prefers):
        super().__init__()
        self.prefers, self.asked, self.prompts = prefers, 0, []

    def loglikelihood(self, requests):
        self.asked += len(requests)
        self.prompts = [request.args[0] for request in requests]
        return [(float(request.args[1].strip() == self.prefers), False) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


def evaluate(model, path, shots=0, **settings):
    task = {
        "task": "yes_or_no",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"rows": path}},
        "test_split": "rows",
        "fewshot_split": "rows",
        "num_fewshot": shots,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    result = lm_eval.simple_evaluate(model, tasks=[task], task_manager=TASKS, bootstrap_iters=0, **settings)
    return result["results"]["yes_or_no"]["acc,none"]


write("rows.jsonl", "Apple")
good, bad = Checkpoint("yes"), Checkpoint("no")
alone = evaluate(bad, "rows.jsonl")
bad.asked = 0
first, second = evaluate(good, "rows.jsonl", use_cache="answers"), evaluate(bad, "rows.jsonl", use_cache="answers")
print("accuracy of the second checkpoint without a cache:", alone)
print("accuracy of both with one use_cache path:", first, second)
print("requests that the second one answered:", bad.asked)
assert (alone, first, second, bad.asked) == (0.0, 1.0, 1.0, 0), "no longer holds: the cache belongs to a model"


def prompts(path, **settings):
    model = Checkpoint("yes")
    evaluate(model, path, shots=3, **settings)
    return tuple(model.prompts)


seeds = (1, 2, 3)
cached = {prompts("rows.jsonl", cache_requests=True, fewshot_random_seed=seed) for seed in seeds}
fresh = {prompts("rows.jsonl", fewshot_random_seed=seed) for seed in seeds}
print("different sets of prompts of 3 seeds, with cache_requests and without:", len(cached), len(fresh))
write("other.jsonl", "Pear")
old = sum("Apple" in prompt for prompt in prompts("other.jsonl", cache_requests=True))
new = sum("Apple" in prompt for prompt in prompts("other.jsonl"))
print("prompts about the old rows, with cache_requests and without:", old, new)
assert (len(cached), len(fresh)) == (1, 3), "no longer holds: the seed belongs to the key"
assert (old, new) == (10, 0), "no longer holds: the rows belong to the key"
PROGRAM
