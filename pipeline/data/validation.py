"""Held-out rows under a fixed protocol: what they are depends on no key of the packing, batch or world size."""

from collections.abc import Iterator

from pipeline.artifacts.errors import DataError
from pipeline.data.batches import RowReader, rows_of_micro_batch
from pipeline.data.plan import open_stream
from pipeline.data.prepare import Preparation
from pipeline.data.stream import Stream


class ValidationRows:
    """protocol_id: of val/bpb, rows by best_fit_crop (conversations: packed whole and isolated). documents_protocol_id: of
    val/bpb_documents, whole documents cut into isolated pieces, every byte once; None for conversations."""

    def __init__(self, preparation: Preparation):
        self.preparation, self.plan = preparation, preparation.plan
        self.protocol_id: str = self.plan["protocol_id"]
        self.documents_protocol_id: str | None = self.plan["documents_protocol_id"]
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

    def batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """A rank's batches of `rows` rows for val/bpb; every rank gets equally many, the last ones filled up with fillers."""
        yield from self._batches("validation", rows=rows, rank=rank, world_size=world_size)

    def document_batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """The same for val/bpb_documents; nothing for conversations."""
        if self.plan["documents"] is not None:
            yield from self._batches("documents", rows=rows, rank=rank, world_size=world_size)

    def num_rows(self, role: str = "validation") -> int:
        """Rows that are scored; waits until they are prepared."""
        return self._sealed(role).mixture.total_rows or 0

    def _sealed(self, role: str) -> Stream:
        stream = open_stream(self.plan, role)
        assert stream is not None

        def there() -> bool:
            stream.refresh()
            return stream.missing() is None

        self.preparation.wait_until(there, what="the validation rows")
        if not stream.mixture.total_rows:
            names = ", ".join(s["name"] for s in self.plan[role]["sequences"])
            raise DataError(
                f"data.validation ({names}): the held-out files give no row to score. Name others in data.validation."
            )
        return stream

    def _batches(self, role: str, *, rows: int, rank: int, world_size: int) -> Iterator[dict]:
        stream = self._sealed(role)
        total = stream.mixture.total_rows or 0
        isolated = role == "documents" or self.plan["kind"] == "chat"
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
