"""`python -m pipeline.evals RUN core chat --search-text`: look for the items in text that runs trained on before."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pipeline.model.build  # noqa: F401 - transformers warns of a tokenizer beside a model that it does not know
from pipeline.artifacts.cache import cache_dir
from pipeline.artifacts.errors import DataError, InputMissingError, TandemError
from pipeline.artifacts.parents import parents_of
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.data.contamination import Seen
from pipeline.data.prepare import prepare_now
from pipeline.data.watchlist import Watchlist, id_of_file
from pipeline.evals.contamination import Findings, keep_findings
from pipeline.evals.own_sources import own_sources
from pipeline.evals.subject import find_subject
from pipeline.tokenizer.ready import open_tokenizer

LINE_EVERY_S = 10.0


def search_text(run: RunDirectory, tasks: dict[str, list[str]], *, trust_code: bool = False) -> Findings:
    """Look for the tasks' items in all text that the run trains on, and in that of the runs it comes from; recorded in
    report/contamination.json.

    tasks: the texts of a task's items by the name of its metric. Shards whose text was looked through for these items before
    are not read again; those that are gone are prepared again. A parent whose text cannot be read is named in the findings.
    Raises InputMissingError and DataError when the run's own text is not there or has changed.
    """
    watchlist = Watchlist.of(tasks)
    seen, text_of = [_seen(run, watchlist, trust_code=trust_code)], {run.path.resolve(): run.name}
    parents, not_searched = parents_of(run)
    while parents:
        parent = parents.pop(0)
        if parent.path.resolve() in text_of:
            continue
        try:
            further, absent = parents_of(parent)
            parents += further
            not_searched += absent
            seen.append(_seen(parent, watchlist, trust_code=trust_code))
            text_of[parent.path.resolve()] = parent.name
        except TandemError as error:
            print(f"contamination: the text of {parent.name} is not searched. {error}", file=sys.stderr, flush=True)
            not_searched.append(parent.name)
    found = Seen.together(seen).findings(tasks, text_of=list(text_of.values()), not_searched=not_searched)
    return keep_findings(run, found)


def _seen(run: RunDirectory, watchlist: Watchlist, *, trust_code: bool) -> Seen:
    """What the run's text holds, by its recipe and the inputs that its manifest names."""
    inputs = run.read_manifest().get("inputs") or {}
    if not (inputs and run.recipe.exists()):
        raise InputMissingError(f"{run.path}: what the run trained on is not recorded, so its text cannot be searched.")
    recipe, sources = own_sources(run, trust_code=trust_code)
    recipe.data.batch_tokens = inputs["batch_tokens"]  # it may follow from the number of processes, which were others
    _refuse_changed(run, sources[0], inputs["sources"])
    folder = find_subject(str(run.path)).path
    tokenizer = open_tokenizer(folder, revision=None, beside=None, where=folder)
    path = watchlist.save(cache_dir(recipe.data.cache_dir) / "watchlists")
    plan = prepare_now(recipe, tokenizer, sources=sources, watchlist=path, report=_lines(run.name)).plan
    return Seen.by_run(plan, id_of_file(path))


def _refuse_changed(run: RunDirectory, sources: list[Any], recorded: list[dict[str, Any]]) -> None:
    before = {source["name"]: source["fingerprint"] for source in recorded}
    now = {source.name: source.describe()["fingerprint"] for source in sources}
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise DataError(
            f"{run.path}: the files of {', '.join(changed)} are not those that the run trained on, so searching them would tell nothing. "
            "Put them back as they were."
        )


def _lines(name: str) -> Callable[..., None]:
    """A line now and then while text is read."""
    said = time.monotonic()

    def report(role: str, source: int, stream: Any) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY_S:
            said = time.monotonic()
            print(f"contamination: searching the text of {name}, source {source + 1}", file=sys.stderr, flush=True)

    return report
