"""Training rows by step, a pure function of (seed, step) for any number of processes: batches, what was consumed, and
the position that a checkpoint keeps.
"""

import os
from dataclasses import dataclass

import numpy as np

from pipeline.data.losses import conversation_facts, epochs_of, nothing_left, shares_lost
from pipeline.data.mixture import MixedDataset, RowPlace
from pipeline.data.preparation import Preparation
from pipeline.data.row_plan import open_stream, step_rows_of
from pipeline.data.shards import Shard, ShardedDataset, documents_begun
from pipeline.process.errors import DataError
from pipeline.sources.verify import grouped

IGNORED = -100


class RowReader:
    """Copy rows into batches. T = row_tokens, B = rows of the batch.

    isolated: position_ids restart where a document or conversation begins, which is how the model keeps them apart.
    """

    def __init__(self, *, row_tokens: int, bos: int, pad: int, isolated: bool):
        self.row_tokens, self.bos, self.pad, self.isolated = row_tokens, bos, pad, isolated

    def batch(self, rows: list[tuple[Shard, int] | None]) -> dict:
        """Return input_ids, labels, shift_labels (B, T) int64, position_ids (B, T) int64 when isolated.

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
        # 1. The rows of each shard in one copy.
        for shard, at, numbers in _by_shard(rows):
            if shard is None:
                input_ids_BT[at], labels_BT[at] = self.pad, IGNORED
                continue
            ids = shard.input_ids[numbers]
            input_ids_BT[at], labels_BT[at] = ids[:, :-1], ids[:, 1:]
            if bytes_BT is not None and shard.target_bytes is not None:
                bytes_BT[at] = shard.target_bytes[numbers][:, 1:]
            # 2. Of conversations a bit of each position says whether it is trained, and where one begins.
            if shard.trained is not None and shard.starts is not None:
                labels_BT[at] = np.where(bits(shard.trained[numbers], T + 1)[:, 1:], ids[:, 1:], np.int64(IGNORED))
                if starts_BT is not None:
                    starts_BT[at] = bits(shard.starts[numbers], T + 1)[:, :-1]
                continue
            if starts_BT is not None:
                # Text holds no control token, so a BOS is always the start of a piece.
                starts_BT[at] = ids[:, :-1] == self.bos
            # 3. Of text everything is trained but the padding, which few rows have.
            used = shard.used[numbers]
            for n in np.flatnonzero(used <= T):
                i, end = at[n], int(used[n])
                labels_BT[i, end - 1 :] = IGNORED
                if starts_BT is not None:
                    starts_BT[i, end:] = False
                    starts_BT[i, end : end + 1] = True  # the padding is a segment too
        # Shifted already, and one tensor: losses of transformers shift `labels` where they get no shift_labels.
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
    """Return (..., count) bool out of (..., bytes)."""
    return np.unpackbits(packed, axis=-1, count=count).view(bool)


def positions(starts_BT: np.ndarray) -> np.ndarray:
    """Return (B, T) int64 positions that begin again at 0 at every start; a row begins at 0."""
    at = np.arange(starts_BT.shape[1], dtype=np.int64)
    return at - np.maximum.accumulate(np.where(starts_BT, at, 0), axis=1)


def rows_of_micro_batch(micro_step: int, *, rank: int, world_size: int, rows: int, total: int) -> list[int | None]:
    """Return numbers of the rows, of `total`, that a rank gets in a micro-step; None for those past the end."""
    first = (micro_step * world_size + rank) * rows
    numbers: list[int | None] = [*range(first, min(first + rows, total))]
    return numbers + [None] * (rows - len(numbers))


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

    def __init__(self, stream: MixedDataset, *, bos: int):
        self.stream, self.bos = stream, bos
        self._current: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, shard), its running sums

    def consumed(self, rows: int) -> list[Consumed]:
        """Return it for the first `rows` rows, which must be sealed."""
        return [self._of(source, k) for source, k in enumerate(self.stream.mixture.used(rows))]

    def _of(self, source: int, k: int) -> Consumed:
        dataset = self.stream.datasets[source]
        epoch, row = (0, k) if k <= dataset.rows else divmod(k, dataset.rows)
        number, row = divmod(row, dataset.shard_rows)
        sums = dataset.sums[number] + epoch * dataset.sums[-1]
        if row:
            sums = sums + self._running_sums(source, epoch, number)[row - 1]
        tokens, padded, documents = sums.tolist()
        # Bad rows are counted once: after the first epoch, those of all shards.
        shards_read = len(dataset.seals)
        if epoch == 0:
            shards_read = number + 1 if row else number
        return Consumed(
            samples=k,
            tokens=tokens,
            padded=padded,
            documents=documents if dataset.counts_documents else None,
            bad_rows=len(dataset.bad_rows(shards_read)),
        )

    def _running_sums(self, source: int, epoch: int, number: int) -> np.ndarray:
        """Return (rows, 3) targets, padding and documents of the shard's first rows, in the order of this epoch."""
        at = epoch, number
        if source not in self._current or self._current[source][0] != at:
            counts = row_counts(self.stream.datasets[source].shard(number), bos=self.bos)
            if self.stream.seed is not None:
                counts = counts[self.stream.order(source, epoch, number)]
            self._current[source] = at, counts.cumsum(0)
        return self._current[source][1]


def row_counts(shard: Shard, *, bos: int) -> np.ndarray:
    """Return (rows, 3) int64 targets, padding and documents of each row."""
    width = shard.input_ids.shape[1]
    starts = None if shard.starts is None else bits(shard.starts, width)
    documents = documents_begun(shard.input_ids, shard.used, starts, bos=bos)
    return np.stack([shard.targets, width - shard.used, documents], axis=1).astype(np.int64)


def _files_read(seal: dict) -> int:
    """Return how many files were read to their end when the shard was sealed."""
    cursor = seal["cursor"]
    return cursor["file"] + 1 if cursor["finishing"] else cursor["file"]


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
        """Return the rows, once the length of the run is known and its first step is sealed.

        Raises DataError when there is nothing to train on.
        """
        rows = cls(preparation)
        # Epochs need the length of their source; a source that stops the run, all that the run might need of it.
        known = "all rows, as a run in epochs is as long as they are"
        preparation.wait_until(rows.stream.is_decided, what=known)
        rows._wait_for(1)
        if not rows.total_rows():
            num_sealed = sum(end or 0 for end in rows.stream.mixture.ends)
            if num_sealed:
                raise DataError(
                    f"data.sources: of {num_sealed:,} rows the epochs of the recipe come to none, so there is no step "
                    "to train. Raise train.num_train_epochs, or the epochs of the sources."
                )
            rows.raise_if_too_bad()  # says why each row could not be read
            raise DataError(
                f"data.sources: nothing is left to train on. {nothing_left(rows.plan, 'train', rows.stream)}"
            )
        if rows.total_steps() < 1:
            raise DataError(
                f"data.sources: {rows.total_rows()} rows of {rows.row_tokens} tokens in all, fewer than the "
                f"{rows.step_rows.at(0)} of one step. Add text, or lower data.batch_tokens."
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
        """Return the trained targets of the whole global batch of a step."""
        return sum(int(self.stream.shard(place).targets[place.row]) for place in self.places(step))

    def micro_rows(self, step: int, rows: int) -> int:
        """Return the rows of a micro-batch in a step: `rows`, of a smaller step in proportion fewer."""
        # Not fewer micro-steps: transformers.Trainer counts on their number.
        return -(-rows * self.step_rows.at(step) // self.step_rows.full)

    def micro_batch(self, step: int, micro_step: int, *, rank: int, world_size: int, rows: int) -> dict:
        """Return a rank's training batch of `rows` rows. Past the step's last row come fillers of weight 0."""
        places = self.places(step)
        numbers = rows_of_micro_batch(micro_step, rank=rank, world_size=world_size, rows=rows, total=len(places))
        found: list[tuple[Shard, int] | None] = [None] * rows
        for at, number in enumerate(numbers):
            if number is not None:
                place = places[number]
                found[at] = self.stream.shard(place), place.row
        return self.reader.batch(found)

    def origins(self, step: int) -> list[tuple[str, int, int, int]]:
        """Return (source, file, row group, row) of the document that begins each row of a step."""
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
        sources = {}
        for s, (name, key, k) in enumerate(zip(self.names, self.stream.keys, used, strict=True)):
            sources[name] = {"key": key, "k": k, "epoch": self._epoch(s, max(0, k - 1)) + 1}
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
        dataset, about = self.stream.datasets[source], self.plan["train"]["sequences"][source]
        # An epoch of the mixture is one of the source, which may read its files several times (`passes`).
        epoch, row = (0, k) if dataset.end is None else divmod(k, max(1, dataset.rows))
        if "passes" not in about or not row:
            return epoch * about.get("passes", 1)
        # By the files that were read up to the shards' ends: a source's length may not be known yet. Of the shard's
        # own files, as many are taken as the row is far in it.
        number, row = divmod(row, dataset.shard_rows)
        begin = _files_read(dataset.seals[number - 1]) if number else 0
        end = _files_read(dataset.seals[number])
        done = begin + (end - begin) * row / dataset.seals[number]["rows"]
        return epoch * about["passes"] + min(int(done / about["files_in_a_pass"]), about["passes"] - 1)

    def shares(self) -> dict[str, dict]:
        """Return by source: its cache key, rows and tokens of the run, their share, targets a row, epochs where they
        are known; and of what the run reads, as far as it is sealed, the shares padded and lost (`shares_lost`), of
        conversations also how they fit the rows (`conversation_facts`).

        In a run's manifest the key keeps `--prune` from deleting the shards.
        """
        used = self.stream.mixture.used(self.total_rows())
        out: dict[str, dict] = {}
        for source, (about, dataset) in enumerate(self._sources()):
            totals, rows = dataset.totals(self.stream.shards_needed(source)), used[source]
            share = out[about["name"]] = {
                "key": about["key"],
                "rows": rows,
                "tokens": rows * self.row_tokens,
                "share": rows / max(1, self.total_rows()),
                "targets_per_row": totals["targets"] / max(1, totals["rows"]),
                "lost": shares_lost(totals, kind=self.plan["kind"]),
            }
            if totals.get("conversations"):
                share["conversations"] = conversation_facts(totals, row_tokens=self.row_tokens)
            epochs = epochs_of(about, dataset, rows)
            if epochs is not None:
                share["epochs"] = epochs
        return out

    def _sources(self) -> list[tuple[dict, ShardedDataset]]:
        return list(zip(self.plan["train"]["sequences"], self.stream.datasets, strict=True))

    def raise_if_too_bad(self) -> None:
        """Raise DataError when more rows proved unreadable, in the shards this run reads, than data.max_bad_rows."""
        self.stream.refresh()
        # Of two sources of the same shards, the rows of the one that needs more of these.
        bad: dict[str, list[str]] = {}  # by cache key
        for source, (about, dataset) in enumerate(self._sources()):
            found = [f"{about['name']}/{line}" for line in dataset.bad_rows(self.stream.shards_needed(source))]
            bad[about["key"]] = max(bad.get(about["key"], []), found, key=len)
        lines = [line for some in bad.values() for line in some]
        if len(lines) > self.plan["max_bad_rows"]:
            reasons = [f"  {line}" for line in grouped(lines)]
            if len(reasons) > 20:
                reasons[20:] = [f"  ... and {len(reasons) - 20} more reasons"]
            shown = "\n".join(reasons)
            raise DataError(
                f"data.sources: {len(lines)} rows are unreadable and data.max_bad_rows is "
                f"{self.plan['max_bad_rows']}, so the run stops here:\n{shown}\nRaise data.max_bad_rows to leave "
                "them out and run the same command again, or correct the files and start a new run."
            )
