"""Losses of packing: what rows leave out of each source, counted while shards are made, and warnings."""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from pipeline.data.mixture import MixedDataset
from pipeline.data.row_plan import ONE_TEXT, streams_of
from pipeline.data.shards import ShardedDataset
from pipeline.process.errors import DataError
from pipeline.process.progress import short_count
from pipeline.tokenizer.chat import rendered_talks
from pipeline.tokenizer.trained_share import missing_lines, missing_text, untrained_shares

if TYPE_CHECKING:
    from pipeline.data.validation import ValidationRows

Rendered = tuple[list[int], list[bool]]
Render = Callable[[list[dict]], Rendered]


def fit_conversation(messages: list[dict], rendered: Rendered, render: Render, *, capacity: int, overflow: str):
    """Return (ids, trained, outcome) of a conversation that fits `capacity` ids and trains at least one; ids is None
    when dropped.

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
    # Cut behind the last answer that fits; each attempt renders the conversation up to there, once.
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
    counts: dict[str, Any] = dict.fromkeys(READ_COUNTS[kind], 0)
    if kind == "chat":
        counts["longer"] = {}
    return counts


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
        # The row_tokens that would hold it, rounded up to a step: a row stores one id more. Text, as keys of JSON are.
        row = str(-(-(length - 1) // LENGTH_STEP) * LENGTH_STEP)
        counts["longer"][row] = counts["longer"].get(row, 0) + 1


# By the kind of rows, what may be lost, as its count and what that is a share of.
LOST = {
    "text": {"cropped": ("cropped_tokens", "text_tokens"), "split": ("split_documents", "documents")},
    "chat": {name: (name.replace(" ", "_"), "conversations") for name in ("cut", "too long", "no target")},
}
MUCH = 0.01  # of the conversations, or of the rows of the files
MOST = 0.5  # of the characters of the answers: then something else is trained
HELD = 0.99  # of the conversations, by the row length that is advised
SAMPLE = 1_000  # conversations that are rendered before anything is packed
SAMPLED_FILES = 16  # that a sample is spread over, where there are as many
ENOUGH_BYTES = 100_000  # of fewer, BPB differs by several per cent from one sample of text to another


def rows_seen(totals: dict[str, Any]) -> int:
    """Return rows of the files that were read, empty and unreadable ones included."""
    items = totals.get("conversations", totals.get("documents", 0))
    return items + totals.get("empty_rows", 0) + totals.get("bad_rows", 0)


def shares_lost(totals: dict[str, Any], *, kind: str) -> dict[str, float]:
    """Return shares by name from the sums of a source's shards (ShardedDataset.totals); without what nothing was read
    of.

    padded: of the positions. Those of LOST. empty, bad: of the rows of the files.
    """
    parts = {"padded": ("padded", "positions"), **LOST[kind]}
    shares = {}
    for name, (part, whole) in parts.items():
        if totals.get(whole):
            shares[name] = totals.get(part, 0) / totals[whole]
    seen = rows_seen(totals)
    if seen:
        shares["empty"] = totals.get("empty_rows", 0) / seen
        shares["bad"] = totals.get("bad_rows", 0) / seen
    return shares


def conversation_facts(counts: dict[str, Any], *, row_tokens: int) -> dict[str, Any]:
    """Return, for the manifest, how the conversations that were counted fit rows of that length.

    read, too_long (left out), cut (without their last turns), no_target (no assistant speaks). Where the counts have
    lengths, also tokens_lost (share) and row_tokens_99: the rows that would hold 99 % of the conversations.
    """
    facts = {"read": counts["conversations"], **{name: counts[name] for name in ("too_long", "cut", "no_target")}}
    if "longer" in counts:  # shards that an earlier version sealed have none
        lost = counts["too_long_tokens"] + counts["cut_tokens"]
        facts["tokens_lost"] = lost / max(1, counts["text_tokens"] + lost)
        facts["row_tokens_99"] = _row_tokens_for(counts, shortest=row_tokens)
    return facts


def _row_tokens_for(counts: dict[str, Any], *, shortest: int) -> int:
    # From the longest on: the first length that more than 1 - HELD of them need.
    num_longer = 0
    for row, number in sorted(counts["longer"].items(), key=lambda item: -int(item[0])):
        num_longer += number
        if num_longer > (1 - HELD) * (counts["conversations"] - counts["no_target"]):
            return int(row)
    return shortest


def fit_text(facts: dict[str, Any], row_tokens: int) -> str:
    """Return a sentence on conversations that do not fit their rows. facts: conversation_facts."""
    read = max(1, facts["read"])
    text = (
        f"{facts['too_long']:,} of {read:,} conversations ({100 * facts['too_long'] / read:.2f} %) are longer than a "
        f"row of {row_tokens:,} tokens and left out, {facts['cut']:,} ({100 * facts['cut'] / read:.2f} %) lose their "
        "last turns"
    )
    if "row_tokens_99" in facts:
        text += f"; rows of {facts['row_tokens_99']:,} would hold 99 %"
    return text


def loss_warnings(name: str, counts: dict[str, Any], *, kind: str, row_tokens: int) -> list[str]:
    """Return a sentence on what is left out of a source, where it is more than MUCH. counts: ShardedDataset.totals."""
    lines = []
    if kind == "chat" and counts.get("conversations"):
        facts = conversation_facts(counts, row_tokens=row_tokens)
        if max(facts["too_long"], facts["cut"]) > MUCH * facts["read"]:
            lines.append(f"{fit_text(facts, row_tokens)}. Set data.row_tokens, or split the conversations.")
    for count, reason in (
        ("no_target", "have no answer of the assistant"),
        ("empty_rows", "are empty, or have nothing to learn from"),
        ("bad_rows", "are unreadable"),
    ):
        number, seen = counts.get(count, 0), rows_seen(counts)
        if number > MUCH * seen:
            share = f"{number:,} of {seen:,} rows ({100 * number / seen:.2f} %)"
            lines.append(f"{share} {reason} and are left out. Look into the files.")
    return [f"{name}: {line}" for line in lines]


def nothing_left(plan: dict, role: str, stream: MixedDataset) -> str:
    """Return why no row came of the sources: what was read of each, and left out."""
    lines = []
    reasons = {
        "too_long": f"too long for a row of {plan['row_tokens']:,} tokens",
        "no_target": "without an answer of the assistant",
        "empty_rows": "empty rows",
        "bad_rows": "unreadable rows",
    }
    for about, dataset in zip(plan[role]["sequences"], stream.datasets, strict=True):
        counts = dataset.totals()
        left_out = [f"{counts[name]:,} {reason}" for name, reason in reasons.items() if counts.get(name)]
        line = f"{about['name']}: {rows_seen(counts):,} rows, {', '.join(left_out) or 'none left out'}"
        if counts.get("too_long") and "longer" in counts:
            line += f". Set data.row_tokens to {_row_tokens_for(counts, shortest=plan['row_tokens'])}"
        lines.append(line)
    return f"{'; '.join(lines)}."


def first_conversations(source: Any, most: int = SAMPLE) -> list[Any]:
    """Return up to `most` conversations of the source's files that are here, from the beginning of some of them."""
    here = [number for number, file in enumerate(source.files) if file.path is not None and not file.order]
    numbers = [0]  # the first one is fetched
    if here:
        numbers = here[:: -(-len(here) // SAMPLED_FILES)]
    talks: list[Any] = []  # as many of each file
    for number in numbers:
        items = (item for block in source.read_file(number) for item in block.items)
        talks += islice(items, -(-most // len(numbers)))
    return talks


def untrained_lines(name: str, talks: list[Any], tokenizer: Any) -> list[str]:
    """Return what of the answers no trained id spells, and why, where it is more than MUCH. Raises DataError where it
    is more than MOST."""
    characters = trained_characters(tokenizer, talks, rendered_talks(tokenizer, talks))
    lines = [f"{name}: {line}" for line in missing_lines(tokenizer, characters, least=MUCH)]
    if sum(untrained_shares(characters).values()) > MOST:
        raise DataError("\n".join(f"data.sources: {line}" for line in lines))
    return lines


def trained_characters(tokenizer: Any, talks: list[Any], rendered: list[Any]) -> Counter[str]:
    """Return the sums of missing_text over the conversations that the template renders."""
    counts = Counter[str]()
    for talk, one in zip(talks, rendered, strict=True):
        if not isinstance(one, DataError):
            counts.update(missing_text(tokenizer, talk.messages, *one, tools=talk.tools))
    return counts


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
        for s, (about, dataset, rows) in enumerate(zip(plan[role]["sequences"], stream.datasets, used, strict=True)):
            sums = dataset.totals(stream.shards_needed(s))
            shares = shares_lost(sums, kind=plan["kind"])
            text = f"{sums.get(what, 0):,} {what}"
            if not chat:
                text += f", {sums.get('text_bytes', 0) / max(1, sums.get('text_tokens', 0)):.2f} bytes/token"
            epochs = epochs_of(about, dataset, rows)
            share = f"{100 * rows / total:.2f} %" if total else "-"
            seen = "< 1" if epochs is None else f"{epochs:.2f}"
            line = [role, about["name"], f"{rows:,}", short_count(rows * plan["row_tokens"]), share, seen]
            for name in ("padded", *lost):
                line.append(f"{100 * shares[name]:.2f} %" if name in shares else "-")
            lines.append((*line, f"{sums['bad_rows']:,}", text))
    return "\n".join(aligned(lines))


def aligned(lines: Collection[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose cells stand one below the other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def epochs_of(about: dict, dataset: ShardedDataset, rows: int) -> float | None:
    """Return how often a source is seen when so many of its rows are; None while its length is not known."""
    return rows * about.get("passes", 1) / dataset.length if dataset.length else None


def warning_lines(
    plan: dict, validation: "ValidationRows", *, sources: tuple[list, list], tokenizer: Any, has_begun: bool = False
) -> list[str]:
    """Return what is lost of the training sources, where it is much, and that validation is small, where it is.

    sources: (train, validation). Raises DataError where most of the answers would not be trained, but for a run that
    has begun.
    """
    stream, lines = streams_of(plan)["train"], []
    for number, (about, source) in enumerate(zip(plan["train"]["sequences"], sources[0], strict=True)):
        if plan["kind"] == "chat" and not has_begun:
            lines += untrained_lines(source.name, first_conversations(source), tokenizer)
        counts = stream.datasets[number].totals(stream.shards_needed(number))
        lines += loss_warnings(about["name"], counts, kind=plan["kind"], row_tokens=plan["row_tokens"])
    lines = [f"warning: data.sources: {line}" for line in lines]
    scored = validation.scored_bytes(tokenizer)
    is_own = not all(source.is_built_in for source in sources[1])  # nobody can add to what is built in
    if scored and max(scored.values()) < ENOUGH_BYTES and is_own:
        lines.append(f"warning: data.validation: {size_text(scored)}")
    return lines


def size_text(scored: dict[str, int]) -> str:
    """Return a sentence on a validation of so many bytes, by the name of its number, which are few."""
    name, count = max(scored.items(), key=lambda pair: pair[1])
    return (
        f"{name} is over {count:,} bytes, fewer than {ENOUGH_BYTES:,}: differences between runs and steps are mostly "
        "chance. Name more files, or raise evals.bpb.tokens."
    )


def padding_notes(plan: dict, shares: dict[str, dict]) -> list[str]:
    """Return how much of rows of one text each is padding. shares: TrainingRows.shares."""
    if plan["train"]["sequences"][0]["settings"].get("packing") != ONE_TEXT:
        return []
    rows = sum(share["rows"] for share in shares.values())
    padded = sum(share["rows"] * share["lost"].get("padded", 0.0) for share in shares.values()) / max(1, rows)
    return [f"note: {100 * padded:.0f} % of the positions of these rows are padding. Lower data.row_tokens."]
