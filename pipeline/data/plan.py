"""Plan of the data of a run: one sequence of shards per source and use, each under its cache key.

A plan is JSON, so that one process makes it and hands it to the other ranks and to the preparing child.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.data.shards import FORMAT
from pipeline.data.stream import Mixture, Part, Sequence, Stream
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir
from pipeline.recipe.resolve import StepRows, horizon_steps, isolates_documents, step_rows, with_batch_tokens
from pipeline.tokenizer import identity
from pipeline.tokenizer.chat import RENDERING_VERSION, own_template
from pipeline.tokenizer.encode import document_start, is_byte_level

VALIDATION_BUFFER = 1000  # documents; part of the protocol, so no key of the recipe
# Validation first: it is small, and the first thing that a run does is to score it.
ROLES = ("validation", "documents", "train")


def make_plan(recipe: Any, tokenizer: Any, *, sources: tuple[list, list], watchlist: str | Path | None = None) -> dict:
    """Return the plan of a recipe's training and validation rows.

    sources: as open_sources gives them. watchlist: a saved Watchlist for which the training text is searched.
    """
    train, validation = sources
    chat = recipe.stage == "sft"
    batch_tokens = with_batch_tokens(recipe, 1)  # given, or set by the entry, which knows the number of processes
    rows_per_step, rest = divmod(int(batch_tokens), recipe.data.row_tokens)
    if rest:
        raise RecipeError(
            f"{recipe.path or 'recipe'}: data.batch_tokens is {batch_tokens}, which is not a whole number of rows of "
            f"{recipe.data.row_tokens} tokens. Write {max(1, rows_per_step) * recipe.data.row_tokens}."
        )
    bos, pad = special_ids(tokenizer)
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
    }
    if chat and own_template(tokenizer):
        common["rendering"] = RENDERING_VERSION
    train_packing = {"max_row_overflow": recipe.data.max_row_overflow} if chat else {"packing": recipe.data.packing}
    steps = horizon_steps(recipe, int(batch_tokens))
    rows = step_rows(recipe, int(batch_tokens))
    horizon = (
        {"total_rows": rows.before(steps), "epochs": None}
        if steps and steps > 0
        else {"total_rows": None, "epochs": float(recipe.train.get("num_train_epochs") or 1.0)}
    )
    bpb = recipe.evals.bpb
    plan = {
        "cache_dir": str(cache_dir(recipe.data.cache_dir)),
        "kind": common["kind"],
        "row_tokens": recipe.data.row_tokens,
        "rows_per_step": rows_per_step,
        **batch_warmup(rows),
        "isolated": isolates_documents(recipe),
        "bos": bos,
        "pad": pad,
        "seed": int(recipe.train.get("seed", 42)),
        "max_bad_rows": recipe.data.max_bad_rows,
        "num_proc": recipe.data.num_proc,
        "engine": recipe.data.engine,
        "shards_from": recipe.data.shards_from,
        "keep_shards": recipe.data.keep_shards,
        "watchlist": str(watchlist) if watchlist else None,
        "train": {
            **horizon,
            "sequences": [sequence_plan(source, {**common, **train_packing}) for source in train],
            "parts": [part_of(source.spec, counted=horizon["epochs"] is not None) for source in train],
        },
    }
    rows = max(1, int(bpb.tokens) // recipe.data.row_tokens)
    # Ids of some tokenizers have no fixed bytes: then the rows carry them.
    scored = {} if is_byte_level(tokenizer) else {"target_bytes": True}
    val_packing = (
        {"max_row_overflow": "cut", "packing_documents": VALIDATION_BUFFER}
        if chat
        else {"packing": "best_fit_crop", "packing_documents": VALIDATION_BUFFER, **scored}
    )
    dropping = [{**part_of(source.spec, counted=False), "epochs": None, "at_end": "drop"} for source in validation]
    plan["validation"] = {
        "total_rows": rows,
        "epochs": None,
        "sequences": [sequence_plan(source, {**common, **val_packing}) for source in validation],
        "parts": [{**part, "weight": part["weight"] or 1.0} for part in dropping],
    }
    plan["documents"] = None
    if not chat and bpb.document_bytes > 0 and validation:
        share = -(-int(bpb.document_bytes) // len(validation))
        settings = {
            **common,
            "packing": "cut_and_fit",
            "packing_documents": VALIDATION_BUFFER,
            "limit_bytes": share,
            **scored,
        }
        plan["documents"] = {
            "total_rows": None,
            "epochs": 1.0,
            "sequences": [sequence_plan(source, settings) for source in validation],
            "parts": [{"weight": None, "epochs": 1.0, "at_end": "drop"} for _ in validation],
        }
    return plan


def sequence_plan(source: Any, settings: dict) -> dict:
    """Return a sequence's cache key and everything that the key stands for, but for the files themselves."""
    settings = {**settings, "source": source.fingerprint, "files": [file.sha256 or file.label for file in source.files]}
    key = digest(settings)
    return {"name": source.name, "key": key, "settings": {k: v for k, v in settings.items() if k != "files"}}


def part_of(spec: Any, *, counted: bool) -> dict:
    """Return a source's weight or epochs. counted: the horizon is in epochs, so a source without either is seen once in each."""
    if spec.epochs is not None:
        return {"weight": None, "epochs": spec.epochs, "at_end": spec.at_end}
    if spec.weight is None and counted:
        return {"weight": None, "epochs": 1.0, "at_end": spec.at_end}
    return {"weight": 1.0 if spec.weight is None else spec.weight, "epochs": None, "at_end": spec.at_end}


def batch_warmup(rows: StepRows) -> dict[str, dict[str, int]]:
    """Return what a plan or a manifest holds of smaller first steps; nothing where there are none."""
    return {"batch_warmup": {"warmup_steps": rows.warmup_steps, "halvings": rows.halvings}} if rows.warmup_steps else {}


def step_rows_of(plan: dict) -> StepRows:
    """Return the rows of the plan's steps."""
    return StepRows(plan["rows_per_step"], **plan.get("batch_warmup", {}))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def special_ids(tokenizer: Any) -> tuple[int, int]:
    """(BOS, padding) ids; a tokenizer without one of them lends the token between its texts. Padding is never a target."""
    bos = document_start(tokenizer)
    if bos is None:
        raise RecipeError(
            "tokenizer: it has neither a bos nor an eos token, so rows cannot say where a document begins. Choose another one."
        )
    return int(bos), int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else bos)


def sequence_folder(plan: dict, sequence: dict) -> Path:
    return Path(plan["cache_dir"]) / "shards" / sequence["key"]


def folders_of(plan: dict) -> list[Path]:
    """Return the folders of all sequences of a plan, each once and always in the same order."""
    return sorted({sequence_folder(plan, s) for role in ROLES if plan[role] for s in plan[role]["sequences"]})


def open_stream(plan: dict, role: str) -> Stream | None:
    """Return the stream train | validation | documents of a plan, as far as it is sealed."""
    about = plan[role]
    if about is None:
        return None
    sequences = [Sequence(sequence_folder(plan, s), shard_rows=s["settings"]["shard_rows"]) for s in about["sequences"]]
    mixture = Mixture([Part(**part) for part in about["parts"]], total_rows=about["total_rows"], epochs=about["epochs"])
    keys = [s["key"] for s in about["sequences"]]
    return Stream(sequences, mixture, keys=keys, seed=plan["seed"] if role == "train" else None)
