"""Preparation by several machines: each encodes its part into the shared cache, the last one packs and seals."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.data.prepare import ShardBuilder
from pipeline.data.references import add_reference
from pipeline.data.row_plan import KEY_LENGTH, ROLES, next_shard, streams_of
from pipeline.data.workers import BlockRanges
from pipeline.metrics import digest
from pipeline.process.storage import file_lock, remove_file

# Tokens that are encoded for one that is packed: best_fit_crop leaves out up to so much. What is short is encoded at
# the end.
SPARE = {"best_fit_crop": 1.5}


def prepare_part(
    plan: dict,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    part: tuple[int, int],
    report: Callable[[int], None] = lambda tokens: None,
) -> list[int]:
    """Encode part k of n (from 1) of the training text, every n-th file; return the parts that are still to come.

    Any part may be made again, or twice at once. When no part is to come, `prepare_now` finds all of the text encoded.
    report: called with the number of tokens after each range of blocks.
    """
    number, parts = part
    add_reference(plan, None)
    folder = markers_folder(plan)
    markers = {k: folder / f"part-{k}-of-{parts}" for k in range(1, parts + 1)}
    remove_file(markers[number])
    with ShardBuilder(plan, tokenizer, sources=sources) as builder:
        for source, about in enumerate(plan["train"]["sequences"]):
            dataset, mixture = builder.streams["train"].datasets[source], builder.streams["train"].mixture
            left = math.inf
            if dataset.end is not None:
                left = 0.0
            elif mixture.total_rows is not None:
                rows = mixture.used(mixture.total_rows)[source] + dataset.shard_rows - dataset.rows
                left = rows * plan["row_tokens"] / parts * SPARE.get(about["settings"].get("packing"), 1.0)
            cursor = dataset.seals[-1]["cursor"] if dataset.seals else {"file": 0, "block": 0}
            reader = builder.encoded_reader(source)
            ranges = BlockRanges(reader.source, file=cursor["file"], block=cursor["block"], part=(number - 1, parts))
            answers = reader.encode(ranges)
            while left > 0 and (found := next(answers, None)) is not None:
                tokens = sum(found[-1].result())
                report(tokens)
                left -= tokens
    with file_lock(folder / "parts.lock"):  # so that of two that end at once one is the last
        markers[number].parent.mkdir(parents=True, exist_ok=True)
        markers[number].touch()
        to_come = [k for k, marker in markers.items() if not marker.exists()]
    if not to_come or next_shard(streams_of(plan)) is None:
        for marker in markers.values():
            remove_file(marker)
        return []
    return to_come


def markers_folder(plan: dict) -> Path:
    """Return where the parts that are done are noted: hosts may differ in all but the shards, as in num_proc."""
    sequences = {role: plan[role] and plan[role]["sequences"] for role in ROLES}
    return Path(plan["cache_dir"]) / "preparations" / digest(sequences, KEY_LENGTH)
