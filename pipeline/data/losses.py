"""Shares that packing pads, crops, cuts or leaves out of each source, and sentences where it is much.

Counts come from the seals, and are those of all that was read up to a shard. Shards that were sealed before longer
conversations were counted by length say how many were left out, and not which rows would have held them; then, and
before anything is prepared, a sample is rendered instead.
"""

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from pipeline.data.stream import Stream
from pipeline.process.commands import program
from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.storage import read_sealed_json, write_sealed_json
from pipeline.tokenizer.chat import render, rendered_talks

MUCH = 0.01  # Of the conversations, or of the rows of the files.
HELD = 0.99  # Of the conversations, by the row length that is advised.
SAMPLE = 2_000  # Conversations: a share of 1 % is then known to 0.2 %.
SAMPLED_FILES = 16  # That a sample is spread over at least, where there are as many.
# What the empty rows of conversations are, beside those that an own format passes over.
NOTHING_TO_LEARN = "have nothing to learn from (no answer, an empty one, or turns in no order that a template renders)"
SAMPLE_FILE = "sampled_lengths.json"  # In a sequence's folder.


# By the kind of rows, what may be lost, as its count and what that is a share of.
LOST = {
    "text": {"cropped": ("cropped_tokens", "text_tokens"), "split": ("split_documents", "documents")},
    "chat": {name: (name.replace(" ", "_"), "conversations") for name in ("cut", "too long", "no target")},
}


def shares_lost(totals: dict[str, Any], *, kind: str) -> dict[str, float]:
    """Shares by name from the sums of a sequence's shards (sequence.totals); without what nothing was read of.

    padded: of the positions. Those of LOST. empty, bad: of the rows of the files.
    """
    shares = {"padded": totals["padded"] / totals["positions"]} if totals["positions"] else {}  # which hold the padding
    for name, (part, whole) in LOST[kind].items():
        if totals.get(whole):
            shares[name] = totals.get(part, 0) / totals[whole]
    if seen := rows_seen(totals):
        shares |= {name: totals.get(f"{name}_rows", 0) / seen for name in ("empty", "bad")}
    return shares


def rows_seen(totals: dict[str, Any]) -> int:
    """Return rows of the files that were read, empty and unreadable ones included."""
    items = totals.get("conversations", totals.get("documents", 0))
    return items + totals.get("empty_rows", 0) + totals.get("bad_rows", 0)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Counts of how the conversations of a source fit its rows.

    read: those looked at. too_long: left out, cut: without their last turns, no_target: left out since no assistant
    speaks. tokens_lost: share of the tokens that went with the too long and the cut ones. longer: of `of` conversations,
    those too long or cut by the row length that holds them (count_conversation). Both None where no length is known.
    sampled: of how many conversations these two are, where not of those read.
    """

    read: int
    too_long: int
    cut: int
    no_target: int
    row_tokens: int
    tokens_lost: float | None = None
    longer: dict[int, int] | None = None
    of: int = 0
    sampled: int | None = None

    @classmethod
    def counted(cls, counts: dict[str, Any], *, row_tokens: int, sample: dict[str, Any] | None = None) -> "Fit":
        """From the counts of what was read; the lengths are the sample's where the counts have none."""
        lengths = counts if "longer" in counts else sample
        known: dict[str, Any] = {}
        if lengths is not None:
            gone = lengths["too_long_tokens"] + lengths["cut_tokens"]
            known["tokens_lost"] = gone / max(1, lengths["text_tokens"] + gone)
            known["longer"] = {int(row): n for row, n in lengths["longer"].items()}
            known["of"] = lengths["conversations"] - lengths["no_target"]
            known["sampled"] = lengths["conversations"] if lengths is sample else None
        outcomes = {name: counts[name] for name in ("too_long", "cut", "no_target")}
        return cls(read=counts["conversations"], row_tokens=row_tokens, **outcomes, **known)

    def row_tokens_for(self, share: float = HELD) -> int | None:
        """Return the shortest rows that hold this share of the conversations whole; None where that is not known."""
        if self.longer is None or not self.of:
            return None
        beyond = 0
        for row in sorted(self.longer, reverse=True):
            beyond += self.longer[row]
            if beyond > (1 - share) * self.of:
                return row
        return self.row_tokens

    def share_beyond(self, row_tokens: int) -> float | None:
        """Return the share of the conversations that rows of this length would not hold whole."""
        if self.longer is None or not self.of:
            return None
        return sum(n for row, n in self.longer.items() if row > row_tokens) / self.of

    def facts(self) -> dict[str, Any]:
        """For the manifest; what is not known is left out."""
        facts = {name: getattr(self, name) for name in ("read", "too_long", "cut", "no_target", "tokens_lost", "sampled")}  # fmt: skip
        facts["row_tokens_99"] = self.row_tokens_for()
        return {name: value for name, value in facts.items() if value is not None}


def fit_text(facts: dict[str, Any], row_tokens: int) -> str:
    """Return what of the conversations is lost, from Fit.facts, and the rows that would hold it."""
    read, dropped, cut = facts["read"], facts["too_long"], facts["cut"]
    longer = f"are longer than a row of {row_tokens:,} tokens and"
    text = f"{_so_many(dropped or cut, read, 'conversations')} {longer} {'left out' if dropped else 'lose their last turns'}"
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


class Loss(NamedTuple):
    """Counts of what was read of a source, as sequence.totals gives them, and of how its conversations fit."""

    name: str
    counts: dict[str, Any]
    fit: Fit | None


def losses_of(plan: dict, role: str, stream: Stream) -> list[Loss]:
    """Return the losses of each source of a plan's stream, of what the run reads as far as it is sealed."""
    found = []
    for number, (about, sequence) in enumerate(zip(plan[role]["sequences"], stream.sequences, strict=True)):
        counts, fit = sequence.totals(stream.shards_needed(number)), None
        if plan["kind"] == "chat" and "conversations" in counts:
            kept = sequence.folder / SAMPLE_FILE
            sample = None
            if "longer" not in counts:
                with suppress(FileNotFoundError, DamagedFileError):  # a damaged one is taken again
                    sample = read_sealed_json(kept)
            fit = Fit.counted(counts, row_tokens=plan["row_tokens"], sample=sample)
        found.append(Loss(about["name"], counts, fit))
    return found


def with_samples(plan: dict, stream: Stream, *, sources: list[Any], tokenizer: Any) -> list[Loss]:
    """losses_of the training sources; of conversations from a sample where too few are read yet to tell, and with the
    lengths of one, which is kept beside the shards, where much is lost of shards that were sealed without lengths."""
    found = losses_of(plan, "train", stream)
    for number, (loss, sequence) in enumerate(zip(found, stream.sequences, strict=True)):
        if plan["kind"] != "chat" or (fit := loss.fit) is None:
            continue
        settings = plan["train"]["sequences"][number]["settings"]
        about = {"row_tokens": plan["row_tokens"], "overflow": settings["max_row_overflow"]}
        if fit.longer is None and max(fit.too_long, fit.cut) > MUCH * fit.read:
            sample = sampled_counts(sources[number], tokenizer, **about)
            write_sealed_json(sequence.folder / SAMPLE_FILE, sample)
            found[number] = loss._replace(fit=Fit.counted(loss.counts, row_tokens=plan["row_tokens"], sample=sample))
        elif sequence.end is None and fit.read < SAMPLE:
            found[number] = loss._replace(fit=sampled_fit(sources[number], tokenizer, **about))
    return found


def sampled_fit(source: Any, tokenizer: Any, *, row_tokens: int, overflow: str) -> Fit:
    """Return how a sample of conversations would fit rows of that length, before anything is prepared."""
    counts = sampled_counts(source, tokenizer, row_tokens=row_tokens, overflow=overflow)
    return replace(Fit.counted(counts, row_tokens=row_tokens), sampled=counts["conversations"])


def sampled_counts(source: Any, tokenizer: Any, *, row_tokens: int, overflow: str) -> dict[str, Any]:
    """Return counts of the first SAMPLE conversations, or of all there are, spread over the source's files that lie here."""
    counts = new_counts("chat")
    talks: list[Any] = []
    for block in _spread_blocks(source):
        talks += block[: SAMPLE - len(talks)]
        if len(talks) >= SAMPLE:
            break
    for talk, rendered in zip(talks, rendered_talks(tokenizer, talks), strict=True):
        if isinstance(rendered, DataError):
            continue
        ids, _, outcome = fit_conversation(
            talk.messages, rendered, partial(render, tokenizer), capacity=row_tokens + 1, overflow=overflow
        )
        count_conversation(counts, length=len(rendered[0]), kept=0 if ids is None else len(ids), outcome=outcome)
    return counts


def _spread_blocks(source: Any) -> Iterator[list[Any]]:
    """Conversations of each file that lies here, from all over the list first, at most its part of the sample at once."""
    here = [n for n, file in enumerate(source.files) if file.path is not None and not file.order]
    first = [here[len(here) * n // SAMPLED_FILES] for n in range(SAMPLED_FILES)] if len(here) > SAMPLED_FILES else here
    part = -(-SAMPLE // max(1, len(first)))
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
    """Return what is lost of a source where it is more than MUCH, a sentence or two each. longest_row: of the model."""
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
                f"{_so_many(counts[kind], seen, 'rows')} {what} and left out. Look into the files ({program('data')} FILE), or name another column."
            )
    return [f"{name}: {line}" for line in lines]


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
    return f"Set data.row_tokens to {wanted} or more (data.batch_tokens is a multiple of it), or split the longer ones in the files."


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


Rendered = tuple[list[int], list[bool]]


Render = Callable[[list[dict]], Rendered]


def fit_conversation(messages: list[dict], rendered: Rendered, render: Render, *, capacity: int, overflow: str):
    """(ids, trained, outcome) of a conversation that fits `capacity` ids and trains at least one; ids is None when dropped.

    rendered: the whole conversation. outcome: whole | cut (ends at its last assistant turn that fits) | too_long | no_target.
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
    "chat": ("conversations", "text_tokens", "empty_rows", "cut", "too_long", "no_target", "cut_tokens", "too_long_tokens"),
}  # fmt: skip


LENGTH_STEP = 64  # Tokens: finer advice on the length of a row is of no use, and the counts stay few.


def new_counts(kind: str) -> dict[str, Any]:
    """Return what is counted while a source is read, all 0. `longer` of conversations: by row length, those that need it."""
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
