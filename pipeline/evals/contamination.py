"""report/contamination.json: which evaluation items stand in a run's training text; and the scores without them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.artifacts.atomic import read_json, write_json
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.data.contamination import Seen, flags_of, without_contaminated
from pipeline.data.watchlist import id_of_file
from pipeline.evals.watched import watched_tasks

Findings = dict[str, Any]  # as Seen.findings gives them


def record_findings(run: RunDirectory, plan: dict, benchmarks: list[Any]) -> Findings | None:
    """Write down what the run's training text, as far as it is prepared, holds of the benchmarks' items; for one rank.

    None when the text is not searched for them, and when that cannot be told: the reason is printed, the run goes on.
    """
    if not plan["watchlist"]:
        return None
    try:
        findings = Seen.by_run(plan, id_of_file(plan["watchlist"])).findings(watched_tasks(benchmarks))
        write_json(run.contamination, findings)
    except Exception as error:  # whatever it is, it must not end a training
        print(
            f"contamination: which items stand in the training text cannot be told ({type(error).__name__}: {error}); the training goes on",
            file=sys.stderr,
            flush=True,
        )
        return None
    return findings


def findings_of(run: RunDirectory | None) -> Findings | None:
    """What the run wrote down, None when it did not or there is no run."""
    return read_json(run.contamination) if run is not None and run.contamination.exists() else None


def item_flags(findings: Findings | None, task: str, texts: list[str]) -> list[bool | None] | None:
    """For each item whether it was trained on, None for one that cannot be judged; None when nobody looked for these items."""
    return None if findings is None else flags_of(findings, task, texts)


def clean_score(findings: Findings, correct: Sequence[float], flags: Sequence[bool | None]) -> dict[str, Any]:
    """For a task's row: counts, its score with and without contaminated items, and at how many shards nobody looked.

    correct: of the items scored. flags: of the same items and in the same order, more may follow.
    """
    found = without_contaminated(correct, flags[: len(correct)])
    return found | {"shards": findings["shards"], "unchecked_shards": findings["unchecked"]}


def clean_mean(
    accuracies: dict[str, float], cleaned: dict[str, dict[str, Any]], centred: Callable[[str, float], float]
) -> dict[str, Any] | None:
    """For the row of a mean: counts over the tasks, and the mean of the centred scores without contaminated items.

    accuracies: by task of the mean. cleaned: the clean_score of tasks that were looked for. centred: of a task and its accuracy. A task
    that has no clean item is left out and named; one that nobody looked for counts as it is and is named too. None when
    that is all of them.
    """
    cleaned = {name: found for name, found in cleaned.items() if name in accuracies}
    if not cleaned:
        return None
    scores = {
        name: cleaned[name]["score_without"] if name in cleaned else of_all for name, of_all in accuracies.items()
    }
    kept = [centred(name, score) for name, score in scores.items() if score is not None]
    return {
        **{count: sum(found[count] for found in cleaned.values()) for count in ("items", "unjudged", "contaminated")},
        "score_without": sum(kept) / len(kept) if kept else None,
        "left_out": [name for name, score in scores.items() if score is None],
        "not_looked_for": [name for name in accuracies if name not in cleaned],
    }


def contamination_of(found: dict[str, Any] | None) -> dict[str, Any]:
    """What a row of evals.json has more when its items were looked for."""
    return {} if found is None else {"contamination": found}


def contamination_line(results: list[dict[str, Any]]) -> str:
    """What the rows for evals.json say of contamination, for the terminal. results: of a run."""
    found = [row for row in results if "contamination" in row]
    tasks = [row["contamination"] for row in found if "left_out" not in row["contamination"]]
    if not tasks:
        return "contamination: nobody looked for these items in the training text of this run"
    items, unjudged, contaminated = (sum(one[c] for one in tasks) for c in ("items", "unjudged", "contaminated"))
    line = f"contamination: {contaminated:,} of {items:,} scored items stand in the training text ({unjudged:,} cannot be judged)"
    without = [
        f"{row['name']} {row['contamination']['score_without']:.6f}"
        for row in found
        if row["contamination"] not in tasks and row["contamination"]["score_without"] is not None
    ]
    if without:
        line += f"; without them {', '.join(without)}"
    if unchecked := tasks[0]["unchecked_shards"]:
        line += f"; at {unchecked:,} of {tasks[0]['shards']:,} shards nobody looked"
    return line
