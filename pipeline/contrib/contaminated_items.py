"""Contamination of benchmarks: which of their items are in the text that a run trained on."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.contrib.decontamination import Matches, Texts, Watchlist, flags_of, id_of_file, without_contaminated
from pipeline.evals.chat_tasks import ChatItem, LoadedTask
from pipeline.evals.core_bundle import TASKS, Bundle, CoreTask
from pipeline.process.storage import file_lock, read_json, write_json
from pipeline.run_dir.parents import parents_of
from pipeline.run_dir.run_directory import RunDirectory

Findings = dict[str, Any]  # as Matches.findings gives them: report/contamination.json


def texts_of_bundle(bundle: Bundle) -> Texts:
    """Return the question and right answer of every item, in the order of its file, by the name of the metric."""
    texts = {}
    for task in TASKS:
        if task.name not in bundle.missing:
            texts[f"core/{task.name}"] = [_core_text(task, item) for item in bundle.items[task.file]]
    return texts


def _core_text(task: CoreTask, item: dict) -> str:
    if task.kind == "multiple_choice":
        # Without the bundle's wording, with which a short question is only found in copies of the bundle's file.
        return f"{item['query'].removeprefix('Question: ')} {item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]} {item['continuation']}"
    return f"{item['context']} {item['continuation']}"


def texts_of_chat_tasks(tasks: list[LoadedTask]) -> Texts:
    """Return the question and right answer of every item, in the order of asking, by the name of the metric."""
    return {f"chat/{loaded.task.name}": list(map(_chat_text, loaded.items)) for loaded in tasks}


def _chat_text(item: ChatItem) -> str:
    if item.letters:
        return f"{item.row['question']} {item.row['choice']}"
    question = "\n".join(message.get("content") or "" for message in item.messages)
    if item.answer.startswith(question):  # a program's answer
        return item.answer
    return f"{question}\n{item.answer}"


def save_watchlist(benchmarks: list[Any], *, cache: Path) -> Path:
    """Return the file of what a run's training text is searched for."""
    return Watchlist.of(_texts_of(benchmarks)).save(cache / "watchlists")


def _texts_of(benchmarks: list[Any]) -> Texts:
    texts: Texts = {}
    for benchmark in benchmarks:
        texts |= benchmark.watched_texts()
    return texts


def unchecked_text(plan: dict) -> tuple[int, int]:
    """Return the number of shards of the training text that were not searched, and of all of them."""
    matches = Matches.by_run(plan, id_of_file(plan["watchlist"]))
    return matches.unchecked, matches.shards


def record_findings(run: RunDirectory, plan: dict, benchmarks: list[Any]) -> Findings | None:
    """Write which items are in the run's training text, as far as it is prepared; for one rank.

    None when the text is not searched for them, and when that is unknown: the reason is printed, training continues.
    """
    if not plan["watchlist"]:
        return None
    try:
        matches = Matches.by_run(plan, id_of_file(plan["watchlist"]))
        parents, absent = parents_of(run)
        not_searched = [*(parent.name for parent in parents), *absent]
        found = matches.findings(_texts_of(benchmarks), text_of=[run.name], not_searched=not_searched)
        return keep_findings(run, found)
    except Exception as error:  # whatever it is, it must not end a training
        print(
            f"contamination: which items are in the training text is unknown ({type(error).__name__}: {error}); the "
            "training goes on",
            file=sys.stderr,
            flush=True,
        )
        return None


def keep_findings(run: RunDirectory, findings: Findings) -> Findings:
    """Write the findings in place of earlier ones of the same tasks; return all that is known of the run."""
    with file_lock(run.contamination.with_name(".contamination.lock")):  # two evaluations may end at the same time
        before = findings_of(run) or {"tasks": {}}
        kept = {"tasks": before["tasks"] | findings["tasks"]}
        write_json(run.contamination, kept)
    return kept


def findings_of(run: RunDirectory) -> Findings | None:
    """Return what the run recorded, None where its text was not searched."""
    return read_json(run.contamination) if run.contamination.exists() else None


def add_clean_scores(
    rows: list[dict[str, Any]],
    findings: Findings,
    texts: Texts,
    correct: Mapping[str, Sequence[float]],
    *,
    in_order: Callable[[list], list] = list,
) -> None:
    """Add `contamination` to the row of each task that was searched for: counts, and its score with and without them.

    texts: of all items of a task. correct: of the items scored, the first ones of in_order.
    """
    for row in rows:
        name = row["name"]
        if name not in correct:
            continue
        flags = flags_of(findings, name, texts[name])
        if flags is None:
            continue
        found, scored = findings["tasks"][name], correct[name]
        row["contamination"] = without_contaminated(scored, in_order(flags)[: len(scored)]) | {
            "shards": found["shards"],
            "unchecked_shards": found["unchecked"],
            "text_of": found["text_of"],
            "not_searched": found["not_searched"],
        }


def contamination_line(results: list[dict[str, Any]]) -> str:
    """Return what the rows for evals.json say of contamination, for the terminal."""
    tasks = [row["contamination"] for row in results if "contamination" in row]
    if not tasks:
        return "contamination: the training text of this run was not searched for these items"
    counts: Counter[str] = Counter()
    for task in tasks:
        counts.update({name: task[name] for name in ("items", "unjudged", "contaminated")})
    line = (
        f"contamination: {counts['contaminated']:,} of {counts['items']:,} scored items are in the training text "
        f"({counts['unjudged']:,} cannot be judged)"
    )
    most = max(tasks, key=lambda found: found["unchecked_shards"])
    if most["unchecked_shards"]:
        line += f"; {most['unchecked_shards']:,} of {most['shards']:,} shards were not searched"
    missing = dict.fromkeys(chain.from_iterable(found["not_searched"] for found in tasks))
    if missing:
        line += f"; not searched: the text of {', '.join(missing)}, which this model comes from"
    return line
