"""What was prepared, for people: the table of sources, and rows with their trained tokens marked."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pipeline.data.batches import bits
from pipeline.data.losses import loss_warnings, percent, shares_lost, with_samples
from pipeline.data.plan import ROLES
from pipeline.data.prepare import short_count
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.data.work import streams_of

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def table(plan: dict) -> str:
    """One line per source: rows and tokens of the run, shares, what packing padded, cropped, cut or dropped."""
    chat = plan["kind"] == "chat"
    lost = (*(("cut", "too long", "no target") if chat else ("cropped", "split")), "empty")
    lines = [("", "source", "rows", "tokens", "share", "epochs", "padded", *lost, "bad rows", "text")]
    streams = streams_of(plan)
    for role in reversed(ROLES):
        if role not in streams:
            continue
        stream = streams[role]
        total = stream.mixture.total_rows or 0
        used = stream.mixture.used(total) if total else [0] * len(stream.sequences)
        for s, (about, sequence, rows) in enumerate(zip(plan[role]["sequences"], stream.sequences, used, strict=True)):
            sums = sequence.totals(stream.shards_needed(s))
            read = sums.get("conversations" if chat else "documents", 0)
            shares = shares_lost(sums, chat=chat)
            text = f"{read:,} conversations" if chat else f"{read:,} documents"
            if not chat:
                text += f", {sums.get('text_bytes', 0) / max(1, sums.get('text_tokens', 0)):.2f} bytes/token"
            epochs = f"{rows / sequence.rows:.2f}" if sequence.end is not None and sequence.rows else "< 1"
            lines.append(
                (
                    role,
                    about["name"],
                    f"{rows:,}",
                    short_count(rows * plan["row_tokens"]),
                    percent(rows, total),
                    epochs,
                    *(f"{100 * shares[name]:.2f} %" if name in shares else "-" for name in ("padded", *lost)),
                    f"{sums['bad_rows']:,}",
                    text,
                )
            )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def warning_lines(
    recipe: Any, rows: TrainingRows, validation: ValidationRows, *, sources: list[Any], tokenizer: Any
) -> list[str]:
    """Return what is lost of the training sources, where it is much, and that validation is small, where it is."""
    losses = with_samples(rows.plan, rows.stream, sources=sources, tokenizer=tokenizer)
    lost = [line for loss in losses for line in loss_warnings(loss, longest_row=longest_row(recipe))]
    small = validation.size_warnings(tokenizer)
    return [
        f"warning: {recipe.where(key)}: {line}"
        for key, lines in (("data.sources", lost), ("data.validation", small))
        for line in lines
    ]


def longest_row(recipe: Any) -> int | None:
    """Positions of a model that is there already; one that is made now can have any."""
    return recipe.model.n_positions if recipe.model.start_from else None


def shown_rows(rows: TrainingRows, tokenizer: Any, *, count: int, colour: bool) -> Iterator[str]:
    """The first rows of the run as text. Trained tokens are green, or in [[ ]] without colour; padding is only counted."""
    names = rows.plan["train"]["sequences"]
    for number in range(min(count, rows.total_rows())):
        step, at = divmod(number, rows.rows_per_step)
        place = rows.places(step)[at]
        shard = rows.stream.shard(place)
        used = int(shard.used[place.row])
        ids = shard.input_ids[place.row][:used].tolist()
        trained = [False] + [True] * (used - 1)
        if shard.trained is not None:
            trained = bits(shard.trained[place.row], rows.row_tokens + 1)[:used].tolist()
            trained[0] = False
        pq, rg, row = shard.origins[place.row].tolist()
        head = (
            f"row {number}: {names[place.source]['name']} pq {pq} rg {rg} row {row}, {used} of {rows.row_tokens + 1} positions used, "
            f"{int(shard.targets[place.row])} trained"
        )
        yield f"{DIM}{head}{PLAIN}" if colour else head
        yield marked(tokenizer, ids, trained, colour=colour)


def marked(tokenizer: Any, ids: list[int], trained: list[bool], *, colour: bool) -> str:
    """The text of the ids, what is trained in green, or in [[ ]] without colour."""
    parts = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([i for i, _ in group], skip_special_tokens=False)
        parts.append(text if not is_trained else f"{GREEN}{text}{PLAIN}" if colour else f"[[{text}]]")
    return "".join(parts)
