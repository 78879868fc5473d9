"""Contamination of benchmarks: which items are in what was trained on."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pipeline.model.build  # noqa: F401 - transformers warns of a tokenizer beside a model that it does not know
from pipeline.data.decontamination import Matches, Watchlist, flags_of, id_of_file, without_contaminated
from pipeline.data.prepare import prepare_now
from pipeline.evals.chat_tasks import ChatItem, LoadedTask
from pipeline.evals.core_bundle import TASKS, Bundle, CoreTask
from pipeline.evals.subject import find_subject
from pipeline.process.errors import DataError, InputMissingError, TandemError
from pipeline.process.storage import cache_dir, cache_of_run, file_lock, read_json, write_json
from pipeline.process.user_code import COMMAND_TRUST, CodeFolder
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.parents import parents_of
from pipeline.recipe.schema import with_values
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.open import open_sources, with_recorded_inputs
from pipeline.tokenizer.load import open_tokenizer

# What a run read, found again from its own files.


def own_sources(run: RunDirectory, *, trust_code: bool = False) -> tuple[Recipe, tuple[list[Any], list[Any]]]:
    """Return the run's recipe, and its (training, validation) sources; Hub datasets at the commits, and the
    files held out, that it began with.

    trust_code: whether a format that the recipe names as module:attr is run; nobody named this recipe, and it may be
    somebody else's. Raises what the recipe and the sources raise when something is no longer there.
    """
    recipe = read_recipe([str(run.recipe)], stage=None)
    why = f"{run.recipe} belongs to a run, which may have come from elsewhere"
    folder = recipe.run.code_folder if trust_code else None
    code = CodeFolder(folder, trusted=trust_code, trust_with=COMMAND_TRUST, closed=why)
    recipe = with_values(recipe, {"code": code, "data.cache_dir": str(cache_of_run(recipe.data.cache_dir))})
    recipe = with_recorded_inputs(recipe, run.read_manifest().get("inputs") or {})
    return recipe, open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")


# What is looked for in training text: each evaluation item as its question and right answer, without examples or
# wording.


def core_texts(task: CoreTask, items: list[dict]) -> list[str]:
    """Return the text of each item, in the order given: the question and the right option, or the text and how it goes
    on."""
    return [_core_text(task, item) for item in items]


def _core_text(task: CoreTask, item: dict) -> str:
    if task.kind == "multiple_choice":
        # The bundle's wording, without which a short question could only be found where somebody copied the file.
        return f"{item['query'].removeprefix('Question: ')} {item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]} {item['continuation']}"
    return f"{item['context']} {item['continuation']}"


def chat_texts(loaded: LoadedTask) -> list[str]:
    """Return the text of each of the task's items, in their order: the question and the right answer, of letters the
    choice's text."""
    return [_chat_text(item) for item in loaded.items]


def _chat_text(item: ChatItem) -> str:
    if item.letters:
        return f"{item.row['question']} {item.row['choice']}"
    asked = "\n".join(message.get("content") or "" for message in item.messages)
    # A program's answer begins with what was asked.
    return item.answer if item.answer.startswith(asked) else f"{asked}\n{item.answer}"


def watched_bundle(bundle: Bundle) -> dict[str, list[str]]:
    """Return the texts of every item of every task that the bundle has, in the order of its file, by the name of the
    metric."""
    scored = [task for task in TASKS if task.name not in bundle.missing]
    return {f"core/{task.name}": core_texts(task, bundle.items[task.file]) for task in scored}


def watched_chat(tasks: list[LoadedTask]) -> dict[str, list[str]]:
    """Return the texts of every item of every task, in the order of asking, by the name of the metric."""
    return {f"chat/{loaded.task.name}": chat_texts(loaded) for loaded in tasks}


def watched_tasks(benchmarks: list[Any]) -> dict[str, list[str]]:
    """Return the texts of all items of all benchmarks, by the name of the task's metric."""
    return {name: texts for benchmark in benchmarks for name, texts in benchmark.watched_texts().items()}


def save_watchlist(benchmarks: list[Any], *, cache: Path) -> Path:
    """Return the file of what a run's training text is searched for."""
    return Watchlist.of(watched_tasks(benchmarks)).save(cache / "watchlists")


def unchecked_text(plan: dict) -> tuple[int, int]:
    """Return (shards of the training text that nobody has searched, all of them)."""
    matches = Matches.by_run(plan, id_of_file(plan["watchlist"]))
    return matches.unchecked, matches.shards


# report/contamination.json: which evaluation items are in a run's training text; and the scores without them.

Findings = dict[str, Any]  # as Matches.findings gives them


def record_findings(run: RunDirectory, plan: dict, benchmarks: list[Any]) -> Findings | None:
    """Write down what the run's training text, as far as it is prepared, holds of the benchmarks' items; for one rank.

    None when the text is not searched for them, and when that is unknown: the reason is printed, the run goes on.
    """
    if not plan["watchlist"]:
        return None
    try:
        matches = Matches.by_run(plan, id_of_file(plan["watchlist"]))
        parents, absent = parents_of(run)
        not_searched = [*(parent.name for parent in parents), *absent]  # its own text alone passes by here
        return keep_findings(
            run, matches.findings(watched_tasks(benchmarks), text_of=[run.name], not_searched=not_searched)
        )
    except Exception as error:  # whatever it is, it must not end a training
        print(
            f"contamination: which items are in the training text is unknown ({type(error).__name__}: {error}); the "
            "training goes on",
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
    """Return what the run wrote down, None when it did not or there is no run."""
    return read_json(run.contamination) if run is not None and run.contamination.exists() else None


def clean_score(found: dict[str, Any], correct: Sequence[float], flags: Sequence[bool | None]) -> dict[str, Any]:
    """Return, for a task's row, counts, its score with and without contaminated items, and whose text was not looked
    through.

    found: of the task, by the findings. correct: of the items scored. flags: of the same items and in the same order,
    more may follow.
    """
    return without_contaminated(correct, flags[: len(correct)]) | {
        "shards": found["shards"],
        "unchecked_shards": found["unchecked"],
        "text_of": found["text_of"],
        "not_searched": found["not_searched"],
    }


def clean_scores(
    findings: Findings | None,
    scored: Iterable[tuple[str, list[str], Sequence[float]]],
    *,
    in_order: Callable[[list], list] = list,
) -> dict[str, dict[str, Any]]:
    """Return the clean_score of each task that was searched for, by its name.

    scored: of each task the name of its metric, the texts of all its items, and whether those scored were answered
    rightly. in_order: brings what is known of all items into the order in which they were scored.
    """
    found: dict[str, dict[str, Any]] = {}
    if not findings:
        return found
    for name, texts, correct in scored:
        if (flags := flags_of(findings, name, texts)) is not None:
            found[name.partition("/")[2]] = clean_score(findings["tasks"][name], correct, in_order(flags))
    return found


def clean_mean(
    accuracies: dict[str, float], cleaned: dict[str, dict[str, Any]], centred: Callable[[str, float], float]
) -> dict[str, Any] | None:
    """Return, for the row of a mean, counts over the tasks, and the mean of the centred scores without contaminated
    items.

    accuracies: by task of the mean. cleaned: the clean_score of tasks that were looked for. centred: of a task and its
    accuracy. A task that has no clean item is left out and named; one that nobody looked for counts as it is and is
    named too. None when that is all of them.
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
    """Return what a row of evals.json has more when its items were looked for."""
    return {} if found is None else {"contamination": found}


def contamination_line(results: list[dict[str, Any]]) -> str:
    """Return what the rows for evals.json say of contamination, for the terminal. results: of a run."""
    found = [row for row in results if "contamination" in row]
    tasks = [row["contamination"] for row in found if "left_out" not in row["contamination"]]
    if not tasks:
        return (
            "contamination: nobody looked for these items in the training text of this run; --search-text reads it "
            "and looks"
        )
    items, unjudged, contaminated = (sum(one[c] for one in tasks) for c in ("items", "unjudged", "contaminated"))
    line = (
        f"contamination: {contaminated:,} of {items:,} scored items stand in the training text ({unjudged:,} cannot "
        "be judged)"
    )
    without = [
        f"{row['name']} {row['contamination']['score_without']:.6f}"
        for row in found
        if row["contamination"] not in tasks and row["contamination"]["score_without"] is not None
    ]
    if without:
        line += f"; without them {', '.join(without)}"
    return line + "".join(f"; {part}" for part in search_notes(tasks))


def search_notes(tasks: list[dict[str, Any]]) -> list[str]:
    """Return whose text was searched and whose not. tasks: of the rows of several tasks what they say of
    contamination."""
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


# `python -m pipeline.evals RUN core chat --search-text`: look for the items in text that runs trained on before.

LINE_EVERY_S = 10.0


def search_text(run: RunDirectory, tasks: dict[str, list[str]], *, trust_code: bool = False) -> Findings:
    """Look for the tasks' items in all text that the run trains on, and in that of the runs it comes from; recorded in
    report/contamination.json.

    tasks: the texts of a task's items by the name of its metric. Shards whose text was looked through for these items
    before are not read again; those that are gone are prepared again. A parent whose text cannot be read is named in
    the findings. Raises InputMissingError and DataError when the run's own text is not there or has changed.
    """
    watchlist = Watchlist.of(tasks)
    matches, text_of = [_seen(run, watchlist, trust_code=trust_code)], {run.path.resolve(): run.name}
    parents, not_searched = parents_of(run)
    while parents:
        parent = parents.pop(0)
        if parent.path.resolve() in text_of:
            continue
        try:
            further, absent = parents_of(parent)
            parents += further
            not_searched += absent
            matches.append(_seen(parent, watchlist, trust_code=trust_code))
            text_of[parent.path.resolve()] = parent.name
        except TandemError as error:
            print(f"contamination: the text of {parent.name} is not searched. {error}", file=sys.stderr, flush=True)
            not_searched.append(parent.name)
    found = Matches.together(matches).findings(tasks, text_of=list(text_of.values()), not_searched=not_searched)
    return keep_findings(run, found)


def _seen(run: RunDirectory, watchlist: Watchlist, *, trust_code: bool) -> Matches:
    """Return what the run's text holds, by its recipe and the inputs that its manifest names."""
    inputs = run.read_manifest().get("inputs") or {}
    if not (inputs and run.recipe.exists()):
        raise InputMissingError(
            f"{run.path}: what the run trained on is not recorded, so its text cannot be searched."
        )
    recipe, sources = own_sources(run, trust_code=trust_code)
    # It may follow from the number of processes, which were others.
    recipe = with_values(recipe, {"data.batch_tokens": inputs["batch_tokens"]})
    _refuse_changed(run, sources[0], inputs["sources"])
    folder = find_subject(str(run.path)).path
    tokenizer = open_tokenizer(folder, revision=None, beside=None, where=folder)
    path = watchlist.save(cache_dir(recipe.data.cache_dir) / "watchlists")
    plan = prepare_now(recipe, tokenizer, sources=sources, watchlist=path, report=_lines(run.name)).plan
    return Matches.by_run(plan, id_of_file(path))


def _refuse_changed(run: RunDirectory, sources: list[Any], recorded: list[dict[str, Any]]) -> None:
    before = {source["name"]: source["fingerprint"] for source in recorded}
    now = {source.name: source.describe()["fingerprint"] for source in sources}
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise DataError(
            f"{run.path}: the files of {', '.join(changed)} are not those that the run trained on, so searching them "
            "would tell nothing. Put them back as they were."
        )


def _lines(name: str) -> Callable[..., None]:
    """Return a function that prints a line now and then while text is read."""
    printed_at = time.monotonic()

    def report(role: str, source: int, stream: Any) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= LINE_EVERY_S:
            printed_at = time.monotonic()
            print(f"contamination: searching the text of {name}, source {source + 1}", file=sys.stderr, flush=True)

    return report
