"""Rows of training and of validation: batches, what was consumed, the position that a checkpoint keeps, the loader of
the Trainer's micro-batches, and held-out rows under a fixed protocol.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.preparation import (
    ONE_TEXT,
    VALIDATION_BUFFER,
    Preparation,
    open_stream,
    step_rows_of,
)
from pipeline.data.stream import (
    Loss,
    RowPlace,
    Shard,
    Stream,
    documents_begun,
    epochs_of,
    losses_of,
    shares_lost,
)
from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, Protocol, digest
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError
from pipeline.sources.verify import grouped
from pipeline.tokenizer.encode import LEAST_COVERAGE, byte_lengths, is_byte_level, keeps_every_text

if TYPE_CHECKING:
    import torch

# Rows out of memory maps into the tensors of a training batch.

IGNORED = -100


class RowReader:
    """Copies rows into batches. T = row_tokens, B = rows of the batch.

    isolated: position_ids restart where a document or conversation begins, which is how the model keeps them apart.
    """

    def __init__(self, *, row_tokens: int, bos: int, pad: int, isolated: bool):
        self.row_tokens, self.bos, self.pad, self.isolated = row_tokens, bos, pad, isolated

    def batch(self, rows: list[tuple[Shard, int] | None]) -> dict:
        """input_ids, labels, shift_labels (B, T) int64, position_ids (B, T) int64 when isolated.

        labels and shift_labels are one tensor: row[1:], -100 where nothing is trained. None is a filler of weight 0.
        target_bytes (B, T) int64, bytes of text under each target and -1 under a special one, where the shards hold
        them.
        """
        import torch

        T = self.row_tokens
        input_ids_BT = np.empty((len(rows), T), np.int64)
        labels_BT = np.empty((len(rows), T), np.int64)
        starts_BT = np.zeros((len(rows), T), bool) if self.isolated else None
        has_bytes = any(place is not None and place[0].target_bytes is not None for place in rows)
        bytes_BT = np.full((len(rows), T), -1, np.int64) if has_bytes else None
        for shard, at, numbers in _by_shard(rows):
            if shard is None:
                input_ids_BT[at], labels_BT[at] = self.pad, IGNORED
                continue
            ids = shard.input_ids[numbers]
            input_ids_BT[at], labels_BT[at] = ids[:, :-1], ids[:, 1:]
            if bytes_BT is not None and shard.target_bytes is not None:
                bytes_BT[at] = shard.target_bytes[numbers][:, 1:]
            if shard.trained is not None and shard.starts is not None:
                labels_BT[at] = np.where(bits(shard.trained[numbers], T + 1)[:, 1:], ids[:, 1:], np.int64(IGNORED))
                if starts_BT is not None:
                    starts_BT[at] = bits(shard.starts[numbers], T + 1)[:, :-1]
                continue
            if starts_BT is not None:
                # Text holds no control token, so a BOS is always the start of a piece.
                starts_BT[at] = ids[:, :-1] == self.bos
            used = shard.used[numbers]
            for n in np.flatnonzero(used <= T):
                i, end = at[n], int(used[n])
                labels_BT[i, end - 1 :] = IGNORED
                if starts_BT is not None:
                    starts_BT[i, end:] = False
                    starts_BT[i, end : end + 1] = True  # the padding is a segment too
        labels = torch.from_numpy(labels_BT)
        batch = {"input_ids": torch.from_numpy(input_ids_BT), "labels": labels, "shift_labels": labels}
        if bytes_BT is not None:
            batch["target_bytes"] = torch.from_numpy(bytes_BT)
        if starts_BT is not None:
            batch["position_ids"] = torch.from_numpy(positions(starts_BT))
        return batch


def _by_shard(rows: list[tuple[Shard, int] | None]) -> list[tuple[Shard | None, list[int], list[int]]]:
    """Return the rows of each shard: where they go in the batch, and their numbers in the shard; fillers are of
    None."""
    found: dict[int, tuple[Shard | None, list[int], list[int]]] = {}
    for i, place in enumerate(rows):
        shard, number = place or (None, 0)
        _, at, numbers = found.setdefault(id(shard), (shard, [], []))
        at.append(i)
        numbers.append(number)
    return list(found.values())


def bits(packed: np.ndarray, count: int) -> np.ndarray:
    """(..., count) bool out of (..., bytes)."""
    return np.unpackbits(packed, axis=-1, count=count).view(bool)


def positions(starts_BT: np.ndarray) -> np.ndarray:
    """(B, T) int64 positions that begin again at 0 at every start; a row begins at 0."""
    at = np.arange(starts_BT.shape[1], dtype=np.int64)
    return at - np.maximum.accumulate(np.where(starts_BT, at, 0), axis=1)


def rows_of_micro_batch(micro_step: int, *, rank: int, world_size: int, rows: int, total: int) -> list[int | None]:
    """Return numbers of the rows, of `total`, that a rank gets in a micro-step; None for those past the end."""
    first = (micro_step * world_size + rank) * rows
    return [i if i < total else None for i in range(first, first + rows)]


# What a run has trained on of each source: a pure function of the rows used, so a resume needs no state for it.


@dataclass(frozen=True)
class Consumed:
    """Text of one source that was trained on, over its epochs.

    samples: rows. tokens: trained targets. padded: positions behind the text of a row. documents: as documents_begun
    counts, None where shards were sealed before they counted them. bad_rows: unreadable ones in what was read, each
    counted once.
    """

    samples: int
    tokens: int
    padded: int
    documents: int | None
    bad_rows: int


class ConsumedCounter:
    """Sums over the first rows of a run, by source: whole shards by their seals, the one that is being read row by
    row, once."""

    def __init__(self, stream: Stream, *, bos: int):
        self.stream, self.bos = stream, bos
        self._current: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, shard), its running sums

    def consumed(self, rows: int) -> list[Consumed]:
        """Return it for the first `rows` rows, which must be sealed."""
        return [self._of(source, k) for source, k in enumerate(self.stream.mixture.used(rows))]

    def _of(self, source: int, k: int) -> Consumed:
        sequence = self.stream.sequences[source]
        epoch, row = (0, k) if k <= sequence.rows else divmod(k, sequence.rows)
        number, row = divmod(row, sequence.shard_rows)
        sums = sequence.sums[number] + epoch * sequence.sums[-1]
        if row:
            sums = sums + self._running_sums(source, epoch, number)[row - 1]
        tokens, padded, documents = sums.tolist()
        shards_read = len(sequence.seals) if epoch else number + (row > 0)
        return Consumed(
            samples=k,
            tokens=tokens,
            padded=padded,
            documents=documents if sequence.counts_documents else None,
            bad_rows=len(sequence.bad_rows(shards_read)),
        )

    def _running_sums(self, source: int, epoch: int, number: int) -> np.ndarray:
        """(rows, 3) targets, padding and documents of the shard's first rows, in the order of this epoch."""
        at = epoch, number
        if source not in self._current or self._current[source][0] != at:
            counts = row_counts(self.stream.sequences[source].shard(number), bos=self.bos)
            if self.stream.seed is not None:
                counts = counts[self.stream.order(source, epoch, number)]
            self._current[source] = at, counts.cumsum(0)
        return self._current[source][1]


def row_counts(shard: Shard, *, bos: int) -> np.ndarray:
    """(rows, 3) int64 targets, padding and documents of each row."""
    width = shard.input_ids.shape[1]
    starts = None if shard.starts is None else bits(shard.starts, width)
    documents = documents_begun(shard.input_ids, shard.used, starts, bos=bos)
    return np.stack([shard.targets, width - shard.used, documents], axis=1).astype(np.int64)


# The training rows of a run, by step: a pure function of (seed, step), the same for any number of processes.

KEPT_STEPS = 4  # whose row places are remembered: the trainer asks for a step's rows, targets and origins in turn


class TrainingRows:
    """Rows [step_rows.before(step), step_rows.before(step + 1)) of the run's order are those of a global step.

    Steps count from 0; asking for a step waits until its shards are sealed.
    """

    def __init__(self, preparation: Preparation):
        self.preparation, self.plan = preparation, preparation.plan
        self.stream = open_stream(self.plan, "train")
        self.step_rows = step_rows_of(self.plan)
        self.names = [about["name"] for about in self.plan["train"]["sequences"]]
        self.row_tokens: int = self.plan["row_tokens"]
        self.reader = RowReader(
            row_tokens=self.row_tokens, bos=self.plan["bos"], pad=self.plan["pad"], isolated=self.plan["isolated"]
        )
        self.counter = ConsumedCounter(self.stream, bos=self.plan["bos"])
        self.rank = int(os.environ.get("RANK", 0))
        self._places: dict[int, list[RowPlace]] = {}

    @classmethod
    def open(cls, *, preparation: Preparation) -> "TrainingRows":
        """Waits until the length of the run is known and its first step is sealed. Raises DataError when there is
        nothing to train on."""
        rows = cls(preparation)
        # Epochs need the length of their source; a source that stops the run, all that the run might need of it.
        known = "all rows, as a run in epochs is as long as they are"
        preparation.wait_until(rows.stream.is_decided, what=known)
        rows._wait_for(1)
        names = ", ".join(rows.names)
        if not rows.total_rows() and (there := sum(end or 0 for end in rows.stream.mixture.ends)):
            raise DataError(
                f"data.sources ({names}): of {there:,} rows the epochs that the recipe asks for come to none, so "
                "there is no step to train. Raise train.num_train_epochs, or the epochs of the sources."
            )
        if not rows.total_rows():
            rows.raise_if_too_bad()  # says why each row could not be read
            from pipeline.data.losses import nothing_left

            why = nothing_left(rows.losses())
            raise DataError(f"data.sources ({names}): nothing is left to train on. {why}")
        if rows.total_steps() < 1:
            raise DataError(
                f"data.sources ({names}): {rows.total_rows()} rows of {rows.row_tokens} tokens in all, fewer than the "
                f"{rows.step_rows.at(0)} of one step, so there is no step to train. Add text, or lower "
                "data.batch_tokens."
            )
        return rows

    @property
    def wait_s(self) -> float:
        """Return seconds this rank has waited for rows to be prepared."""
        return self.preparation.waited_s

    def total_rows(self) -> int:
        """Return rows of the whole run; its steps are as many as these make whole."""
        assert self.stream.mixture.total_rows is not None
        return self.stream.mixture.total_rows

    def total_steps(self) -> int:
        return self.step_rows.steps(self.total_rows())

    def _wait_for(self, steps: int) -> None:
        """Wait until the first `steps` steps are sealed."""
        rows = min(self.step_rows.before(steps), self.total_rows())
        if self.stream.missing(rows) is not None:
            self.preparation.wait_until(lambda: self.stream.is_sealed(rows), what=f"the rows of step {steps - 1}")

    def places(self, step: int) -> list[RowPlace]:
        """Return where the rows of a step lie."""
        if step not in self._places:
            first, end = self.step_rows.before(step), self.step_rows.before(step + 1)
            assert 0 <= first < end <= self.total_rows(), f"step {step} is not of this run"
            self._wait_for(step + 1)
            while len(self._places) >= KEPT_STEPS:
                del self._places[next(iter(self._places))]
            self._places[step] = self.stream.places(first, end - first)
        return self._places[step]

    def num_targets(self, step: int) -> int:
        """Trained targets of the whole global batch of a step."""
        return sum(int(self.stream.shard(place).targets[place.row]) for place in self.places(step))

    def micro_rows(self, step: int, rows: int) -> int:
        """Return the rows of a micro-batch in a step: `rows`, of a smaller step in proportion fewer."""
        # Not fewer micro-steps: transformers.Trainer counts on their number.
        return -(-rows * self.step_rows.at(step) // self.step_rows.full)

    def micro_batch(self, step: int, micro_step: int, *, rank: int, world_size: int, rows: int) -> dict:
        """Return a rank's training batch of `rows` rows. Past the step's last row come fillers of weight 0."""
        places = self.places(step)
        numbers = rows_of_micro_batch(micro_step, rank=rank, world_size=world_size, rows=rows, total=len(places))
        return self.reader.batch(
            [None if i is None else (self.stream.shard(places[i]), places[i].row) for i in numbers]
        )

    def origins(self, step: int) -> list[tuple[str, int, int, int]]:
        """(source, file, row group, row) of the document that begins each row of a step."""
        return [self._origin(place) for place in self.places(step)]

    def _origin(self, place: RowPlace) -> tuple[str, int, int, int]:
        pq, rg, row = self.stream.shard(place).origins[place.row].tolist()
        return self.names[place.source], pq, rg, row

    def position(self, step: int) -> dict:
        """Return where the data stands when `step` steps are done, for the checkpoint and the console line; JSON.

        sources: of each, k = rows used (over epochs) and epoch from 1. epoch, pq, rg, source: of the last row used.
        """
        rows = self.step_rows.before(step)
        used = self.stream.mixture.used(rows)
        sources = {
            name: {"key": key, "k": k, "epoch": self._epoch(s, max(0, k - 1)) + 1}
            for s, (name, key, k) in enumerate(zip(self.names, self.stream.keys, used, strict=True))
        }
        position: dict = {"step": step, "rows": rows, "sources": sources}
        if step > 0:
            last = self.places(step - 1)[-1]
            source, pq, rg, _ = self._origin(last)
            position |= {"epoch": self._epoch(last.source, last.k) + 1, "source": source, "pq": pq, "rg": rg}
        return position

    def consumed(self, step: int) -> dict[str, Consumed]:
        """Return what the first `step` steps trained on, by source; they must be sealed."""
        return dict(zip(self.names, self.counter.consumed(self.step_rows.before(step)), strict=True))

    def num_retries(self) -> int:
        """Return how often the process that prepares has read something again."""
        return self.preparation.num_retries()

    def _epoch(self, source: int, k: int) -> int:
        """Return the pass over its files, from 0, that row k of a source is of: in a shard, whose rows are mixed, in
        proportion."""
        sequence, about = self.stream.sequences[source], self.plan["train"]["sequences"][source]
        epoch, row = (0, k) if sequence.end is None else divmod(k, max(1, sequence.rows))
        if "passes" not in about or not row:
            return epoch * about.get("passes", 1)
        # By the files that were read up to the shards' ends: a source's length may not be known yet.
        number, row = divmod(row, sequence.shard_rows)
        cursors = [{"file": 0, "finishing": False}, *(seal["cursor"] for seal in sequence.seals[: number + 1])][-2:]
        begin, end = (cursor["file"] + cursor["finishing"] for cursor in cursors)
        done = begin + (end - begin) * row / sequence.seals[number]["rows"]
        return epoch * about["passes"] + min(int(done / about["files_in_a_pass"]), about["passes"] - 1)

    def losses(self) -> list[Loss]:
        """Return what packing has left out of each source (losses_of)."""
        self.stream.refresh()
        return losses_of(self.plan, "train", self.stream)

    def shares(self) -> dict[str, dict]:
        """Return by source: its cache key, rows and tokens of the run, their share, targets a row, epochs where they
        are known; and of what the run reads, as far as it is sealed, the shares padded and lost (`shares_lost`), of
        conversations also how they fit the rows (`Fit.facts`).

        In a run's manifest the key keeps `--prune` from deleting the shards.
        """
        used = self.stream.mixture.used(self.total_rows())
        sequences, losses = self.plan["train"]["sequences"], losses_of(self.plan, "train", self.stream)
        out = {}
        for about, sequence, rows, (name, totals, fit) in zip(
            sequences, self.stream.sequences, used, losses, strict=True
        ):
            out[name] = {
                "key": about["key"],
                "rows": rows,
                "tokens": rows * self.row_tokens,
                "share": rows / max(1, self.total_rows()),
                "targets_per_row": totals["targets"] / totals["rows"] if totals["rows"] else 0.0,
                "lost": shares_lost(totals, kind=self.plan["kind"]),
            }
            if fit is not None:
                out[name]["conversations"] = fit.facts()
            if (epochs := epochs_of(about, sequence, rows)) is not None:
                out[name]["epochs"] = epochs
        return out

    def raise_if_too_bad(self) -> None:
        """Raises DataError when more rows proved unreadable, in the shards this run reads, than data.max_bad_rows."""
        self.stream.refresh()
        bad: dict[str, list[str]] = {}  # by shards: two sources may read the same ones
        for s, (sequence, about) in enumerate(
            zip(self.stream.sequences, self.plan["train"]["sequences"], strict=True)
        ):
            found = [f"{about['name']}/{line}" for line in sequence.bad_rows(self.stream.shards_needed(s))]
            bad[about["key"]] = max(bad.get(about["key"], []), found, key=len)
        lines = [line for some in bad.values() for line in some]
        if len(lines) > self.plan["max_bad_rows"]:
            reasons = grouped(lines)
            shown = "\n".join(f"  {line}" for line in reasons[:20]) + (
                f"\n  ... and {len(reasons) - 20} more reasons" if len(reasons) > 20 else ""
            )
            raise DataError(
                f"data.sources: {len(lines)} rows are unreadable and data.max_bad_rows is "
                f"{self.plan['max_bad_rows']}, so the run stops here:\n{shown}\nThe rows are left out of training. "
                "Raise data.max_bad_rows to accept that and run the same command again, or correct the files and "
                "start a new run."
            )


# Micro-batches for the Trainer's loop, starting at any step without reading what came before.


class StepLoader:
    """Iterates this rank's micro-batches of the steps start_step .. max_steps - 1, on the device.

    The Trainer asks for all micro-batches of a step at once, ahead of what the device works on: on CUDA they are
    copied from pinned memory on a stream of their own meanwhile.

    Its length is that of the whole run, because the Trainer derives its epochs from it: the run is one epoch. It is
    not a torch DataLoader: rows are read from memory maps in microseconds, and a DataLoader draws from the training's
    random state when it starts, which would make a resumed run differ.

    look: gives more tensors for a batch, found while it still is on the host.
    """

    def __init__(
        self,
        rows: Any,
        *,
        start_step: int,
        max_steps: int,
        micro_steps: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        device: "torch.device",
        look: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]" = lambda batch: {},
    ):
        import torch

        self.rows, self.look = rows, look
        self.start_step, self.max_steps, self.micro_steps = start_step, max_steps, micro_steps
        self.micro_batch, self.rank, self.world_size = micro_batch, rank, world_size
        self.device = device
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.wait_s = 0.0

    def __len__(self) -> int:
        return self.max_steps * self.micro_steps

    def __iter__(self) -> "Iterator[dict[str, torch.Tensor]]":
        for step in range(self.start_step, self.max_steps):
            rows = self.rows.micro_rows(step, self.micro_batch)
            for micro_step in range(self.micro_steps):
                started = time.perf_counter()
                batch = self.rows.micro_batch(step, micro_step, rank=self.rank, world_size=self.world_size, rows=rows)
                batch |= self.look(batch)
                if self.device.type != "cpu":
                    batch = on_device(batch, self.device, stream=self.copies)
                self.wait_s += time.perf_counter() - started
                beat()
                yield batch


def on_device(
    batch: "dict[str, torch.Tensor]", device: "torch.device", *, stream: "torch.cuda.Stream | None" = None
) -> "dict[str, torch.Tensor]":
    """Return the batch on the device; a tensor under two names (labels, shift_labels) is copied once and stays one.

    stream: of the copies, on CUDA; the current stream then waits for them, and the host for nothing.
    """
    import torch

    once = {id(tensor): tensor for tensor in batch.values()}
    if stream is None:
        moved = {key: tensor.to(device) for key, tensor in once.items()}
    else:
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            # Pinned memory is not used again before its copy is done: its allocator notes the stream.
            moved = {key: tensor.pin_memory().to(device, non_blocking=True) for key, tensor in once.items()}
        current.wait_stream(stream)
        for tensor in moved.values():
            tensor.record_stream(current)  # it was allocated on the other one, which may not take it back too early
    return {name: moved[id(tensor)] for name, tensor in batch.items()}


# Held-out rows under a fixed protocol: what they are depends on no key of the packing, batch or world size.

RULE = 1  # raise it when the same files, tokenizer and window give other validation rows, or another figure of them
LOOKED_AT_BYTES = 1_000_000  # of each source, for the share of it that the tokenizer keeps
ROWS_AT_ONCE = 512


class ValidationRows:
    """Rows by best_fit_crop for val/bpb (conversations: packed whole) and whole documents cut into isolated pieces,
    every byte once, for val/bpb_documents.

    The documents of a row see each other as they do in training: data.isolate_documents, and of conversations never.

    coverage: share of the held-out text that the tokenizer's ids restore; whoever has the sources sets it.
    """

    def __init__(self, preparation: Preparation):
        self.preparation, self.plan = preparation, preparation.plan
        self.coverage = 1.0
        self.has_documents: bool = self.plan["documents"] is not None  # of conversations there are none
        # Of a mixture, the names of its sources, each once; batches then carry `source` (B,), -1 for a filler.
        named = [about["name"] for about in self.plan["validation"]["sequences"]]
        self.sources: list[str] = (
            [name if named.count(name) == 1 else f"{name}-{n}" for n, name in enumerate(named)]
            if len(named) > 1
            else []
        )

    @classmethod
    def open(cls, preparation: Preparation) -> "ValidationRows":
        return cls(preparation)

    @property
    def keeps_text(self) -> bool:
        """Return whether so much of the text is kept that there are bits per byte of it."""
        return self.coverage >= LEAST_COVERAGE

    def protocol(self, name: str, *, scored_bytes: int | None, dtype: str) -> Protocol:
        """Return the protocol of val/bpb, sft/assistant_bpb or val/bpb_documents. scored_bytes: None where none are
        known."""
        is_chat, of_documents = self.plan["kind"] == "chat", name == VAL_BPB_DOCUMENTS
        about = self.plan["documents" if of_documents else "validation"]
        settings = [sequence["settings"] for sequence in about["sequences"]]
        weights = [part["weight"] for part in about["parts"]]
        score, packing = (
            ("assistant", "whole conversations") if is_chat else ("rows", f"best_fit_crop of {VALIDATION_BUFFER}")
        )
        if not is_chat and settings[0]["packing"] == ONE_TEXT:
            packing = "one document"
        # Which bytes of a document a row has left over depends on the tokenizer.
        of_rows = {"packing": packing, "tokenizer": settings[0]["tokenizer"][:16]}
        if self.plan["isolated"] and not is_chat:
            of_rows["isolated"] = "documents"
        return Protocol(
            {
                "score": "documents" if of_documents else score,
                "texts": digest([[one["source"], weight] for one, weight in zip(settings, weights, strict=True)]),
                "bytes": scored_bytes,
                **({"rows": about["total_rows"]} if scored_bytes is None else {}),
                "window": self.plan["row_tokens"],
                "stride": "window",
                "bos": "each piece" if of_documents else "as the template" if is_chat else "each document",
                **({"end": "each document"} if "end" in settings[0] else {}),
                **({} if of_documents else of_rows),
                "dtype": dtype,
                "coverage": self.coverage,
                "rule": RULE,
            }
        )

    def batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """Yield a rank's batches of `rows` rows for val/bpb; every rank gets equally many, the last ones filled up
        with fillers."""
        yield from self._batches("validation", rows=rows, rank=rank, world_size=world_size)

    def document_batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """Yield the same for val/bpb_documents; nothing for conversations."""
        if self.plan["documents"] is not None:
            yield from self._batches("documents", rows=rows, rank=rank, world_size=world_size)

    def num_rows(self, role: str = "validation") -> int:
        """Return rows that are scored; waits until they are prepared."""
        return self._sealed(role).mixture.total_rows or 0

    def scored_bytes(self, tokenizer: Any) -> dict[str, int]:
        """Return bytes of text that each validation number is over, by its name; waits until they are prepared.

        Empty where the ids of conversations have no fixed bytes, and where nothing is held out.
        """
        lengths_V = byte_lengths(tokenizer) if is_byte_level(tokenizer) else None
        is_chat = self.plan["kind"] == "chat"
        if not self.plan["validation"]["sequences"] or (is_chat and lengths_V is None):
            return {}
        if is_chat:
            return {SFT_BPB: self._bytes("validation", lengths_V)}
        roles = {VAL_BPB: "validation", VAL_BPB_DOCUMENTS: "documents"}
        return {name: self._bytes(role, lengths_V) for name, role in roles.items() if self.plan[role] is not None}

    def _bytes(self, role: str, lengths_V: np.ndarray | None) -> int:
        stream, total = self._sealed(role), 0
        for sequence, rows in zip(stream.sequences, stream.mixture.used(self.num_rows(role)), strict=True):
            rows = min(rows, sequence.rows)
            for number in range(-(-rows // sequence.shard_rows)):
                total += _bytes_of(sequence.shard(number), rows - number * sequence.shard_rows, lengths_V)
        return total

    def _sealed(self, role: str) -> Stream:
        stream = open_stream(self.plan, role)
        self.preparation.wait_until(stream.is_sealed, what="the validation rows")
        if not stream.mixture.total_rows:
            names = ", ".join(about["name"] for about in self.plan[role]["sequences"])
            from pipeline.data.losses import nothing_left

            why = nothing_left(losses_of(self.plan, role, stream))
            raise DataError(
                f"data.validation ({names}): what is held out gives no row to score. {why} Or name other files in "
                "data.validation."
            )
        return stream

    def _batches(self, role: str, *, rows: int, rank: int, world_size: int) -> Iterator[dict]:
        stream = self._sealed(role)
        total = stream.mixture.total_rows or 0
        packed = self.plan[role]["sequences"][0]["settings"].get("packing") != ONE_TEXT
        isolated = packed and (role == "documents" or self.plan["isolated"])
        reader = RowReader(
            row_tokens=self.plan["row_tokens"], bos=self.plan["bos"], pad=self.plan["pad"], isolated=isolated
        )
        import torch

        for step in range(-(-total // (rows * world_size))):
            numbers = rows_of_micro_batch(step, rank=rank, world_size=world_size, rows=rows, total=total)
            places = [None if i is None else stream.places(i, 1)[0] for i in numbers]
            batch = reader.batch([None if p is None else (stream.shard(p), p.row) for p in places])
            if self.sources:
                batch["source"] = torch.tensor([-1 if p is None else p.source for p in places])
            yield batch


def held_out_coverage(tokenizer: Any, sources: list[Any]) -> float:
    """Return the share of the held-out text that the tokenizer's ids restore, by the first bytes of each source."""
    if keeps_every_text(tokenizer):
        return 1.0
    texts = (text for source in sources for text in first_texts(source, num_bytes=LOOKED_AT_BYTES))
    from pipeline.tokenizer.coverage import coverage

    return coverage(tokenizer, texts)


def first_texts(source: Any, *, num_bytes: int, role: str | None = None) -> Iterator[str]:
    """Yield the first documents of a source, or messages of conversations (those of a role), until they have so many
    bytes."""
    for item in (item for block in source.read() for item in block.items):
        said = (m for m in getattr(item, "messages", ()) if role in (None, m.get("role")))
        texts = [item.text] if hasattr(item, "text") else [str(message.get("content") or "") for message in said]
        yield from texts
        num_bytes -= sum(len(text.encode()) for text in texts)
        if num_bytes <= 0:
            return


def _bytes_of(shard: Shard, rows: int, lengths_V: np.ndarray | None) -> int:
    """Return bytes of the text that the targets of a shard's first rows stand for."""
    total, width = 0, shard.input_ids.shape[1]
    for first in range(0, min(rows, len(shard.used)), ROWS_AT_ONCE):
        part = slice(first, min(first + ROWS_AT_ONCE, rows))
        if shard.target_bytes is not None:
            lengths = np.maximum(shard.target_bytes[part], 0)
        else:
            assert lengths_V is not None
            lengths = lengths_V[shard.input_ids[part]]
        if shard.trained is not None:
            is_target = bits(shard.trained[part], width)
        else:
            is_target = np.arange(width) < shard.used[part][:, None]
        total += int(lengths[:, 1:].sum(where=is_target[:, 1:], dtype=np.int64))
    return total
