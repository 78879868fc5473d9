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
from pipeline.recipe.dial import RowSettings
from pipeline.recipe.schema import Run
from pipeline.run_dir.run_directory import RunDirectory, find_run
from pipeline.tokenizer import identity
from pipeline.tokenizer.chat import RENDERING_VERSION, custom_template
from pipeline.tokenizer.encode import document_end, document_start, is_byte_level

VALIDATION_BUFFER = 1000  # documents; part of the protocol, so no key of the recipe
# Validation first: it is small, and the first thing that a run does is to score it.
ROLES = ("validation", "documents", "train")
ONE_TEXT = "one_text"  # packing of rows that hold one document or conversation each, padded
KEY_LENGTH = 32  # hex digits of a cache key


def plan_rows(
    settings: RowSettings, tokenizer: Any, *, sources: tuple[list, list], watchlist: str | Path | None = None
) -> dict:
    """Return the plan of a run's training and validation rows, as JSON.

    sources: (train, validation) as open_sources gives them. watchlist: a saved Watchlist for which the training text
    is searched.
    """
    train, validation = sources
    data, bpb, rows = settings.data, settings.bpb, settings.step_rows
    chat = settings.kind == "chat"
    bos, pad = special_ids(tokenizer)
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32"
    end = None
    if settings.start_from is not None and not chat:
        end = document_end_of(tokenizer, run=settings.run, start_folder=settings.start_folder)
    ending = {} if end is None else {"end": end}
    # 1. What the bytes of every shard depend on: with the source's own, it is what a cache key is made of.
    common = {
        "format": FORMAT,
        "kind": settings.kind,
        "tokenizer": identity(tokenizer),
        "bos": bos,
        "pad": pad,
        "dtype": dtype,
        "row_tokens": data.row_tokens,
        "packing_documents": data.packing_documents,
        "shard_rows": data.shard_rows,
        **ending,
    }
    if chat and custom_template(tokenizer):
        common["rendering"] = RENDERING_VERSION
    # 2. How rows are packed: those of training as the recipe says, validation by a protocol of its own, so that its
    #    figures compare across recipes.
    train_packing: dict[str, str] = {"packing": data.packing}
    held_packing = {"packing": "best_fit_crop"}
    if chat:
        train_packing, held_packing = {"max_row_overflow": data.max_row_overflow}, {"max_row_overflow": "cut"}
    one_text = {"packing": ONE_TEXT} if data.one_text_rows else {}
    alone = one_text if chat or data.isolate_documents else {}
    # 3. Training.
    plan: dict[str, Any] = {
        "cache_dir": str(cache_dir(data.cache_dir)),
        "kind": settings.kind,
        "row_tokens": data.row_tokens,
        "rows_per_step": rows.full,
        **batch_warmup(rows),
        "isolated": settings.isolated,
        "bos": bos,
        "pad": pad,
        **ending,
        "seed": settings.seed,
        "max_bad_rows": data.max_bad_rows,
        "num_proc": data.num_proc,
        "shards_from": data.shards_from,
        "watchlist": str(watchlist) if watchlist else None,
        "train": {
            "total_rows": settings.total_rows,
            "epochs": settings.epochs,
            "sequences": [sequence_plan(source, {**common, **train_packing, **alone}) for source in train],
            "parts": [part_of(source.spec, counted=settings.epochs is not None) for source in train],
        },
    }
    # 4. Validation, in rows (val/bpb) and by whole documents (val/bpb_documents).
    held_out = {**common, "packing_documents": VALIDATION_BUFFER}
    if not chat and not is_byte_level(tokenizer):
        held_out["target_bytes"] = True  # ids have no fixed bytes: the rows carry them
    plan["validation"] = {
        "total_rows": max(1, int(bpb.tokens) // data.row_tokens),
        "epochs": None,
        "sequences": [sequence_plan(source, {**held_out, **held_packing, **alone}) for source in validation],
        "parts": [{"weight": source.spec.weight or 1.0, "epochs": None, "at_end": "drop"} for source in validation],
    }
    plan["documents"] = None
    if not chat and bpb.document_bytes > 0 and validation:
        share = -(-int(bpb.document_bytes) // len(validation))  # rounded up
        scoring = {**held_out, "packing": "cut_and_fit", "limit_bytes": share, **one_text}
        plan["documents"] = {
            "total_rows": None,
            "epochs": 1.0,
            "sequences": [sequence_plan(source, scoring) for source in validation],
            "parts": [{"weight": None, "epochs": 1.0, "at_end": "drop"} for _ in validation],
        }
    return plan


def sequence_plan(source: Any, settings: dict) -> dict:
    """Return a sequence's cache key and everything that the key stands for, but for the files themselves."""
    settings = {**settings, "source": source.fingerprint}
    # Files that are not here yet have no hash; those of the Hub are named with the commit in the fingerprint.
    files = [file.sha256 or file.label for file in source.files]
    key = digest({**settings, "files": files}, KEY_LENGTH)
    plan = {"name": source.name, "key": key, "settings": settings}
    if source.passes > 1:
        plan |= {"passes": source.passes, "files_in_a_pass": len(source.once.files)}
    return plan


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
    pad = bos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(bos), int(pad)


def document_end_of(tokenizer: Any, *, run: Run, start_folder: Path | None) -> int | None:
    """Return the id that each document ends with, where pretraining continues a model that ends its texts with one.

    None where the next document's beginning ends a text, as in all of ours: also in a run that was begun so, and from
    a model whose generation ends there. start_folder: of that model, where it is here.
    """
    begun: list[RunDirectory | None] = []
    if run.name:
        begun.append(RunDirectory(Path(run.directory) / run.name))
    if run.fork_from:
        begun.append(find_run(run.fork_from.partition("@")[0], run.directory))
    for earlier in begun:
        if earlier is not None and earlier.has_trained():
            return earlier.read_manifest().get("inputs", {}).get("document_end")
    if start_folder is not None and (start_folder / "generation_config.json").exists():
        ends = read_json(start_folder / "generation_config.json").get("eos_token_id")
        if not isinstance(ends, list):
            ends = [ends]
        if document_start(tokenizer) in ends:
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
    datasets, keys = [], []
    for sequence in about["sequences"]:
        shard_rows = sequence["settings"]["shard_rows"]
        datasets.append(ShardedDataset(sequence_folder(plan, sequence), shard_rows=shard_rows))
        keys.append(sequence["key"])
    weights = [SourceWeight(**part) for part in about["parts"]]
    mixture = Mixture(weights, total_rows=about["total_rows"], epochs=about["epochs"])
    seed = plan["seed"] if role == "train" else None  # validation is read in the order in which it is packed
    return MixedDataset(datasets, mixture, keys=keys, seed=seed)


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
    damaged = []
    for role, stream in streams.items():
        for source, dataset in enumerate(stream.datasets):
            for number in range(stream.shards_needed(source)):
                if is_damaged(dataset.folder, number, verify=verify):
                    damaged.append((role, source, number))
    return damaged


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
