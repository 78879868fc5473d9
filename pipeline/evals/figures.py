"""The bits-per-byte figures that `python -m pipeline.evals` was asked for."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from pipeline.artifacts.errors import DataError, RecipeError
from pipeline.artifacts.protocol import Protocol
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.evals.bpb import bits_per_byte, by_source
from pipeline.evals.documents import document_batches, documents_protocol
from pipeline.evals.held_out import held_out_rows
from pipeline.evals.sft import conversation_batches, conversations_protocol
from pipeline.evals.subject import Subject
from pipeline.evals.texts import lines_of_files, read_conversations, read_texts
from pipeline.tokenizer.byte_lengths import byte_lengths, is_byte_level
from pipeline.tokenizer.coverage import coverage, require_coverage

WINDOW = 2048  # Targets of a piece, unless the model or the command says less.


def require_text(subject: Subject, arguments: argparse.Namespace) -> None:
    """Raises RecipeError when there is no text to score: none is named and the subject is no run."""
    if subject.run is None and not (arguments.text or arguments.chat):
        raise RecipeError(
            f"command line: {subject.path} is no run and has no validation text of its own, so there is nothing to score. Name text with --text FILE."
        )


def bpb_results(
    subject: Subject,
    model,
    tokenizer,
    arguments: argparse.Namespace,
    *,
    device: str,
    rank: int = 0,
    world_size: int = 1,
) -> list[dict[str, Any]]:
    """Every bits-per-byte figure that was asked for: of --text and --chat, else of the run's own validation.

    Computed in --dtype, else a run's own validation in what the run was trained in, any other text in float32.
    """
    rows = arguments.batch_rows
    figures: list[Figure] = []
    if arguments.text or arguments.chat:
        dtype = arguments.dtype or "float32"
        window = _window(model, arguments.window)
        if arguments.text:
            figures.append(_of_texts(tokenizer, arguments, window=window, dtype=dtype))
        if arguments.chat:
            figures.append(_of_conversations(tokenizer, arguments, window=window, dtype=dtype))
    elif subject.run is not None:
        dtype = arguments.dtype or dtype_of_run(subject.run)
        figures = _of_validation(subject.run, subject.stage, tokenizer, dtype=dtype, trust_code=subject.trust_code)

    results: list[dict[str, Any]] = []
    for name, protocol, lengths, batches, more in figures:
        names = more.pop("sources", [])
        mine = islice(batches(rows), rank, None, world_size)
        autocast_dtype = None if dtype == "float32" else getattr(torch, dtype)
        score = bits_per_byte(model, mine, lengths, device=device, autocast_dtype=autocast_dtype, sources=len(names))
        scored_on = protocol(score.bytes)
        results.append(
            {
                "name": name,
                "value": score.bpb,
                **scored_on.row(),
                "loss": score.loss,
                "bytes": score.bytes,
                "tokens": score.tokens,
                "dtype": dtype,
                **more,
            }
        )
        results += [
            {"name": of_source, "value": bpb, **scored_on.having(source=of_source.rpartition("/")[2]).row()}
            for of_source, bpb in by_source(name, score, names).items()
        ]
    return results


# Name, protocol by the bytes scored, bytes per id, batches of that many rows, more to record.
Figure = tuple[str, Callable[[int], Protocol], Any, Callable[[int], Any], dict[str, Any]]


def _of_texts(tokenizer, arguments: argparse.Namespace, *, window: int, dtype: str) -> Figure:
    texts, files = read_texts(arguments.text, max_bytes=arguments.max_bytes)
    kept = coverage(tokenizer, texts)
    require_coverage(kept, where="--text")
    for line in lines_of_files(files, limit=f"--max-bytes {arguments.max_bytes}"):
        print(line)
    return (
        "text/bpb_documents",
        lambda scored: documents_protocol(texts, window=window, scored_bytes=scored, coverage=kept, dtype=dtype),
        None,
        lambda rows: document_batches(tokenizer, texts, window=window, rows=rows),
        {"window": window, "documents": len(texts), "files": [asdict(file) for file in files]},
    )


def _of_conversations(tokenizer, arguments: argparse.Namespace, *, window: int, dtype: str) -> Figure:
    conversations, files = read_conversations(arguments.chat, max_conversations=arguments.max_conversations)
    kept = coverage(tokenizer, (str(m.get("content") or "") for messages in conversations for m in messages))
    require_coverage(kept, where="--chat")
    for line in lines_of_files(files, limit=f"--max-conversations {arguments.max_conversations}"):
        print(line)
    return (
        "text/assistant_bpb",
        lambda scored: conversations_protocol(
            tokenizer, conversations, window=window, scored_bytes=scored, coverage=kept, dtype=dtype
        ),
        _byte_lengths(tokenizer),
        lambda rows: conversation_batches(tokenizer, conversations, window=window, rows=rows),
        {"window": window, "conversations": len(conversations), "files": [asdict(file) for file in files]},
    )


def _of_validation(run: RunDirectory, stage: str | None, tokenizer, *, dtype: str, trust_code: bool) -> list[Figure]:
    held_out = held_out_rows(run, tokenizer, trust_code=trust_code)
    require_coverage(held_out.coverage, where=f"{run.path}: its validation text")
    is_chat = stage == "sft"
    # Rows of text carry their targets' bytes where ids have no fixed ones.
    lengths = _byte_lengths(tokenizer) if is_chat or is_byte_level(tokenizer) else None
    name = "sft/assistant_bpb" if is_chat else "val/bpb"
    figures: list[Figure] = [
        (
            name,
            lambda scored: held_out.protocol(name, scored_bytes=scored, dtype=dtype),
            lengths,
            lambda rows: held_out.batches(rows=rows),
            {"sources": held_out.sources},
        )
    ]
    if held_out.has_documents:
        figures.append(
            (
                "val/bpb_documents",
                lambda scored: held_out.protocol("val/bpb_documents", scored_bytes=scored, dtype=dtype),
                lengths,
                lambda rows: held_out.document_batches(rows=rows),
                {"sources": held_out.sources},
            )
        )
    return figures


def dtype_of_run(run: RunDirectory) -> str:
    """Return what the run computes its own validation in. Under float8 that is bfloat16: only its steps multiply in less."""
    dtype = (run.read_manifest().get("shape") or {}).get("dtype") or "float32"
    return "bfloat16" if dtype == "float8" else str(dtype)


def _byte_lengths(tokenizer) -> Any:

    try:
        return byte_lengths(tokenizer)
    except ValueError as error:
        raise DataError(f"{tokenizer.name_or_path}: {error}. Score plain text instead: --text FILE.") from None


def _window(model, asked: int | None) -> int:
    positions = getattr(model.config, "max_position_embeddings", None) or WINDOW
    if asked is not None and asked > positions:
        raise RecipeError(
            f"command line: --window {asked} is more than the model's {positions} positions. Give at most {positions}."
        )
    return asked or min(positions, WINDOW)


def print_figures(results: list[dict[str, Any]]) -> None:
    """Print a line for each figure, then one for each protocol: what it is made of."""
    print(f"{'metric':<20} {'value':>10} {'loss':>10} {'bytes':>12} {'targets':>12}  protocol")
    for r in results:
        counts = f"{r['loss']:>10.6f} {r['bytes']:>12,} {r['tokens']:>12,}" if "loss" in r else " " * 36
        print(f"{r['name']:<20} {r['value']:>10.6f} {counts}  {r['protocol']}")
    for id_, protocol in {r["protocol"]: Protocol.of(r) for r in results}.items():
        print(f"{id_}: {protocol}")
