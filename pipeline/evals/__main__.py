"""python -m pipeline.evals RUN_OR_MODEL [bpb samples]: score a run, a checkpoint, a local folder or a Hub id."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.artifacts.failures import exit_with_status
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.evals.subject import Subject, find_subject

TASKS = ("bpb", "samples")
LATER = ("core", "chat", "lm_eval")
WINDOW = 2048  # Targets of a piece, unless the model or the command says less.


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    subject = find_subject(arguments.model)

    from pipeline.evals.record import record
    from pipeline.evals.subject import load
    from pipeline.hardware.cpu import settle_vector_functions
    from pipeline.hardware.device import device_info

    device = device_info()
    settle_vector_functions()
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer = load(subject, device=device.kind, revision=arguments.revision)
    results: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    if "bpb" in arguments.tasks:
        results = bpb_results(subject, model, tokenizer, arguments, device=device.kind)
        _print_results(results)
    if "samples" in arguments.tasks:
        from pipeline.evals.samples import sample_texts

        samples = sample_texts(
            model, tokenizer, chat=arguments.as_chat or subject.stage == "sft", prompts=_prompts(subject)
        )
        for row in samples:
            print(f"[{'greedy' if row['temperature'] == 0 else 'sampled'}] {row['prompt']!r} -> {row['text']!r}")
    own = [task for task in arguments.tasks if task not in TASKS]
    if own:
        from pipeline.evals.tasks import load_tasks, score_tasks

        numbers = score_tasks(load_tasks(own, folder=str(Path.cwd()), where="command line"), model, tokenizer)
        for name, value in numbers.items():
            print(f"{name:<20} {value:>10.6f}")
        results += [{"name": name, "value": value, "protocol": None} for name, value in numbers.items()]
    record(subject, argv=argv, device=device.name, results=results, samples=samples)
    if subject.run is not None:
        print(f"recorded in {subject.run.evals}")
    return 0


def _prompts(subject: Subject) -> list[str] | None:
    """The prompts of the run's own recipe, None when there is none."""
    import yaml

    if subject.run is None or not subject.run.recipe.exists():
        return None
    recipe = yaml.safe_load(subject.run.recipe.read_text(encoding="utf-8")) or {}
    return (recipe.get("samples") or {}).get("prompts")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.evals",
        description="Score a run, a checkpoint, a local model folder or a Hub id. A run's results go to its report/evals.json.",
    )
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="of a run its model/ is scored, else its newest whole checkpoint"
    )
    parser.add_argument(
        "tasks",
        nargs="*",
        metavar="TASK",
        help="bpb (bits per byte), samples (continuations of fixed prompts), or your own as module:attr; default bpb and samples",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="score these txt, jsonl or parquet files or globs instead of the run's validation",
    )
    parser.add_argument(
        "--chat",
        nargs="+",
        metavar="FILE",
        help="score what the assistant says in these jsonl or parquet files of messages",
    )
    parser.add_argument(
        "--max-bytes", type=int, default=4_000_000, help="of --text, in whole documents (default %(default)s)"
    )
    parser.add_argument("--max-conversations", type=int, default=500, help="of --chat (default %(default)s)")
    parser.add_argument(
        "--window",
        type=int,
        help=f"most tokens the model sees at once for --text and --chat (default its positions, at most {WINDOW})",
    )
    parser.add_argument(
        "--batch-rows",
        type=int,
        default=8,
        help="rows of one forward pass; does not change any figure (default %(default)s)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--as-chat",
        action="store_true",
        help="give the prompts of samples as a user's message; a chat run's are anyway",
    )
    arguments = parser.parse_intermixed_args(argv)
    wrong = [t for t in arguments.tasks if t not in TASKS and (":" not in t or t.split(":")[0] in LATER)]
    if wrong:
        later = [task for task in wrong if task.split(":")[0] in LATER]
        what = (
            f"{', '.join(later)} are not part of this version yet"
            if later == wrong
            else f"there is no evaluation called {', '.join(wrong)}"
        )
        raise RecipeError(f"command line: {what}, so nothing was scored. Use {', '.join(TASKS)} or module:attr.")
    arguments.tasks = arguments.tasks or list(TASKS)
    return arguments


def bpb_results(
    subject: Subject, model, tokenizer, arguments: argparse.Namespace, *, device: str
) -> list[dict[str, Any]]:
    """Every bits-per-byte figure that was asked for: of --text and --chat, else of the run's own validation."""
    rows = arguments.batch_rows
    if arguments.text or arguments.chat:
        figures = []
        window = _window(model, arguments.window)
        if arguments.text:
            figures.append(_of_texts(tokenizer, arguments, window=window))
        if arguments.chat:
            figures.append(_of_conversations(tokenizer, arguments, window=window))
    elif subject.run is not None:
        figures = _of_validation(subject.run, subject.stage, tokenizer)
    else:
        raise RecipeError(
            f"command line: {subject.path} is no run and has no validation text of its own, so there is nothing to score. Name text with --text FILE."
        )
    from pipeline.evals.bpb import bits_per_byte

    results = []
    for name, protocol, lengths, batches, more in figures:
        score = bits_per_byte(model, batches(rows), lengths, device=device)
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
    return results


# Name, protocol id of the bytes scored, bytes per id, batches of that many rows, more to record.
Figure = tuple[str, Callable[[int], str], Any, Callable[[int], Any], dict[str, Any]]


def _of_texts(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:
    from pipeline.evals.documents import document_batches, documents_protocol_id
    from pipeline.evals.texts import read_texts

    texts = read_texts(arguments.text, max_bytes=arguments.max_bytes)
    return (
        "text/bpb_documents",
        lambda scored: documents_protocol_id(texts),
        None,
        lambda rows: document_batches(tokenizer, texts, window=window, rows=rows),
        {"window": window, "documents": len(texts)},
    )


def _of_conversations(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:
    from pipeline.evals.sft import conversation_batches, conversations_protocol_id
    from pipeline.evals.texts import read_conversations

    conversations = read_conversations(arguments.chat, max_conversations=arguments.max_conversations)
    return (
        "text/assistant_bpb",
        lambda scored: conversations_protocol_id(tokenizer, conversations, scored_bytes=scored),
        _byte_lengths(tokenizer),
        lambda rows: conversation_batches(tokenizer, conversations, window=window, rows=rows),
        {"window": window, "conversations": len(conversations)},
    )


def _of_validation(run: RunDirectory, stage: str | None, tokenizer) -> list[Figure]:
    from pipeline.evals.held_out import held_out_rows

    held_out = held_out_rows(run, tokenizer)
    lengths = _byte_lengths(tokenizer)
    name = "sft/assistant_bpb" if stage == "sft" else "val/bpb"
    figures: list[Figure] = [
        (name, lambda scored: held_out.protocol_id, lengths, lambda rows: held_out.batches(rows=rows), {})
    ]
    if held_out.documents_protocol_id is not None:
        figures.append(
            (
                "val/bpb_documents",
                lambda scored: held_out.documents_protocol_id,
                lengths,
                lambda rows: held_out.document_batches(rows=rows),
                {},
            )
        )
    return figures


def _byte_lengths(tokenizer) -> Any:
    from pipeline.artifacts.errors import DataError
    from pipeline.tokenizer.byte_lengths import byte_lengths

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


def _print_results(results: list[dict[str, Any]]) -> None:
    print(f"{'metric':<20} {'value':>10} {'loss':>10} {'bytes':>12} {'targets':>12}  protocol")
    for r in results:
        print(
            f"{r['name']:<20} {r['value']:>10.6f} {r['loss']:>10.6f} {r['bytes']:>12,} {r['tokens']:>12,}  {r['protocol']}"
        )


if __name__ == "__main__":
    exit_with_status(main)
