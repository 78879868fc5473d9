"""CORE by this project's evaluator and by nanochat's own, on the same model and items, in turns.

    python benchmarks/core_against_nanochat.py --nanochat ~/nanochat --model runs/mine/model --bundle eval_bundle --max-per-task 10

nanochat's public code is imported from its checkout and given the model through an adapter: its tokens are this tokenizer's, its
logits this model's. Long prompts are cropped as it crops them unless --long-prompts says otherwise. Prints the ratio of the wall
times, the tokens that the model embeds, the peak memory of each way in a process of its own, and every item that the
two answer differently.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from common import DEVICE
from transformers import AutoTokenizer

from pipeline.evals.core import score_core
from pipeline.evals.core_bundle import open_bundle
from pipeline.hardware.processor import keep_freed_memory
from pipeline.hardware.rates import set_threads
from pipeline.model.load import load_model


class ItsTokenizer:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def get_bos_token_id(self) -> int:
        tokenizer = self.tokenizer
        return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
        return [[prepend, *self.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]


class ItsModel:
    def __init__(self, model):
        self.model, self.max_seq_len = model, model.config.max_position_embeddings

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits.float()


def theirs(options: argparse.Namespace, model, tokenizer) -> dict:
    sys.path.insert(0, str(options.nanochat))
    from nanochat.core_eval import evaluate_example

    folder, its_model = options.bundle, ItsModel(model)
    answers = {}
    for task in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"]:
        items = [json.loads(line) for line in (folder / "eval_data" / task["dataset_uri"]).read_text().splitlines()]
        random.Random(1337).shuffle(items)
        items = items[: options.max_per_task]
        about = {
            "task_type": task["icl_task_type"],
            "num_fewshot": task["num_fewshot"][0],
            "continuation_delimiter": task.get("continuation_delimiter", " "),
        }
        its_tokenizer = ItsTokenizer(tokenizer)
        answers[task["label"]] = [
            bool(evaluate_example(number, its_model, its_tokenizer, items, DEVICE, about))
            for number in range(len(items))
        ]
    return {"answers": answers}


def ours(options: argparse.Namespace, model, tokenizer) -> dict:
    score = score_core(
        open_bundle(str(options.bundle)),
        model,
        tokenizer,
        device=DEVICE,
        max_per_task=options.max_per_task,
        long_prompts=options.long_prompts,
    )
    answers = {scored.task.name: scored.correct.tolist() for scored in score.tasks}
    return {"answers": answers}


def one_way(options: argparse.Namespace) -> None:
    """Scores in this process; prints time, memory and answers as JSON."""
    set_threads(1)
    keep_freed_memory()
    model = load_model(options.model).to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    forwarded = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: forwarded.append(given[0].numel()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    found = {"ours": ours, "theirs": theirs}[options.way](options, model, tokenizer)
    found["seconds"] = time.perf_counter() - started
    found["forwarded"] = sum(forwarded)
    found["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found["loaded_gib"] = before / 2**20
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, required=True, help="a checkout of karpathy/nanochat")
    parser.add_argument("--model", required=True, help="a folder with a model and its tokenizer")
    parser.add_argument("--bundle", type=Path, required=True, help="the eval_bundle, unpacked, with its core.yaml")
    parser.add_argument("--max-per-task", type=int, default=24)
    parser.add_argument("--long-prompts", choices=("crop", "fewer_shots"), default="crop")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--way", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one_way(options)
        return
    for pair in range(options.pairs):
        results = {}
        for way in ("ours", "theirs") if pair % 2 == 0 else ("theirs", "ours"):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            results[way] = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
            )
        mine, its = results["ours"], results["theirs"]
        for way, found in results.items():
            print(
                f"{way:<6} {found['seconds']:8.1f} s  {found['forwarded']:>12,} tokens forwarded  "
                f"peak {found['peak_gib']:.2f} GiB, {found['loaded_gib']:.2f} of it before the first item"
            )
        print(f"ratio of times {mine['seconds'] / its['seconds']:.3f}")
        items = sum(map(len, its["answers"].values()))
        different = {
            task: [n for n, pair_ in enumerate(zip(found, mine["answers"][task], strict=True)) if len(set(pair_)) > 1]
            for task, found in its["answers"].items()
        }
        print(f"{items:,} items, answered differently: { {t: n for t, n in different.items() if n} or 'none' }")


if __name__ == "__main__":
    main()
