"""The rows of a run, and the record of what they were made of."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.data.preparation import Preparation, start_preparation
from pipeline.data.row_plan import batch_warmup, plan_rows
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows, held_out_coverage
from pipeline.hardware.device import decide_bf16
from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.process.commands import command
from pipeline.process.errors import DataError
from pipeline.process.progress import short_count
from pipeline.process.storage import cache_dir
from pipeline.process.user_code import ran
from pipeline.recipe import Recipe
from pipeline.recipe.batch import step_rows, tokens_at
from pipeline.recipe.checks import check_warmup
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.schema import Schedule, with_values
from pipeline.run.checks import benchmarks_of, cadence_notes
from pipeline.run.fork import refuse_without_steps
from pipeline.run.open_run import OpenRun
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.open import with_recorded_inputs
from pipeline.sources.raw_rows import text_bytes
from pipeline.tokenizer import identity
from pipeline.training.distributed import on_rank_0

# The horizon against the data: how often the run will see them, and a warm-up that fits a run given in epochs.

MANY_EPOCHS = 4.0  # Up to about four, repeated text teaches nearly as much as new text (Muennighoff et al. 2023).


def resolve_warmup(recipe: Recipe) -> Recipe:
    """Return the recipe with what a horizon in steps is read with, where it is one in epochs and known in steps by
    now.

    The default warm-up is at most a fifth of the run. Raises RecipeError for one that was given and is longer than it.
    """
    schedule, steps = recipe.optimizer.schedule, recipe.train["max_steps"]
    # Compared, not looked up among the given keys: the saved recipe of a run gives every key.
    if recipe.optimizer.type != "trainer" and schedule.warmup_steps == Schedule().warmup_steps:
        recipe = with_values(recipe, {"optimizer.schedule.warmup_steps": min(schedule.warmup_steps, steps // 5)})
    problems = Problems()
    check_warmup(recipe, problems)
    problems.raise_if_any()
    return recipe


def horizon_lines(recipe: Recipe, rows: Any, sources: list) -> list[str]:
    """Return steps and tokens of the run, and of each source the epochs planned, as far as its length can be known or
    estimated."""
    steps = recipe.train["max_steps"]
    tokens, warmup = recipe.data.batch_tokens or 0, step_rows(recipe).warmup_steps
    fewer = f" (fewer in the first {warmup:,})" if warmup else ""
    lines = [f"training: {steps:,} steps of {tokens:,} tokens{fewer}, {short_count(tokens_at(recipe, steps))} in all"]
    for (source, share), opened, dataset in zip(rows.shares().items(), sources, rows.stream.datasets, strict=True):
        epochs, about = share.get("epochs"), ""
        if epochs is None:
            epochs, about = _estimate(share["rows"] * opened.passes, opened, dataset), "about "
        if epochs is None:
            lines.append(f"  {source}: how often it is read (epochs) is not known before all of it is prepared")
            continue
        lines.append(f"  {source}: read {about}{epochs:.2f} times (epochs)")
        if epochs > MANY_EPOCHS:
            lines.append(
                f"note: {source} is repeated more than {MANY_EPOCHS:.0f} times, from where on repeated text teaches "
                "little. Add text, or train shorter."
            )
    return lines


def _estimate(planned: int, source: Any, dataset: Any) -> float | None:
    """Return epochs by the bytes of text that the rows so far have used up; None when the size of the text is not
    known."""
    whole, totals = text_bytes(source), dataset.totals()
    if not whole or not totals.get("text_bytes") or not totals["rows"]:
        return None
    # Not by all that was read: most of a source of long documents may still wait in the packer's buffer. A BOS is no
    # text.
    begun = sum(seal.get("documents", 0) for seal in dataset.seals)
    tokens = totals["positions"] - totals["padded"] - begun + totals["cropped_tokens"]
    return planned * tokens / totals["rows"] * totals["text_bytes"] / totals["text_tokens"] / whole


# Rows for this run: one process of the run prepares, the others attach.


def open_rows(
    recipe: Recipe, tokenizer: Any, sources: tuple[list, list], run: OpenRun
) -> tuple[Recipe, TrainingRows, ValidationRows]:
    """Return the recipe with its number of steps, and training and validation rows, when the first step's rows are
    sealed, while the rest is prepared ahead.

    run: rows before the step that it goes on from need not be kept.
    """
    started: list[Preparation] = []

    def start() -> dict:
        benchmarks, cache = benchmarks_of(recipe), cache_dir(recipe.data.cache_dir)
        watchlist = None
        if benchmarks:
            from pipeline.contrib.contaminated_items import save_watchlist

            watchlist = save_watchlist(benchmarks, cache=cache)
        plan = plan_rows(recipe, tokenizer, sources=sources, watchlist=watchlist)
        started.append(start_preparation(plan, tokenizer, sources=sources, run=run.directory.path))
        for line in unchecked_lines(plan, run):
            print(line, flush=True)
        return started[0].description()

    description = on_rank_0(start)
    preparation = started[0] if started else Preparation.attach(description)
    rows = TrainingRows.open(preparation=preparation)
    in_epochs = "max_steps" not in recipe.train
    recipe = with_values(recipe, {"train.max_steps": rows.total_steps()})
    if in_epochs:
        recipe = resolve_warmup(recipe)
    if run.forks:
        refuse_without_steps(recipe, run.step)
    validation = ValidationRows.open(preparation)

    def print_notes() -> None:
        from pipeline.data.losses import padding_notes, warning_lines

        notes = [f"note: {note}" for note in cadence_notes(recipe, recipe.train["max_steps"])]
        if recipe.data.one_text_rows:
            notes += padding_notes(rows.plan, rows.shares())
        warnings = warning_lines(
            rows.plan, validation, sources=sources, tokenizer=tokenizer, has_begun=run.step > 0
        )
        print(*horizon_lines(recipe, rows, sources[0]), *notes, *warnings, sep="\n", flush=True)

    on_rank_0(print_notes)
    return recipe, rows, validation


def unchecked_lines(plan: dict, run: OpenRun) -> list[str]:
    """Return how much of the training text was prepared before anybody looked for the benchmarks' items in it, and
    what to do."""
    if not plan["watchlist"]:
        return []
    from pipeline.contrib.contaminated_items import unchecked_text

    unchecked, shards = unchecked_text(plan)
    if not unchecked:
        return []
    return [
        f"contamination: nobody looked for the evaluation items in {unchecked:,} of {shards:,} shards, as they were "
        "prepared before. To look, while this run trains: "
        f"{command('data', run.directory.recipe, '--watchlist', plan['watchlist'])}"
    ]


# What a run was fed: files, tokenizer and parent weights by hash, recorded once and compared at every later start.


def keep_inputs(recipe: Recipe, run: OpenRun) -> Recipe:
    """Return the recipe, of a run that goes on with the commits of Hub datasets and the held-out files that it began
    with."""
    return with_recorded_inputs(recipe, run.directory.read_manifest().get("inputs", {})) if run.step else recipe


def record_inputs(
    recipe: Recipe, run: OpenRun, *, tokenizer: Any, sources: tuple[list, list], rows: Any, validation: Any
) -> None:
    """Write the inputs to the manifest at the first start, set validation.coverage, and note that all is prepared.

    At a later one raises DataError naming each input that is another one now: going on would mix two runs.
    """

    def record() -> float:
        begun = run.directory.read_manifest().get("inputs", {}) if run.step else {}
        now = {
            "tokenizer": {"identity": identity(tokenizer), "size": len(tokenizer)},
            "sources": [source.describe() for source in sources[0]],
            "validation": [source.describe() for source in sources[1]],
            "batch_tokens": recipe.data.batch_tokens,
            **batch_warmup(rows.step_rows),
            "max_steps": recipe.train["max_steps"],
            **({"one_text_rows": True} if recipe.data.one_text_rows else {}),
            "start_from": _weights(recipe, begun.get("start_from")),
            **({"document_end": rows.plan["end"]} if "end" in rows.plan else {}),
            **_overlap(begun, sources),
            **_validation_bytes(begun, validation, tokenizer),
        }
        validation.coverage = held_out_coverage(tokenizer, sources[1])
        now |= _protocols(recipe, validation, now.get("validation_bytes", {}))
        if begun and (changed := changes(begun, now)):
            lines = "\n  ".join(changed)
            raise DataError(
                f"{run.directory.path}: the run was trained on other inputs than it would go on with:\n  {lines}\n"
                "Put them back, or give this run another run.name to start anew."
            )
        shares = rows.shares()
        run.directory.update_manifest(inputs=now, shares=shares)
        run.directory.update_manifest(code={"trusted": recipe.run.trust_code, "ran": ran()})
        for use, opened in (("data", sources[0]), ("validation", sources[1])):
            for source in opened:
                print(f"{use}: {source.headline()}", flush=True)
        if len(shares) > 1:
            print("shares of the rows: " + ", ".join(f"{name} {100 * s['share']:.1f} %" for name, s in shares.items()))
        if not validation.keeps_text:
            from pipeline.tokenizer.coverage import lost_text

            lost = lost_text(validation.coverage)
            print(f"note: there are no bits per byte of data.validation, only val/loss: {lost}.")
        return validation.coverage

    validation.coverage = on_rank_0(record)
    run.prepared = time.time()


def _protocols(recipe: Recipe, validation: Any, scored_bytes: dict[str, int]) -> dict[str, Any]:
    """Under which protocols validation is scored, and their parts; null where it is not."""
    dtype = "float16" if recipe.train.get("fp16") else "float32"
    if decide_bf16(recipe.train.get("bf16"), fp16=dtype == "float16"):
        dtype = "bfloat16"
    found = {}
    for name, role in ((VAL_BPB, "validation"), (VAL_BPB_DOCUMENTS, "documents")):
        if validation.keeps_text and validation.plan[role] and validation.plan[role]["sequences"]:
            count = scored_bytes.get(SFT_BPB if recipe.stage == "sft" else name)
            found[name] = validation.protocol(name, scored_bytes=count, dtype=dtype)
    ids = {name: found[name].id if name in found else None for name in (VAL_BPB, VAL_BPB_DOCUMENTS)}
    return {"protocols": ids, "protocol_parts": {name: dict(protocol.parts) for name, protocol in found.items()}}


def _overlap(begun: dict[str, Any], sources: tuple[list, list]) -> dict[str, Any]:
    """Looked for before the first step (run/data.py) and kept from then on; nothing where nothing is held out."""
    if begun:
        return {"overlap": begun["overlap"]} if "overlap" in begun else {}
    from pipeline.data.overlap import overlap_of

    overlap = overlap_of(*sources)
    known = {name: value for name, value in asdict(overlap).items() if value is not None}
    return {"overlap": known} if overlap.documents else {}


def _validation_bytes(begun: dict[str, Any], validation: Any, tokenizer: Any) -> dict[str, Any]:
    """Counted at the first start; absent where no bytes are known."""
    scored = begun.get("validation_bytes") or validation.scored_bytes(tokenizer)
    return {"validation_bytes": scored} if scored else {}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for every input that differs; files are named."""
    lines = []
    if before["tokenizer"]["identity"] != now["tokenizer"]["identity"]:
        lines.append(
            f"tokenizer: another one ({before['tokenizer']['size']} -> {now['tokenizer']['size']} ids, or other "
            "merges or template)"
        )
    for role in ("sources", "validation"):
        if [s["fingerprint"] for s in before[role]] == [s["fingerprint"] for s in now[role]]:
            continue  # a moved folder may give a source another name
        old, new = ({s["name"]: s for s in inputs[role]} for inputs in (before, now))
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new:
                lines.append(f"{role}: {name} is {'new' if name in new else 'gone'}")
            elif old[name]["fingerprint"] != new[name]["fingerprint"]:
                lines += _changed_files(f"{role}: {name}", old[name], new[name])
    lines += [
        f"{key}: {before.get(key)} -> {now[key]}"
        for key in ("batch_tokens", "max_steps", "start_from")
        if before.get(key) != now[key]
    ]
    return lines


def _changed_files(where: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, after = ({f["label"]: f["sha256"] for f in source["files"]} for source in (old, new))
    lines = [
        f"{where}: {label} has other content" for label in before if label in after and before[label] != after[label]
    ]
    lines += [f"{where}: {label} is gone" for label in before if label not in after]
    lines += [f"{where}: {label} is new" for label in after if label not in before]
    return lines or [f"{where}: the files' order or how their rows are read"]


def _weights(recipe: Recipe, begun: dict[str, str] | None) -> dict[str, str] | None:
    """Return files of a folder by hash, read once: a later start knows them by size and time of change. Of a Hub id
    the commit, which a run that goes on keeps: its weights are in its checkpoint, whatever the branch holds by now."""
    start_from = recipe.model.start_from
    if start_from is None:
        return None
    if not Path(start_from).is_dir():
        return begun if begun and begun["from"] == start_from else {"from": start_from} | _commit(start_from)
    facts = FileFacts(cache_dir(recipe.data.cache_dir))
    files = sorted(Path(start_from).absolute().glob("model*.safetensors"))
    for path in files:  # a header takes no time, a hash of a terabyte of zeros half an hour
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise DataError(
                f"{path}: holds no weights as safetensors writes them ({error}), so no run starts from it. Take the "
                "model again."
            ) from None
    return {"from": start_from} | {path.name: facts.of(path).sha256 for path in files}


def _commit(repo_id: str) -> dict[str, str]:
    from transformers.utils.hub import cached_file, extract_commit_hash

    found = extract_commit_hash(cached_file(repo_id, "config.json"), None)
    return {"commit": found} if found else {}
