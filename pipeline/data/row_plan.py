"""Plan of a run's data: which shards its rows come from, under which keys, and in which order they are made.

One folder of shards per source and use, each under its cache key. A plan is JSON, so that one process makes it and
hands it to the other ranks and to the preparing child.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.data.mixture import MixedDataset, Mixture, SourceWeight
from pipeline.data.shards import FORMAT, ShardedDataset, damaged_seals, is_damaged
from pipeline.metrics import digest
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir, file_lock, read_json, remove_file
from pipeline.recipe.batch import StepRows
from pipeline.recipe.dial import horizon_steps
from pipeline.recipe.start_from import start_folder
from pipeline.run_dir.run_directory import RunDirectory, find_run
from pipeline.tokenizer import identity
from pipeline.tokenizer.chat import RENDERING_VERSION, custom_template
from pipeline.tokenizer.encode import document_end, document_start, is_byte_level

VALIDATION_BUFFER = 1000  # documents; part of the protocol, so no key of the recipe
# Validation first: it is small, and the first thing that a run does is to score it.
ROLES = ("validation", "documents", "train")
ONE_TEXT = "one_text"  # packing of rows that hold one document or conversation each, padded
KEY_LENGTH = 32  # hex digits of a cache key


def plan_rows(recipe: Any, tokenizer: Any, *, sources: tuple[list, list], watchlist: str | Path | None = None) -> dict:
    """Return the plan of a recipe's training and validation rows, as JSON.

    sources: (train, validation) as open_sources gives them. watchlist: a saved Watchlist for which the training text
    is searched.
    """
    train, validation = sources
    chat = recipe.stage == "sft"
    batch_tokens = recipe.global_batch_tokens(1)  # given, or set by the entry, which knows the number of processes
    rows_per_step, rest = divmod(int(batch_tokens), recipe.data.row_tokens)
    if rest:
        raise RecipeError(
            f"{recipe.path or 'recipe'}: data.batch_tokens is {batch_tokens}, which is not a whole number of rows of "
            f"{recipe.data.row_tokens} tokens. Write {max(1, rows_per_step) * recipe.data.row_tokens}."
        )
    bos, pad = special_ids(tokenizer)
    end = document_end_of(recipe, tokenizer)
    ending = {} if end is None else {"end": end}
    common = {
        "format": FORMAT,
        "kind": "chat" if chat else "text",
        "tokenizer": identity(tokenizer),
        "bos": bos,
        "pad": pad,
        "dtype": "uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32",
        "row_tokens": recipe.data.row_tokens,
        "packing_documents": recipe.data.packing_documents,
        "shard_rows": recipe.data.shard_rows,
        **ending,
    }
    if chat and custom_template(tokenizer):
        common["rendering"] = RENDERING_VERSION
    train_packing = {"max_row_overflow": recipe.data.max_row_overflow} if chat else {"packing": recipe.data.packing}
    one_text = {"packing": ONE_TEXT} if recipe.data.one_text_rows else {}
    alone = one_text if chat or recipe.data.isolate_documents else {}
    steps = horizon_steps(recipe)
    rows = recipe.step_rows
    horizon: dict[str, int | float | None]
    if steps and steps > 0:
        horizon = {"total_rows": rows.before(steps), "epochs": None}
    else:
        horizon = {"total_rows": None, "epochs": float(recipe.train.get("num_train_epochs") or 1.0)}
    bpb = recipe.evals.bpb
    plan = {
        "cache_dir": str(cache_dir(recipe.data.cache_dir)),
        "kind": common["kind"],
        "row_tokens": recipe.data.row_tokens,
        "rows_per_step": rows_per_step,
        **batch_warmup(rows),
        "isolated": recipe.isolates_documents,
        "bos": bos,
        "pad": pad,
        **ending,
        "seed": int(recipe.train.get("seed", 42)),
        "max_bad_rows": recipe.data.max_bad_rows,
        "num_proc": recipe.data.num_proc,
        "shards_from": recipe.data.shards_from,
        "watchlist": str(watchlist) if watchlist else None,
        "train": {
            **horizon,
            "sequences": [sequence_plan(source, {**common, **train_packing, **alone}) for source in train],
            "parts": [part_of(source.spec, counted=horizon["epochs"] is not None) for source in train],
        },
    }
    rows = max(1, int(bpb.tokens) // recipe.data.row_tokens)
    # Ids of some tokenizers have no fixed bytes: then the rows carry them.
    scored = {} if chat or is_byte_level(tokenizer) else {"target_bytes": True}
    held_out = {**common, "packing_documents": VALIDATION_BUFFER, **scored}
    packing = {"max_row_overflow": "cut"} if chat else {"packing": "best_fit_crop"}
    plan["validation"] = {
        "total_rows": rows,
        "epochs": None,
        "sequences": [sequence_plan(source, {**held_out, **packing, **alone}) for source in validation],
        "parts": [{"weight": source.spec.weight or 1.0, "epochs": None, "at_end": "drop"} for source in validation],
    }
    plan["documents"] = None
    if not chat and bpb.document_bytes > 0 and validation:
        share = -(-int(bpb.document_bytes) // len(validation))
        settings = {**held_out, "packing": "cut_and_fit", "limit_bytes": share, **one_text}
        plan["documents"] = {
            "total_rows": None,
            "epochs": 1.0,
            "sequences": [sequence_plan(source, settings) for source in validation],
            "parts": [{"weight": None, "epochs": 1.0, "at_end": "drop"} for _ in validation],
        }
    return plan


def sequence_plan(source: Any, settings: dict) -> dict:
    """Return a sequence's cache key and everything that the key stands for, but for the files themselves."""
    settings = {
        **settings,
        "source": source.fingerprint,
        "files": [file.sha256 or file.label for file in source.files],
    }
    key = digest(settings, KEY_LENGTH)
    passes = {"passes": source.passes, "files_in_a_pass": len(source.once.files)} if source.passes > 1 else {}
    return {"name": source.name, "key": key, "settings": {k: v for k, v in settings.items() if k != "files"}, **passes}


def part_of(spec: Any, *, counted: bool) -> dict:
    """Return a source's weight or epochs. counted: the horizon is in epochs, so a source without either is seen once
    in each."""
    weight, epochs = spec.weight, spec.epochs
    if weight is None and epochs is None and counted:
        epochs = 1.0
    if epochs is not None:
        weight = None
    elif weight is None:
        weight = 1.0
    return {"weight": weight, "epochs": epochs, "at_end": spec.at_end}


def batch_warmup(rows: StepRows) -> dict[str, dict[str, int]]:
    """Return what a plan or a manifest holds of smaller first steps; nothing where there are none."""
    if not rows.warmup_steps:
        return {}
    return {"batch_warmup": {"warmup_steps": rows.warmup_steps, "halvings": rows.halvings}}


def step_rows_of(plan: dict) -> StepRows:
    """Return the rows of the plan's steps."""
    return StepRows(plan["rows_per_step"], **plan.get("batch_warmup", {}))


def special_ids(tokenizer: Any) -> tuple[int, int]:
    """Return (BOS, padding) ids; a tokenizer without one of them lends the token between its texts. Padding is never
    a target."""
    bos = document_start(tokenizer)
    if bos is None:
        raise RecipeError(
            "tokenizer: it has neither a bos nor an eos token, so rows cannot say where a document begins. Choose "
            "another one."
        )
    return int(bos), int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else bos)


def document_end_of(recipe: Any, tokenizer: Any) -> int | None:
    """Return the id that each document ends with, where training goes on from a model that ends its texts with one.

    None where the next document's beginning ends a text, as in all of ours: also in a run that was begun so, and from
    a model whose generation ends there.
    """
    if recipe.stage != "pretrain" or recipe.model.start_from is None:
        return None
    fork = find_run(recipe.run.fork_from.partition("@")[0], recipe.run.directory) if recipe.run.fork_from else None
    own = RunDirectory(Path(recipe.run.directory) / recipe.run.name) if recipe.run.name else None
    for run in (own, fork):
        if run is not None and run.has_trained():
            return run.read_manifest().get("inputs", {}).get("document_end")
    folder = start_folder(recipe)
    if folder is not None and (folder / "generation_config.json").exists():
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        if document_start(tokenizer) in (ends if isinstance(ends, list) else [ends]):
            return None
    return document_end(tokenizer)


def sequence_folder(plan: dict, sequence: dict) -> Path:
    return Path(plan["cache_dir"]) / "shards" / sequence["key"]


def folders_of(plan: dict) -> list[Path]:
    """Return the folders of all shards of a plan, each once and always in the same order."""
    return sorted({sequence_folder(plan, s) for role in ROLES if plan[role] for s in plan[role]["sequences"]})


def open_stream(plan: dict, role: str) -> MixedDataset:
    """Return the rows train | validation | documents of a plan that has them, as far as they are sealed."""
    about = plan[role]
    datasets = [
        ShardedDataset(sequence_folder(plan, s), shard_rows=s["settings"]["shard_rows"]) for s in about["sequences"]
    ]
    weights = [SourceWeight(**part) for part in about["parts"]]
    mixture = Mixture(weights, total_rows=about["total_rows"], epochs=about["epochs"])
    keys = [s["key"] for s in about["sequences"]]
    return MixedDataset(datasets, mixture, keys=keys, seed=plan["seed"] if role == "train" else None)


def streams_of(plan: dict) -> dict[str, MixedDataset]:
    return {role: open_stream(plan, role) for role in ROLES if plan[role] is not None}


def next_shard(streams: dict[str, MixedDataset]) -> tuple[str, int] | None:
    """Return (role, source) of the shard to make next: what the run reads first is made first. None when all that the
    run needs is sealed."""
    for role, stream in streams.items():
        source = stream.missing()
        if source is not None:
            return role, source
    return None


def damaged_shards(streams: dict[str, MixedDataset], *, verify: bool) -> list[tuple[str, int, int]]:
    """Return (role, source, shard) of the sealed shards that the run needs and that are not as they were sealed."""
    return [
        (role, source, number)
        for role, stream in streams.items()
        for source, dataset in enumerate(stream.datasets)
        for number in range(stream.shards_needed(source))
        if is_damaged(dataset.folder, number, verify=verify)
    ]


def discard_damaged(plan: dict) -> None:
    """Delete damaged seals of the plan's shards, said in a line each, so that these shards are made again."""
    for folder in folders_of(plan):
        if not damaged_seals(folder):
            continue  # without the lock: another run may be at work there for hours
        with file_lock(folder / ".lock"):
            for path in damaged_seals(folder):
                remove_file(path)
                print(
                    f"data: {path}: is not as it was written; made again from the source", file=sys.stderr, flush=True
                )


@contextmanager
def locks(plan: dict) -> Iterator[None]:
    """Hold the locks of all folders of shards of a plan, always taken in the same order."""
    with ExitStack() as stack:
        for folder in folders_of(plan):
            stack.enter_context(file_lock(folder / ".lock"))
        yield
