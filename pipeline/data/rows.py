"""Rows of training: batches, what was consumed, and the position that a checkpoint keeps."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.losses import Loss, losses_of, nothing_left, shares_lost
from pipeline.data.packing import documents_begun
from pipeline.data.plan import open_stream, step_rows_of
from pipeline.data.preparation import Preparation, delete_used, note_used
from pipeline.data.shards import Shard, shard_path
from pipeline.data.stream import RowPlace, Stream
from pipeline.process.errors import DataError
from pipeline.sources.verify import grouped

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
        target_bytes (B, T) int64, bytes of text under each target and -1 under a special one, where the shards hold them.
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
    """Return the rows of each shard: where they go in the batch, and their numbers in the shard; fillers are of None."""
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


# What a run has trained on of each source: a pure function of the rows used, so that a resume needs no state for
# it.


@dataclass(frozen=True)
class Consumed:
    """Text of one source that was trained on, over its epochs.

    samples: rows. tokens: trained targets. padded: positions behind the text of a row. documents: as documents_begun counts,
    None where shards were sealed before they counted them. bad_rows: unreadable ones in what was read, each counted once.
    """

    samples: int
    tokens: int
    padded: int
    documents: int | None
    bad_rows: int


class ConsumedCounter:
    """Sums over the first rows of a run, by source: whole shards by their seals, the one that is being read row by row, once."""

    def __init__(self, stream: Stream, *, bos: int):
        self.stream, self.bos = stream, bos
        self._current: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, shard), its running sums

    def consumed(self, rows: int) -> list[Consumed | None]:
        """Return it for the first `rows` rows, which must be sealed; None for a source whose current shard is deleted (data.keep_shards)."""
        return [self._of(source, k) for source, k in enumerate(self.stream.mixture.used(rows))]

    def _of(self, source: int, k: int) -> Consumed | None:
        sequence = self.stream.sequences[source]
        epoch, row = (0, k) if k <= sequence.rows else divmod(k, sequence.rows)
        number, row = divmod(row, sequence.shard_rows)
        sums = sequence.sums[number] + epoch * sequence.sums[-1]
        if row:
            if not sequence.is_there(number):
                return None
            sums = sums + self._running_sums(source, epoch, number)[row - 1]
        tokens, padded, documents = sums.tolist()
        shards_read = len(sequence.seals) if epoch else number + (row > 0)
        return Consumed(
            samples=k,
            tokens=tokens,
            padded=padded,
            documents=documents if sequence.counts_documents else None,
            bad_rows=sequence.num_bad_rows(shards_read),
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
        stream = open_stream(self.plan, "train")
        assert stream is not None
        self.stream: Stream = stream
        self.step_rows = step_rows_of(self.plan)
        self.row_tokens: int = self.plan["row_tokens"]
        self.reader = RowReader(
            row_tokens=self.row_tokens, bos=self.plan["bos"], pad=self.plan["pad"], isolated=self.plan["isolated"]
        )
        self.counter = ConsumedCounter(stream, bos=self.plan["bos"])
        self.rank = int(os.environ.get("RANK", 0))
        self._places: dict[int, list[RowPlace]] = {}
        self._shards_used: list[int] | None = None

    @classmethod
    def open(cls, recipe: Any = None, tokenizer: Any = None, *, preparation: Preparation) -> "TrainingRows":
        """Waits until the length of the run is known and its first step is sealed. Raises DataError when there is nothing
        to train on."""
        rows = cls(preparation)
        rows._wait_for_the_end_where_it_matters()
        rows._wait_for(1)
        names = ", ".join(s["name"] for s in rows.plan["train"]["sequences"])
        if not rows.total_rows() and (there := sum(end or 0 for end in rows.stream.mixture.ends)):
            raise DataError(
                f"data.sources ({names}): of {there:,} rows the epochs that the recipe asks for come to none, so there is no step to train. "
                "Raise train.num_train_epochs, or the epochs of the sources."
            )
        if not rows.total_rows():
            rows.raise_if_too_bad()  # says why each row could not be read
            raise DataError(f"data.sources ({names}): nothing is left to train on. {nothing_left(rows.losses())}")
        if rows.total_steps() < 1:
            raise DataError(
                f"data.sources ({names}): {rows.total_rows()} rows of {rows.row_tokens} tokens in all, fewer than the "
                f"{rows.step_rows.at(0)} of one step, so there is no step to train. Add text, or lower data.batch_tokens."
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

    def _wait_for_the_end_where_it_matters(self) -> None:
        """Epochs need the length of their source; a source that stops the run, all that the run might need of it."""
        stream = self.stream

        def known() -> bool:
            stream.refresh()
            return stream.undecided() is None

        self.preparation.wait_until(known, what="all rows, as a run in epochs is as long as they are")

    def _wait_for(self, steps: int) -> None:
        """Wait until the first `steps` steps are sealed."""
        rows = min(self.step_rows.before(steps), self.total_rows())
        if self.stream.missing(rows) is None:
            return

        def there() -> bool:
            self.stream.refresh()
            return self.stream.missing(rows) is None

        self.preparation.wait_until(there, what=f"the rows of step {steps - 1}")

    def _slide(self, step: int, places: list[RowPlace]) -> None:
        """data.keep_shards: delete what was used before this step, and wait for what was deleted and is needed again."""
        used = self.step_rows.before(step)
        shards_used = [
            k // sequence.shard_rows
            for k, sequence in zip(self.stream.mixture.used(used), self.stream.sequences, strict=True)
        ]
        if self.rank == 0 and shards_used != self._shards_used:
            note_used(self.preparation.folder, used)
            delete_used(self.stream, used, keep=self.plan["keep_shards"])
            self._shards_used = shards_used
        paths = {shard_path(self.stream.sequences[p.source].folder, p.shard) for p in places}
        self.preparation.wait_until(lambda: all(path.exists() for path in paths), what=f"the rows of step {step}")

    def places(self, step: int) -> list[RowPlace]:
        """Return where the rows of a step lie."""
        if step not in self._places:
            first, end = self.step_rows.before(step), self.step_rows.before(step + 1)
            assert 0 <= first < end <= self.total_rows(), f"step {step} is not of this run"
            self._wait_for(step + 1)
            while len(self._places) >= KEPT_STEPS:
                del self._places[next(iter(self._places))]
            places = self.stream.places(first, end - first)
            if self.plan["keep_shards"]:
                self._slide(step, places)
            self._places[step] = places
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
        return self.plan["train"]["sequences"][place.source]["name"], pq, rg, row

    def position(self, step: int) -> dict:
        """Return where the data stands when `step` steps are done, for the checkpoint and the console line; JSON.

        sources: of each, k = rows used (over epochs) and epoch from 1. epoch, pq, rg, source: of the last row used.
        """
        rows = self.step_rows.before(step)
        used = self.stream.mixture.used(rows)
        names = [s["name"] for s in self.plan["train"]["sequences"]]
        sources = {
            name: {"key": key, "k": k, "epoch": self._epoch(s, max(0, k - 1)) + 1}
            for s, (name, key, k) in enumerate(zip(names, self.stream.keys, used, strict=True))
        }
        position: dict = {"step": step, "rows": rows, "sources": sources}
        if step > 0:
            last = self.places(step - 1)[-1]
            source, pq, rg, _ = self._origin(last)
            position |= {"epoch": last.epoch + 1, "source": source, "pq": pq, "rg": rg}
        return position

    def consumed(self, step: int) -> dict[str, Consumed | None]:
        """Return what the first `step` steps trained on, by source; they must be sealed."""
        names = [s["name"] for s in self.plan["train"]["sequences"]]
        return dict(zip(names, self.counter.consumed(self.step_rows.before(step)), strict=True))

    def num_retries(self) -> int:
        """Return how often the process that prepares has read something again."""
        return self.preparation.num_retries()

    def _epoch(self, source: int, k: int) -> int:
        sequence = self.stream.sequences[source]
        return 0 if sequence.end is None else k // max(1, sequence.rows)

    def losses(self) -> list[Loss]:
        """Return what packing has left out of each source (losses.py)."""
        self.stream.refresh()
        return losses_of(self.plan, "train", self.stream)

    def shares(self) -> dict[str, dict]:
        """Return by source: its cache key, rows and tokens of the run, their share, targets a row, epochs where they are known; and
        of what the run reads, as far as it is sealed, the shares padded and lost (`shares_lost`), of conversations also how
        they fit the rows (`Fit.facts`).

        In a run's manifest the key keeps `--prune` from deleting the shards.
        """
        used = self.stream.mixture.used(self.total_rows())
        out = {}
        entries = zip(
            self.plan["train"]["sequences"],
            self.stream.sequences,
            used,
            losses_of(self.plan, "train", self.stream),
            strict=True,
        )
        for about, sequence, rows, (_, totals, fit) in entries:
            per_row = totals["targets"] / totals["rows"] if totals["rows"] else 0.0
            out[about["name"]] = {
                "key": about["key"],
                "rows": rows,
                "tokens": rows * self.row_tokens,
                "share": rows / max(1, self.total_rows()),
                "targets_per_row": per_row,
                "lost": shares_lost(totals, chat=self.plan["kind"] == "chat"),
                **({"conversations": fit.facts()} if fit is not None else {}),
                **({"epochs": rows / sequence.rows} if sequence.end is not None and sequence.rows else {}),
            }
        return out

    def raise_if_too_bad(self) -> None:
        """Raises DataError when more rows proved unreadable, in the shards this run reads, than data.max_bad_rows."""
        self.stream.refresh()
        bad = []
        for s, sequence in enumerate(self.stream.sequences):
            bad += sequence.bad_rows(self.stream.shards_needed(s))
        bad = list(dict.fromkeys(bad))
        if len(bad) > self.plan["max_bad_rows"]:
            reasons = grouped(bad)
            shown = "\n".join(f"  {line}" for line in reasons[:20]) + (
                f"\n  ... and {len(reasons) - 20} more reasons" if len(reasons) > 20 else ""
            )
            raise DataError(
                f"data.sources: {len(bad)} rows are unreadable and data.max_bad_rows is {self.plan['max_bad_rows']}, so the run stops "
                f"here:\n{shown}\nThe rows are left out of training. Raise data.max_bad_rows to accept that and run the same command "
                "again, or correct the files and start a new run."
            )
