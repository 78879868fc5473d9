"""The bits-per-byte figures that `python -m pipeline.evals` was asked for."""

import argparse
from collections.abc import Callable
from itertools import islice
from typing import Any

from pipeline.artifacts.errors import DataError, RecipeError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.evals.bpb import bits_per_byte, by_source
from pipeline.evals.documents import document_batches, documents_protocol_id
from pipeline.evals.held_out import held_out_rows
from pipeline.evals.sft import conversation_batches, conversations_protocol_id
from pipeline.evals.subject import Subject
from pipeline.evals.texts import read_conversations, read_texts
from pipeline.tokenizer.byte_lengths import byte_lengths

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
    """Every bits-per-byte figure that was asked for: of --text and --chat, else of the run's own validation."""
    rows = arguments.batch_rows
    figures: list[Figure] = []
    if arguments.text or arguments.chat:
        window = _window(model, arguments.window)
        if arguments.text:
            figures.append(_of_texts(tokenizer, arguments, window=window))
        if arguments.chat:
            figures.append(_of_conversations(tokenizer, arguments, window=window))
    elif subject.run is not None:
        figures = _of_validation(subject.run, subject.stage, tokenizer, trust_code=subject.trust_code)

    results: list[dict[str, Any]] = []
    for name, protocol, lengths, batches, more in figures:
        names = more.pop("sources", [])
        mine = islice(batches(rows), rank, None, world_size)
        score = bits_per_byte(model, mine, lengths, device=device, sources=len(names))
        results.append(
            {
                "name": name,
                "value": score.bpb,
                "protocol": protocol(score.bytes),
                "loss": score.loss,
                "bytes": score.bytes,
                "tokens": score.tokens,
                "dtype": "float32",
                **more,
            }
        )
        results += [
            {"name": of_source, "value": bpb, "protocol": f"{protocol(score.bytes)}/{of_source.rpartition('/')[2]}"}
            for of_source, bpb in by_source(name, score, names).items()
        ]
    return results


# Name, protocol id of the bytes scored, bytes per id, batches of that many rows, more to record.
Figure = tuple[str, Callable[[int], str], Any, Callable[[int], Any], dict[str, Any]]


def _of_texts(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:

    texts = read_texts(arguments.text, max_bytes=arguments.max_bytes)
    return (
        "text/bpb_documents",
        lambda scored: documents_protocol_id(texts),
        None,
        lambda rows: document_batches(tokenizer, texts, window=window, rows=rows),
        {"window": window, "documents": len(texts)},
    )


def _of_conversations(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:

    conversations = read_conversations(arguments.chat, max_conversations=arguments.max_conversations)
    return (
        "text/assistant_bpb",
        lambda scored: conversations_protocol_id(tokenizer, conversations, scored_bytes=scored),
        _byte_lengths(tokenizer),
        lambda rows: conversation_batches(tokenizer, conversations, window=window, rows=rows),
        {"window": window, "conversations": len(conversations)},
    )


def _of_validation(run: RunDirectory, stage: str | None, tokenizer, *, trust_code: bool) -> list[Figure]:

    held_out = held_out_rows(run, tokenizer, trust_code=trust_code)
    lengths = _byte_lengths(tokenizer)
    name = "sft/assistant_bpb" if stage == "sft" else "val/bpb"
    figures: list[Figure] = [
        (
            name,
            lambda scored: held_out.protocol_id,
            lengths,
            lambda rows: held_out.batches(rows=rows),
            {"sources": held_out.sources},
        )
    ]
    if held_out.documents_protocol_id is not None:
        figures.append(
            (
                "val/bpb_documents",
                lambda scored: held_out.documents_protocol_id,
                lengths,
                lambda rows: held_out.document_batches(rows=rows),
                {"sources": held_out.sources},
            )
        )
    return figures


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
    print(f"{'metric':<20} {'value':>10} {'loss':>10} {'bytes':>12} {'targets':>12}  protocol")
    for r in results:
        counts = f"{r['loss']:>10.6f} {r['bytes']:>12,} {r['tokens']:>12,}" if "loss" in r else " " * 36
        print(f"{r['name']:<20} {r['value']:>10.6f} {counts}  {r['protocol']}")
