"""What a console log says before its first step, and the tokens of a step where it does not say them."""

import json
import math
import re
from typing import Any

from pipeline.report.imports.imported_run import Log

COUNT = r"([\d,]+)"
DEVICE = re.compile(r"GPU: (.+?) \| Peak FLOPS")
DTYPE = re.compile(r"COMPUTE_DTYPE: (?:torch\.)?(\w+)")
OURS = re.compile(
    r"shape: device (?P<device>.+?), processes (?P<processes>\d+), .*?dtype (?P<dtype>\w+), compiled (?P<compiled>\w+), attention (?P<attention>\w+)"
)
FLOPS = re.compile(r"Estimated FLOPs per token: ([\d.]+e[+-]?\d+)")
VOCABULARY = re.compile(rf"Vocab size: {COUNT}")
BATCH = re.compile(rf"Total batch size {COUNT}")
OF_A_RANK = re.compile(rf"Tokens / micro-batch / rank: {COUNT} x {COUNT} = {COUNT}")
OF_ALL_RANKS = re.compile(rf"Tokens / micro-batch: {COUNT}")
# The model's sizes, as the newer logs (JSON) and the older ones (a line each) name them.
SIZES = {
    "n_layer": r'(?:"n_layer"|num_layers): (\d+)',
    "n_embd": r'(?:"n_embd"|model_dim): (\d+)',
    "n_head": r'(?:"n_head"|num_heads): (\d+)',
    "n_kv_head": r'(?:"n_kv_head"|num_kv_heads): (\d+)',
}
WINDOWS = re.compile(r'"window_pattern": ("\w+")')


def read_head(lines: list[str], log: Log) -> Log:
    """The log with what those lines tell of device, model, batch and tokenizer."""
    text = "\n".join(lines)

    def count(pattern: re.Pattern[str], group: int = 1) -> int | None:
        found = pattern.search(text)
        return int(found[group].replace(",", "")) if found else None

    model: dict[str, Any] = {
        name: int(found[1]) for name, pattern in SIZES.items() if (found := re.search(pattern, text))
    }
    if found := WINDOWS.search(text):
        model["options"] = {"window_pattern": json.loads(found[1])}
    log.recipe = {"model": model} if model else {}
    for section, name, value in (
        ("tokenizer", "vocab_size", count(VOCABULARY)),
        ("data", "row_tokens", count(OF_A_RANK, 2)),
        ("train", "per_device_train_batch_size", count(OF_A_RANK)),
    ):
        if value is not None:
            log.recipe.setdefault(section, {})[name] = value
    if batch := count(BATCH):
        log.inputs["batch_tokens"] = batch
    for name, pattern in (("device", DEVICE), ("dtype", DTYPE)):
        if found := pattern.search(text):
            log.shape[name] = found[1]
    one, all_ranks = count(OF_A_RANK, 3), count(OF_ALL_RANKS)
    if one and all_ranks:
        log.shape["processes"] = all_ranks // one
    if found := FLOPS.search(text):
        log.flops_per_token = float(found[1])
    if found := OURS.search(text):
        log.program = "tandem"
        log.shape |= found.groupdict() | {
            "processes": int(found["processes"]),
            "compiled": found["compiled"] == "True",
        }
    return log


def batch_tokens_of(rows: list[dict[str, Any]]) -> int | None:
    """Tokens of a step, where times (rounded to 0.01 ms) and rates (cut to whole tokens/s) leave one number possible."""
    timed = [
        (row["perf/step_s"], row["perf/tok_per_s"]) for row in rows if {"perf/step_s", "perf/tok_per_s"} <= row.keys()
    ]
    if not timed:
        return None
    half = 5.001e-6
    least = max(math.ceil(rate * (step_s - half)) for step_s, rate in timed)
    most = min(math.floor((rate + 1) * (step_s + half)) for step_s, rate in timed)
    return least if least == most else None
