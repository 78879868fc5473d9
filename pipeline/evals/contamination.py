"""report/contamination.json: which evaluation items stand in a run's training text; and the scores without them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.artifacts.atomic import read_json, write_json
from pipeline.artifacts.locks import file_lock
from pipeline.artifacts.parents import parents_of
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
        seen = Seen.by_run(plan, id_of_file(plan["watchlist"]))
        parents, absent = parents_of(run)
        not_searched = [*(parent.name for parent in parents), *absent]  # its own text alone passes by here
        return keep_findings(
            run, seen.findings(watched_tasks(benchmarks), text_of=[run.name], not_searched=not_searched)
        )
    except Exception as error:  # whatever it is, it must not end a training
        print(
            f"contamination: which items stand in the training text cannot be told ({type(error).__name__}: {error}); the training goes on",
            file=sys.stderr,
            flush=True,
        )
        return None


def keep_findings(run: RunDirectory, findings: Findings) -> Findings:
    """Write them down in place of what was found before for the same tasks; returns all that is known of the run."""
    with file_lock(run.contamination.with_name(".contamination.lock")):  # two evaluations may end at the same time
        before = findings_of(run)
        kept = {"tasks": {**(before["tasks"] if before else {}), **findings["tasks"]}}
        write_json(run.contamination, kept)
    return kept


def findings_of(run: RunDirectory | None) -> Findings | None:
    """What the run wrote down, None when it did not or there is no run."""
    return read_json(run.contamination) if run is not None and run.contamination.exists() else None


def item_flags(findings: Findings | None, task: str, texts: list[str]) -> list[bool | None] | None:
    """For each item whether it was trained on, None for one that cannot be judged; None when nobody looked for these items."""
    return None if findings is None else flags_of(findings, task, texts)


def clean_score(found: dict[str, Any], correct: Sequence[float], flags: Sequence[bool | None]) -> dict[str, Any]:
    """For a task's row: counts, its score with and without contaminated items, and whose text was not looked through.

    found: of the task, by the findings. correct: of the items scored. flags: of the same items and in the same order, more
    may follow.
    """
    return without_contaminated(correct, flags[: len(correct)]) | {
        "shards": found["shards"],
        "unchecked_shards": found["unchecked"],
        "text_of": found["text_of"],
        "not_searched": found["not_searched"],
    }


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
        return "contamination: nobody looked for these items in the training text of this run; --search-text reads it and looks"
    items, unjudged, contaminated = (sum(one[c] for one in tasks) for c in ("items", "unjudged", "contaminated"))
    line = f"contamination: {contaminated:,} of {items:,} scored items stand in the training text ({unjudged:,} cannot be judged)"
    without = [
        f"{row['name']} {row['contamination']['score_without']:.6f}"
        for row in found
        if row["contamination"] not in tasks and row["contamination"]["score_without"] is not None
    ]
    if without:
        line += f"; without them {', '.join(without)}"
    return line + "".join(f"; {part}" for part in search_notes(tasks))


def search_notes(tasks: list[dict[str, Any]]) -> list[str]:
    """Whose text was looked through and whose not. tasks: of the rows of several tasks what they say of contamination."""
    notes = []
    most = max(tasks, key=lambda found: found["unchecked_shards"])
    if most["unchecked_shards"]:
        notes.append(f"at {most['unchecked_shards']:,} of {most['shards']:,} shards nobody looked")
    texts = [name for name in most["text_of"] if all(name in found["text_of"] for found in tasks)]
    missing = dict.fromkeys(name for found in tasks for name in found["not_searched"])
    if len(texts) > 1:
        notes.append(f"looked through was the text of {', '.join(texts)}")
    if missing:
        notes.append(f"not looked through: that of {', '.join(missing)}, which this model comes from")
    return notes
