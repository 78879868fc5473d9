"""Bits per byte of texts, documents and conversations: `python -m pipeline.evals RUN bpb`."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from pipeline.data.losses import fit_conversation
from pipeline.evals.bpb import IGNORED, bits_per_byte, by_source
from pipeline.evals.subject import Subject
from pipeline.generation.texts import complete
from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, Protocol, Results, digest
from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.process.storage import cache_of_run
from pipeline.process.user_code import COMMAND_TRUST, CodeFolder
from pipeline.recipe.schema import Recipe, Samples, Source, with_values
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.formats import format_of
from pipeline.sources.patterns import local_files
from pipeline.sources.raw_rows import BadRow, read_blocks
from pipeline.sources.recognition import first_rows, recognise
from pipeline.sources.verify import check_file
from pipeline.tokenizer.chat import render, render_batch
from pipeline.tokenizer.coverage import coverage, require_coverage, span_byte_lengths
from pipeline.tokenizer.encode import byte_lengths, document_start, encode_documents, is_byte_level

SHOWN = 10


@dataclass(frozen=True)
class FilePart:
    """The part of a file that is scored: documents or conversations, and of text its bytes. complete: all of it; false
    where a limit came before its end. of_bytes: size of the file."""

    label: str
    items: int
    bytes: int
    complete: bool
    of_bytes: int


def read_texts(patterns: list[str], *, max_bytes: int) -> tuple[list[str], list[FilePart]]:
    """Return whole documents of the files in sorted order, at least max_bytes bytes of UTF-8, and what was taken of
    each file."""
    return _items(patterns, kind="text", option="--text", limit=max_bytes, size=lambda text: len(text.encode()))


def _print_left_out(files: list[FilePart], *, limit: str) -> None:
    """Print the files that are scored in part or not at all. limit: the option that cuts."""
    for file in files:
        if not (file.complete and file.items):
            print(f"{file.label}: not all of it is scored, {file.bytes:,} of {file.of_bytes:,} bytes ({limit})")


def _items(
    patterns: list[str], *, kind: Any, option: str, limit: int, size: Callable[[Any], int]
) -> tuple[list[Any], list[FilePart]]:
    """Return the first items of the files in sorted order, and what was taken of each file."""
    files = local_files(patterns, where=option, folder=None)
    form = format_of(Source(files=patterns), kind=kind, where=option, folder=None)
    found = recognise(first_rows(files), kind=kind)
    if found:
        if not found.format:
            raise DataError(f"{option}: {files[0].label} {found.refusal}")
        form = found.format
    read_row = form.reader()
    items: list[Any] = []
    parts: list[FilePart] = []
    bad: list[str] = []
    total = 0
    for file in files:
        path, first, before, complete = file.local_path(), len(items), total, total < limit
        rows: Iterable[Any] = ()
        if complete:
            problems = check_file(path, form, column_key=option).problems
            if problems:
                raise DataError(f"{option}: {problems[0]}")
            rows = chain.from_iterable(read_blocks(path, columns=form.read_columns))
        for _, row, value in rows:
            if total >= limit:
                complete = False
                break
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = read_row(value)
            except ValueError as error:
                bad.append(f"{file.label}: row {row}: {error}")
                continue
            if item:
                items.append(item)
                total += size(item)
        counted = total - before if kind == "text" else 0
        parts.append(FilePart(file.label, len(items) - first, counted, complete, path.stat().st_size))
    if bad:
        shown = bad[:SHOWN]
        if len(bad) > SHOWN:
            shown.append(f"and {len(bad) - SHOWN} more")
        raise DataError(
            f"{option}: {len(bad)} bad rows, so the figure would not be of the text that was named:\n  "
            + "\n  ".join(shown)
            + "\nCorrect them, or name other files."
        )
    if not items:
        raise InputMissingError(
            f"{option}: {', '.join(map(str, map(Path, patterns)))} hold no text, so nothing can be scored."
        )
    return items, parts


def sources_of_run(run: RunDirectory, *, trust_code: bool = False) -> tuple[Recipe, tuple[list[Any], list[Any]]]:
    """Return the run's recipe, and its (training, validation) sources; Hub datasets at the commits, and the files
    held out, that it began with.

    trust_code: whether a format that the recipe names as module:attr is run: the recipe may be somebody else's.
    """
    import pipeline.model.build  # noqa: F401 - else transformers warns of a tokenizer with a model that it does not know
    from pipeline.recipe import read_recipe
    from pipeline.sources.open import open_sources, with_recorded_inputs

    recipe = read_recipe([str(run.recipe)], earlier=EarlierRuns())
    why = f"{run.recipe} belongs to a run, which may have come from elsewhere"
    folder = recipe.run.code_folder if trust_code else None
    code = CodeFolder(folder, trusted=trust_code, trust_with=COMMAND_TRUST, closed=why)
    recipe = with_values(recipe, {"code": code, "data.cache_dir": str(cache_of_run(recipe.data.cache_dir))})
    data = with_recorded_inputs(recipe.data, run.read_manifest().get("inputs") or {})
    recipe = with_values(recipe, {"data": data})
    return recipe, open_sources(recipe.source_settings())


def held_out_rows(run: RunDirectory, tokenizer: Any, *, trust_code: bool = False) -> Any:
    """Return the ValidationRows of the run's recipe, prepared first when the cache does not have them; nothing is
    trained on.

    Raises what the recipe and the sources raise when the text is no longer there or was changed.
    """
    from pipeline.data.preparation import Preparation
    from pipeline.data.prepare import ShardBuilder
    from pipeline.data.row_plan import locks, plan_rows
    from pipeline.data.validation import ValidationRows, held_out_coverage
    from pipeline.recipe.dial import row_settings

    if not run.recipe.exists():
        raise InputMissingError(
            f"{run.recipe}: missing, so the run's validation text is unknown. Name text with --text."
        )
    recipe, sources = sources_of_run(run, trust_code=trust_code)
    plan = {**plan_rows(row_settings(recipe), tokenizer, sources=sources), "train": None}
    # Only what the cache does not have is made.
    with locks(plan):
        for _ in ShardBuilder(plan, tokenizer, sources=sources).prepare():
            pass
    rows = ValidationRows(Preparation(plan))
    rows.coverage = held_out_coverage(tokenizer, sources[1])
    return rows


DOCUMENTS_RULE = 1  # raise it when the same texts under the same window give another figure


def documents_protocol(
    texts: Iterable[str], *, window: int, scored_bytes: int, coverage: float, dtype: str
) -> Protocol:
    """Return the protocol of these documents in this order, the same for any tokenizer that keeps the text and any
    rows of a batch. scored_bytes, coverage: under this tokenizer."""
    return Protocol(
        {
            "score": "documents",
            "texts": digest([digest(text) for text in texts]),
            "bytes": scored_bytes,
            "window": window,
            "stride": "window",
            "bos": "each piece",
            "dtype": dtype,
            "coverage": coverage,
            "rule": DOCUMENTS_RULE,
        }
    )


def document_batches(tokenizer, texts: list[str], *, window: int, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return batches of up to `rows` pieces of at most `window` targets, longest first, with `target_bytes`.

    A document longer than the window is cut, and every piece begins with BOS as in training, so that no text token is
    lost as a first input. Raises DataError when the tokenizer has no token to begin with.
    """
    start = document_start(tokenizer)
    if start is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so the first token of a text cannot be scored. Set "
            "bos_token in its tokenizer_config.json."
        )
    pieces = []
    for ids, lengths in _encoded(tokenizer, texts):
        for first in range(0, len(ids), window):
            own = slice(first, first + window)
            # Every token is a target once; the input of the first one is BOS, the last one is no input.
            inputs = np.insert(ids[own][:-1], 0, start)
            pieces.append({"input_ids": inputs, "shift_labels": ids[own], "target_bytes": lengths[own]})
    return _batches(pieces, rows=rows, padding={"input_ids": start, "shift_labels": IGNORED, "target_bytes": -1})


def _encoded(tokenizer, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of each text and the bytes under each of them; control strings in a text are text."""
    if is_byte_level(tokenizer):
        lengths_V = byte_lengths(tokenizer)
        for ids in encode_documents(tokenizer, texts):
            yield ids.astype(np.int64), lengths_V[ids].astype(np.int64)
    else:
        for text in texts:
            spans = span_byte_lengths(tokenizer, text)
            yield np.array(spans[0], np.int64), np.array(spans[1], np.int64)


def _batches(
    pieces: list[dict[str, np.ndarray]], *, rows: int, padding: dict[str, int]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the pieces, arrays of (T,) by name, longest first: rows of a batch are about equally long, with little
    padding."""
    pieces.sort(key=lambda piece: -len(piece["input_ids"]))
    for first in range(0, len(pieces), rows):
        some = pieces[first : first + rows]
        batch = {}
        for name, value in padding.items():
            tensors = [torch.from_numpy(piece[name]) for piece in some]
            batch[name] = pad_sequence(tensors, batch_first=True, padding_value=value)
        yield batch


CONVERSATIONS_RULE = 1  # raise it when the same conversations under the same window give another figure


def conversations_protocol(
    tokenizer, conversations: list[list[dict]], *, window: int, scored_bytes: int, coverage: float, dtype: str
) -> Protocol:
    """Return the protocol of what the assistant says, with the template that puts the conversations before the model.

    A shorter window cuts long conversations, which is another text: its scored_bytes are fewer.
    """
    texts = []
    for messages in conversations:
        tools = getattr(messages, "tools", None)
        texts.append(digest([messages, tools] if tools else messages))
    return Protocol(
        {
            "score": "assistant",
            "texts": digest(texts),
            "bytes": scored_bytes,
            "window": window,
            "stride": "each conversation",
            "bos": "as the template",
            "template": digest(str(tokenizer.chat_template)),
            "dtype": dtype,
            "coverage": coverage,
            "rule": CONVERSATIONS_RULE,
        }
    )


def conversation_batches(
    tokenizer, conversations: list[list[dict]], *, window: int, rows: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Return batches of up to `rows` conversations, one a row, longest first; targets are what the assistant writes.

    A conversation longer than the window is cut at its last whole turn that fits, else left out, as in training.
    Raises DataError when the tokenizer has no chat template or no conversation fits.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be put before the model. Score text with "
            "--text."
        )
    fitted, outcomes = [], set()
    tools = [getattr(messages, "tools", None) for messages in conversations]
    all_rendered = render_batch(tokenizer, conversations, tools=tools)
    for messages, its_tools, rendered in zip(conversations, tools, all_rendered, strict=True):
        # As training packs it, in a row of one more token than the window has targets.
        ids, trained, outcome = fit_conversation(
            messages, rendered, partial(render, tokenizer, tools=its_tools), capacity=window + 1, overflow="cut"
        )
        outcomes.add(outcome)
        if ids is not None:
            targets = np.where(trained[1:], ids[1:], IGNORED)
            fitted.append({"input_ids": np.array(ids[:-1], np.int64), "shift_labels": targets.astype(np.int64)})
    if outcomes == {"no_target"}:
        raise DataError(
            f"nothing in the {len(conversations)} conversations is the assistant's by the tokenizer's chat template, "
            "which marks it with {% generation %} ... {% endgeneration %}, so no answer can be scored. Mark it there, "
            "or score text with --text."
        )
    if not fitted:
        raise DataError(
            f"none of the {len(conversations)} conversations has an answer within {window} tokens, so nothing can be "
            "scored. Give shorter ones."
        )
    return _batches(fitted, rows=rows, padding={"input_ids": 0, "shift_labels": IGNORED})


SAMPLE_TOKENS = 64
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50}


def sample_texts(model, tokenizer, *, chat: bool, prompts: list[str] | None = None) -> Results:
    """Return rows of prompt, text, chat and the settings that made them; the same on every call. Default prompts: the
    recipe's."""
    prompts = prompts or Samples().prompts
    rows = []
    for settings in (GREEDY, SAMPLED):
        texts = complete(model, tokenizer, prompts, chat=chat, max_new_tokens=SAMPLE_TOKENS, seed=0, **settings)
        for prompt, text in zip(prompts, texts, strict=True):
            rows.append({"prompt": prompt, "text": text, "chat": chat, **settings})
    return rows


WINDOW = 2048  # Targets of a piece, unless the model or the command says less.


def require_text(subject: Subject, arguments: argparse.Namespace) -> None:
    """Raise RecipeError when there is no text to score: none is named and the subject is no run."""
    if subject.run is None and not (arguments.text or arguments.chat):
        raise RecipeError(
            f"command line: {subject.path} is no run here, so its bits per byte have no text. Name a run, or text with "
            "--text FILE."
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
) -> Results:
    """Return every bits-per-byte figure that was asked for: of --text and --chat, else of the run's own validation.

    Computed in --dtype, else a run's own validation in what the run was trained in, any other text in float32.
    """
    rows = arguments.batch_rows
    figures: list[Figure] = []
    if arguments.text or arguments.chat:
        dtype = arguments.dtype or "float32"
        window = _window(model, arguments.window)
        if arguments.text:
            figures.append(_of_texts(tokenizer, arguments, window=window))
        if arguments.chat:
            figures.append(_of_conversations(tokenizer, arguments, window=window))
    elif subject.run is not None:
        dtype = arguments.dtype or dtype_of_run(subject.run)
        figures = _of_validation(subject.run, subject.stage, tokenizer, trust_code=subject.trust_code)

    results: Results = []
    for name, protocol, lengths, batches, more in figures:
        # Each rank scores every world_size-th batch, and the sums are over all ranks.
        names = more.pop("sources", [])
        mine = islice(batches(rows=rows), rank, None, world_size)
        autocast_dtype = None if dtype == "float32" else getattr(torch, dtype)
        score = bits_per_byte(model, mine, lengths, device=device, autocast_dtype=autocast_dtype, sources=len(names))
        scored_on = protocol(scored_bytes=score.bytes, dtype=dtype)
        sums = {"loss": score.loss, "bytes": score.bytes, "tokens": score.tokens}
        results.append({"name": name, "value": score.bpb, **scored_on.row(), **sums, "dtype": dtype, **more})
        for of_source, bpb in by_source(name, score, names).items():
            protocol_of_source = scored_on.having(source=of_source.rpartition("/")[2])
            results.append({"name": of_source, "value": bpb, **protocol_of_source.row()})
    return results


# Name, protocol by scored_bytes and dtype, bytes per id, batches by rows, more to record.
Figure = tuple[str, Callable[..., Protocol], Any, Callable[..., Any], dict[str, Any]]


def _of_texts(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:
    texts, files = read_texts(arguments.text, max_bytes=arguments.max_bytes)
    kept = coverage(tokenizer, texts)
    require_coverage(kept, where="--text")
    _print_left_out(files, limit=f"--max-bytes {arguments.max_bytes}")
    return (
        "text/bpb_documents",
        partial(documents_protocol, texts, window=window, coverage=kept),
        None,
        partial(document_batches, tokenizer, texts, window=window),
        {"window": window, "documents": len(texts), "files": [asdict(file) for file in files]},
    )


def _of_conversations(tokenizer, arguments: argparse.Namespace, *, window: int) -> Figure:
    limit = arguments.max_conversations
    conversations, files = _items(arguments.chat, kind="chat", option="--chat", limit=limit, size=lambda messages: 1)
    messages = chain.from_iterable(conversations)
    kept = coverage(tokenizer, (str(message.get("content") or "") for message in messages))
    require_coverage(kept, where="--chat")
    _print_left_out(files, limit=f"--max-conversations {limit}")
    return (
        "text/assistant_bpb",
        partial(conversations_protocol, tokenizer, conversations, window=window, coverage=kept),
        _byte_lengths(tokenizer),
        partial(conversation_batches, tokenizer, conversations, window=window),
        {"window": window, "conversations": len(conversations), "files": [asdict(file) for file in files]},
    )


def _of_validation(run: RunDirectory, stage: str | None, tokenizer, *, trust_code: bool) -> list[Figure]:
    held_out = held_out_rows(run, tokenizer, trust_code=trust_code)
    require_coverage(held_out.coverage, where=f"{run.path}: its validation text")
    lengths = None
    if stage == "sft" or is_byte_level(tokenizer):  # else rows of text carry their targets' bytes
        lengths = _byte_lengths(tokenizer)
    batches = {SFT_BPB if stage == "sft" else VAL_BPB: held_out.batches}
    if held_out.has_documents:
        batches[VAL_BPB_DOCUMENTS] = held_out.document_batches
    figures: list[Figure] = []
    for name, of_rows in batches.items():
        figures.append((name, partial(held_out.protocol, name), lengths, of_rows, {"sources": held_out.sources}))
    return figures


def dtype_of_run(run: RunDirectory) -> str:
    """Return what the run computes its own validation in. Under float8 that is bfloat16: only its steps multiply in
    less."""
    dtype = (run.read_manifest().get("shape") or {}).get("dtype") or "float32"
    return "bfloat16" if dtype == "float8" else str(dtype)


def _byte_lengths(tokenizer) -> Any:
    try:
        return byte_lengths(tokenizer)
    except ValueError as error:
        raise DataError(f"{tokenizer.name_or_path}: {error}. Score plain text instead: --text FILE.") from None


def _window(model, asked: int | None) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    if asked is not None and asked > positions:
        raise RecipeError(
            f"command line: --window {asked} is more than the model's {positions} positions. Give at most {positions}."
        )
    return asked or min(positions, WINDOW)


def print_figures(results: Results) -> None:
    """Print a line for each figure, then one for each protocol: what it is made of."""
    print(f"{'metric':<20} {'value':>10} {'loss':>10} {'bytes':>12} {'targets':>12}  protocol")
    for r in results:
        counts = f"{r['loss']:>10.6f} {r['bytes']:>12,} {r['tokens']:>12,}" if "loss" in r else " " * 36
        print(f"{r['name']:<20} {r['value']:>10.6f} {counts}  {r['protocol']}")
    for id_, protocol in {r["protocol"]: Protocol.of(r) for r in results}.items():
        print(f"{id_}: {protocol}")
