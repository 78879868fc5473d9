"""Summary of prepared data: the table of sources, and warnings where much of them is lost."""

from typing import Any

from pipeline.data.losses import loss_warnings, shares_lost, with_samples
from pipeline.data.plan import ROLES
from pipeline.data.preparation import streams_of
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.process.progress import short_count


def table(plan: dict) -> str:
    """Return one line per source: rows and tokens of the run, shares, what packing padded, cropped, cut or dropped."""
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
                    f"{100 * rows / total:.2f} %" if total else "-",
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
    held_out = recipe.data.validation or recipe.data.sources
    built_in = all((source.id or "").startswith("tandem:") for source in held_out)  # nobody can add to what is held out
    small = [] if built_in else validation.size_warnings(tokenizer)
    return [
        f"warning: {recipe.where(key)}: {line}"
        for key, lines in (("data.sources", lost), ("data.validation", small))
        for line in lines
    ]


def longest_row(recipe: Any) -> int | None:
    """Return the positions of a model that is there already; None for one that is made now, which can have any."""
    return recipe.model.n_positions if recipe.model.start_from else None
