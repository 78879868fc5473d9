"""Losses of packing by source: conversations fitted and counted while shards are made, and warnings at the start of a
run, of a preparation and of a plan where much is left out.

Counts come from the seals (stream.py). Shards that were sealed before longer conversations were counted by length say
how many were left out, and not which rows would have held them; then, and before anything is prepared, a sample is
rendered instead.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pipeline.data.preparation import ONE_TEXT, streams_of
from pipeline.data.stream import LOST, SAMPLE_FILE, Fit, Loss, Stream, epochs_of, losses_of, rows_seen, shares_lost
from pipeline.process.commands import program
from pipeline.process.errors import DataError
from pipeline.process.progress import short_count
from pipeline.process.storage import write_sealed_json
from pipeline.tokenizer.chat import render, rendered_talks
from pipeline.tokenizer.trained_share import missing_lines, missing_text, untrained_shares

if TYPE_CHECKING:
    from pipeline.data.rows import TrainingRows, ValidationRows

# Conversations fitted into rows, and what is counted of a source while its shards are made.

Rendered = tuple[list[int], list[bool]]
Render = Callable[[list[dict]], Rendered]


def fit_conversation(messages: list[dict], rendered: Rendered, render: Render, *, capacity: int, overflow: str):
    """(ids, trained, outcome) of a conversation that fits `capacity` ids and trains at least one; ids is None when
    dropped.

    rendered: the whole conversation. outcome: whole | cut (ends at its last assistant turn that fits) | too_long |
    no_target.
    """
    ids, trained = rendered
    if not any(trained):
        return None, None, "no_target"
    if len(ids) <= capacity:
        return ids, trained, "whole"
    if overflow == "drop":
        return None, None, "too_long"
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    up_to = cache(lambda end: render(messages[:end]))
    fitting = bisect(ends, capacity, key=lambda end: len(up_to(end)[0]))  # lengths grow with the turns
    if not fitting or not any(up_to(ends[fitting - 1])[1]):
        return None, None, "too_long"
    return *up_to(ends[fitting - 1]), "cut"


READ_COUNTS = {
    "text": ("documents", "text_tokens", "text_bytes", "empty_rows"),
    "chat": (
        "conversations",
        "text_tokens",
        "empty_rows",
        "cut",
        "too_long",
        "no_target",
        "cut_tokens",
        "too_long_tokens",
    ),
}
LENGTH_STEP = 64  # Tokens: finer advice on the length of a row is of no use, and the counts stay few.


def new_counts(kind: str) -> dict[str, Any]:
    """Return what is counted while a source is read, all 0. `longer` of conversations: by row length, those that need
    it."""
    return {**dict.fromkeys(READ_COUNTS[kind], 0), **({"longer": {}} if kind == "chat" else {})}


def count_conversation(counts: dict[str, Any], *, length: int, kept: int, outcome: str) -> None:
    """Add a conversation of `length` ids of which `kept` are trained, with the outcome of fit_conversation."""
    counts["conversations"] += 1
    counts["text_tokens"] += kept
    if outcome == "whole":
        return
    counts[outcome] += 1
    # Counts that an earlier version began have no lengths: those of a part would be taken for those of the whole.
    if outcome != "no_target" and "longer" in counts:
        counts[f"{outcome}_tokens"] += length - kept
        row = str(-(-(length - 1) // LENGTH_STEP) * LENGTH_STEP)
        counts["longer"][row] = counts["longer"].get(row, 0) + 1


# What was lost, counted or by a sample, in sentences.

MUCH = 0.01  # Of the conversations, or of the rows of the files.
MOST = 0.5  # Of the characters of the answers: what then is trained is something else.
SAMPLE = 2_000  # Conversations: a share of 1 % is then known to 0.2 %.
SMALL_SAMPLE = 500  # Of sources whose lengths are counted: what a template leaves out, it leaves out often.
SAMPLED_FILES = 16  # That a sample is spread over at least, where there are as many.
# What the empty rows of conversations are, beside those that an own format passes over.
NOTHING_TO_LEARN = "have nothing to learn from (no answer, an empty one, or turns in no order that a template renders)"
ENOUGH_BYTES = 100_000  # Of fewer, BPB differs by several per cent from one sample of text to another.


def fit_text(facts: dict[str, Any], row_tokens: int) -> str:
    """Return what of the conversations is lost, from Fit.facts, and the rows that would hold it."""
    read, dropped, cut = facts["read"], facts["too_long"], facts["cut"]
    longer = f"are longer than a row of {row_tokens:,} tokens and"
    text = (
        f"{_so_many(dropped or cut, read, 'conversations')} {longer} "
        f"{'left out' if dropped else 'lose their last turns'}"
    )
    if dropped and cut:
        text += f", {cut:,} ({100 * cut / read:.2f} %) lose their last turns"
    if "tokens_lost" in facts:
        text += f"; with them go {100 * facts['tokens_lost']:.1f} % of the tokens"
    if "row_tokens_99" in facts and (dropped or cut):
        how = f"by a sample of {facts['sampled']:,}" if "sampled" in facts else "counted in all of them"
        text += f". Rows of {facts['row_tokens_99']:,} would hold 99 % whole ({how})"
    return text


def _so_many(part: int, whole: int, what: str) -> str:
    return f"{part:,} of {whole:,} {what} ({100 * part / max(1, whole):.2f} %)"


def with_samples(plan: dict, stream: Stream, *, sources: list[Any], tokenizer: Any) -> list[Loss]:
    """losses_of the training sources; of conversations with the characters that a sample trains, which is kept beside
    the shards, and with its lengths where too few are read yet to tell, or much is lost of shards that were sealed
    without them."""
    found = losses_of(plan, "train", stream)
    for number, (loss, sequence) in enumerate(zip(found, stream.sequences, strict=True)):
        if plan["kind"] != "chat" or (fit := loss.fit) is None:
            continue
        settings = plan["train"]["sequences"][number]["settings"]
        about = {"row_tokens": plan["row_tokens"], "overflow": settings["max_row_overflow"]}
        is_begun = sequence.end is None and fit.read < SAMPLE
        has_lengths = fit.longer is not None or max(fit.too_long, fit.cut) <= MUCH * fit.read
        if fit.characters is None or is_begun or not has_lengths:
            most = SAMPLE if is_begun or not has_lengths else SMALL_SAMPLE
            sample = sampled_counts(sources[number], tokenizer, **about, most=most)
            with suppress(OSError):  # a cache on a disk that is only read
                write_sealed_json(sequence.folder / SAMPLE_FILE, sample)
            fit = Fit.counted(loss.counts, row_tokens=plan["row_tokens"], sample=sample)
            found[number] = loss._replace(fit=_fit_of(sample, plan["row_tokens"]) if is_begun else fit)
    return found


def sampled_fit(source: Any, tokenizer: Any, *, row_tokens: int, overflow: str) -> Fit:
    """Return how a sample of conversations would fit rows of that length, before anything is prepared."""
    return _fit_of(sampled_counts(source, tokenizer, row_tokens=row_tokens, overflow=overflow), row_tokens)


def _fit_of(sample: dict[str, Any], row_tokens: int) -> Fit:
    return replace(Fit.counted(sample, row_tokens=row_tokens), sampled=sample["conversations"])


def sampled_counts(
    source: Any, tokenizer: Any, *, row_tokens: int, overflow: str, most: int = SAMPLE
) -> dict[str, Any]:
    """Return counts of the first `most` conversations, or of all there are, spread over the source's files that lie
    here."""
    counts = new_counts("chat")
    talks: list[Any] = []
    for block in _spread_blocks(source, most):
        talks += block[: most - len(talks)]
        if len(talks) >= most:
            break
    all_rendered = rendered_talks(tokenizer, talks)
    counts["characters"] = characters = trained_characters(tokenizer, talks, all_rendered)
    counts["untrained"] = sum(untrained_shares(characters).values()) if characters else None
    for talk, rendered in zip(talks, all_rendered, strict=True):
        if isinstance(rendered, DataError):
            continue
        ids, _, outcome = fit_conversation(
            talk.messages,
            rendered,
            partial(render, tokenizer, tools=talk.tools),
            capacity=row_tokens + 1,
            overflow=overflow,
        )
        count_conversation(counts, length=len(rendered[0]), kept=0 if ids is None else len(ids), outcome=outcome)
    return counts


def trained_characters(tokenizer: Any, talks: list[Any], rendered: list[Any]) -> Counter[str]:
    """Return the sums of missing_text over the conversations that the template renders."""
    counts = Counter[str]()
    for talk, one in zip(talks, rendered, strict=True):
        if not isinstance(one, DataError):
            counts.update(missing_text(tokenizer, talk.messages, *one, tools=talk.tools))
    return counts


def _spread_blocks(source: Any, most: int) -> Iterator[list[Any]]:
    """Yield conversations of the files that lie here, from all over the list first, at most their part of the sample
    at once."""
    # The first one has been fetched by the process that prepares rows, or is now.
    here = [n for n, file in enumerate(source.files) if file.path is not None and not file.order] or [0]
    first = [here[len(here) * n // SAMPLED_FILES] for n in range(SAMPLED_FILES)] if len(here) > SAMPLED_FILES else here
    part = -(-most // max(1, len(first)))
    later: list[Iterator[list[Any]]] = []
    for number in [*first, *(number for number in here if number not in set(first))]:
        blocks = (block.items for block in source.read_file(number))
        taken: list[Any] = []
        for items in blocks:
            taken += items
            if len(taken) >= part:
                break
        yield taken[:part]
        later.append(iter([taken[part:]]))
        later.append(blocks)
    for rest in later:  # Few files: what is left of each, in order.
        yield from rest


def loss_warnings(loss: Loss, *, longest_row: int | None = None) -> list[str]:
    """Return what is lost of a source where it is more than MUCH, a sentence or two each. longest_row: of the
    model."""
    lines, (name, counts, fit) = [], loss
    if fit is not None and max(fit.too_long, fit.cut) > MUCH * fit.read:
        lines.append(f"{fit_text(fit.facts(), fit.row_tokens)}. {_advice(fit, longest_row)}")
    if fit is not None and fit.no_target > MUCH * fit.read:
        lines.append(
            f"{_so_many(fit.no_target, fit.read, 'conversations')} have no answer of the assistant and are left out. "
            "Look at their roles, and at `format`."
        )
    seen = rows_seen(counts)
    for kind, what in (("empty_rows", NOTHING_TO_LEARN if fit else "are empty"), ("bad_rows", "are unreadable")):
        if counts.get(kind, 0) > MUCH * seen:
            lines.append(
                f"{_so_many(counts[kind], seen, 'rows')} {what} and left out. Look into the files ({program('data')} "
                "FILE), or name another column."
            )
    return [f"{name}: {line}" for line in lines]


def untrained_lines(recipe: Any, losses: list[Loss], tokenizer: Any, *, refuse: bool = True) -> list[str]:
    """Return what the answers of each source say that is not trained, above a share of MUCH. Raises DataError above
    MOST."""
    lines, refused = [], []
    for name, _, fit in losses:
        if fit is None or fit.characters is None:
            continue
        found = [f"{name}: {line}" for line in missing_lines(tokenizer, fit.characters, least=MUCH)]
        lines += found
        if (fit.untrained or 0) > MOST:
            refused += found
    if refused and refuse:
        raise DataError("\n".join(f"{recipe.where('data.sources')}: {line}" for line in refused))
    return lines


def _advice(fit: Fit, longest_row: int | None) -> str:
    wanted = fit.row_tokens_for()
    if wanted is None:
        return "Set data.row_tokens higher."
    if longest_row is not None and wanted > longest_row:
        beyond = fit.share_beyond(longest_row) or 0.0
        raised = (
            f": with data.row_tokens {longest_row} still {100 * beyond:.1f} % are longer"
            if longest_row > fit.row_tokens
            else ""
        )
        return f"The model holds {longest_row:,} positions{raised}. Split the longer ones in the files."
    return (
        f"Set data.row_tokens to {wanted} or more (data.batch_tokens is a multiple of it), or split the longer ones "
        "in the files."
    )


def nothing_left(losses: list[Loss]) -> str:
    """Return why no row came of the sources: what was read of each, and left out."""
    lines, rows = [], []
    for name, counts, fit in losses:
        left_out = {
            f"too long for a row of {fit.row_tokens:,} tokens" if fit else "": counts.get("too_long", 0),
            "without an answer of the assistant": counts.get("no_target", 0),
            "with nothing to learn from" if fit else "empty rows": counts.get("empty_rows", 0),
            "unreadable rows": counts.get("bad_rows", 0),
        }
        what = "conversations" if fit else "documents"
        reasons = [f"{n:,} {reason}" for reason, n in left_out.items() if n]
        lines.append(f"{name}: {counts.get(what, 0):,} {what}, {', '.join(reasons) or 'none left out'}")
        if fit and fit.too_long and (wanted := fit.row_tokens_for()):
            rows.append(wanted)
    advice = (
        f"Set data.row_tokens to {max(rows)}, which holds 99 % of the conversations."
        if rows
        else "Look into the files."
    )
    return f"{'; '.join(lines)}. {advice}"


# Summary of prepared data: the table of sources, and warnings where much of them is lost.


def table(plan: dict) -> str:
    """Return one line per source: rows and tokens of the run, shares, what packing padded, cropped, cut or dropped."""
    chat = plan["kind"] == "chat"
    what = "conversations" if chat else "documents"
    lost = (*LOST[plan["kind"]], "empty")
    lines = [("", "source", "rows", "tokens", "share", "epochs", "padded", *lost, "bad rows", "text prepared")]
    streams = streams_of(plan)
    for role, stream in reversed(streams.items()):
        total = stream.mixture.total_rows or 0
        used = stream.mixture.used(total)
        for s, (about, sequence, rows) in enumerate(zip(plan[role]["sequences"], stream.sequences, used, strict=True)):
            sums = sequence.totals(stream.shards_needed(s))
            shares = shares_lost(sums, kind=plan["kind"])
            text = f"{sums.get(what, 0):,} {what}"
            if not chat:
                text += f", {sums.get('text_bytes', 0) / max(1, sums.get('text_tokens', 0)):.2f} bytes/token"
            epochs = epochs_of(about, sequence, rows)
            lines.append(
                (
                    role,
                    about["name"],
                    f"{rows:,}",
                    short_count(rows * plan["row_tokens"]),
                    f"{100 * rows / total:.2f} %" if total else "-",
                    "< 1" if epochs is None else f"{epochs:.2f}",
                    *(f"{100 * shares[name]:.2f} %" if name in shares else "-" for name in ("padded", *lost)),
                    f"{sums['bad_rows']:,}",
                    text,
                )
            )
    return "\n".join(aligned(lines))


def aligned(lines: Collection[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose cells stand one below the other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def warning_lines(
    recipe: Any,
    rows: "TrainingRows",
    validation: "ValidationRows",
    *,
    sources: list[Any],
    tokenizer: Any,
    has_begun: bool = False,
) -> list[str]:
    """Return what is lost of the training sources, where it is much, and that validation is small, where it is.

    Raises DataError where most of the answers would not be trained, but for a run that has begun.
    """
    losses = with_samples(rows.plan, rows.stream, sources=sources, tokenizer=tokenizer)
    lost = untrained_lines(recipe, losses, tokenizer, refuse=not has_begun)
    lost += [line for loss in losses for line in loss_warnings(loss, longest_row=longest_row(recipe))]
    held_out = recipe.data.validation or recipe.data.sources
    # Nobody can add to what is held out
    built_in = all((source.id or "").startswith("tandem:") for source in held_out)
    small = [] if built_in else size_warnings(validation, tokenizer)
    return [
        f"warning: {recipe.where(key)}: {line}"
        for key, lines in (("data.sources", lost), ("data.validation", small))
        for line in lines
    ]


def longest_row(recipe: Any) -> int | None:
    """Return the positions of a model that is there already; None for one that is made now, which can have any."""
    return recipe.model.n_positions if recipe.model.start_from else None


def size_warnings(validation: "ValidationRows", tokenizer: Any) -> list[str]:
    """Return what to say of a validation too small to compare by: none of its numbers is over enough text."""
    scored = validation.scored_bytes(tokenizer)
    if not scored or max(scored.values()) >= ENOUGH_BYTES:
        return []
    text, rows = size_text(scored), validation.num_rows()
    if rows < validation.plan["validation"]["total_rows"]:
        return [f"{text} Name more in data.validation."]
    return [f"{text} evals.bpb.tokens asks for no more than these {rows:,} rows: raise it."]


def size_text(scored: dict[str, int]) -> str:
    """Say that so many bytes (scored_bytes) are few."""
    name, count = max(scored.items(), key=lambda pair: pair[1])
    return (
        f"{name} is over {count:,} bytes, fewer than {ENOUGH_BYTES:,}: differences between runs and steps are mostly "
        "chance."
    )


def padding_notes(plan: dict, shares: dict[str, dict]) -> list[str]:
    """Return how much of rows of one text each is padding. shares: of TrainingRows."""
    if plan["train"]["sequences"][0]["settings"].get("packing") != ONE_TEXT:
        return []
    rows = sum(share["rows"] for share in shares.values())
    padded = sum(share["rows"] * share["lost"].get("padded", 0.0) for share in shares.values()) / max(1, rows)
    return [
        (
            f"note: {100 * padded:.0f} % of the positions of these rows are padding: data.row_tokens nearer to the "
            "texts' lengths wastes less"
        )
    ]
