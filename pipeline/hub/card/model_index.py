"""The model's results as the Hub's index reads them: one entry for each protocol, its figures unrounded."""

from typing import Any

from pipeline.evals.chat.tasks import BUILT_IN
from pipeline.hub.card.benchmarks import benchmarks_of_model
from pipeline.hub.card.bpb import bpb_of_model
from pipeline.hub.card.published import Published
from pipeline.report.benchmark_rows import Benchmark, task_name
from pipeline.report.run_data import Score

SUITES = {"core": "tasks of CORE", "chat": "chat task", "lm_eval": "lm-evaluation-harness"}


def model_index(card: Published) -> list[dict[str, Any]]:
    """Results of metadata's model-index. Two of one protocol are one entry, so that no reader takes them for each other's."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for dataset, metric in [*map(_bpb, bpb_of_model(card)), *_benchmarks(card)]:
        task = {"type": "text-generation", "name": "Text generation"}
        entry = found.setdefault(tuple(dataset.values()), {"task": task, "dataset": dataset, "metrics": []})
        entry["metrics"].append(metric)
    return list(found.values())


def _bpb(score: Score) -> tuple[dict[str, str], dict[str, Any]]:
    dataset = {"type": "text", "name": f"held-out text, protocol {score.protocol}", "config": str(score.protocol)}
    return dataset, {"type": "bits_per_byte", "name": score.name, "value": score.value, "verified": False}


def _benchmarks(card: Published) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [
        (_dataset(benchmark, row), _metric(benchmark, row))
        for benchmark in benchmarks_of_model(card)
        for row in [*benchmark.means, *benchmark.tasks]
    ]


def _dataset(benchmark: Benchmark, row: dict[str, Any]) -> dict[str, str]:
    """As the Hub knows it where it came from there. The protocol, which tells two figures apart, is the configuration."""
    known = BUILT_IN.get(task_name(row)) if benchmark.suite == "chat" else None
    from_hub = known is not None and row.get("revision") is not None
    return {
        "type": str(known.source.id) if known and from_hub else benchmark.suite,
        "name": f"{SUITES[benchmark.suite]}, protocol {row['protocol']}",
        "config": str(row["protocol"]),
    } | ({"split": known.source.split, "revision": row["revision"]} if known and from_hub else {})


def _metric(benchmark: Benchmark, row: dict[str, Any]) -> dict[str, Any]:
    metric = {"type": _type(benchmark, row), "name": row["name"], "value": row["value"]}
    args = {key: row[key] for key in ("low", "high", "stderr") if row.get(key) is not None}
    return metric | ({"args": args} if args else {}) | {"verified": False}


def _type(benchmark: Benchmark, row: dict[str, Any]) -> str:
    if any(row is mean for mean in benchmark.means):
        return "centred_accuracy"
    return task_name(row).partition("/")[2] or "accuracy" if benchmark.suite == "lm_eval" else "accuracy"
