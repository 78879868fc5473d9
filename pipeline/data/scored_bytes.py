"""Rows that carry how many bytes of text each token covers, for tokenizers whose ids have no fixed bytes.

Packing looks at lengths alone, so a second packer that is fed the byte counts lays them out exactly as the first one lays
out the ids. BOS and padding cover -1 bytes: they are not text.
"""

from dataclasses import replace

import numpy as np

from pipeline.data.packers import Packer
from pipeline.data.packing import Origin, PackedRows

NO_TEXT = -1


class BytesPacker:
    """Interface of packers.Packer, with the bytes of every token as a third argument of `add`."""

    def __init__(self, kind: type[Packer], *, bos: int, pad: int, dtype: str, **settings):
        self.ids = kind(bos=bos, pad=pad, dtype=dtype, **settings)
        self.lengths = kind(bos=NO_TEXT, pad=NO_TEXT, dtype="int32", **settings)

    @property
    def counts(self) -> dict[str, int]:
        return self.ids.counts

    @counts.setter
    def counts(self, counts: dict[str, int]) -> None:
        self.ids.counts = counts

    def add(self, ids: np.ndarray, origin: Origin, lengths: np.ndarray) -> list[PackedRows]:
        return _together(self.ids.add(ids, origin), self.lengths.add(lengths, origin))

    def finish(self) -> list[PackedRows]:
        return _together(self.ids.finish(), self.lengths.finish())

    def state(self) -> dict[str, np.ndarray]:
        return self.ids.state() | {f"bytes.{name}": array for name, array in self.lengths.state().items()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.ids.restore({name: array for name, array in state.items() if not name.startswith("bytes.")})
        self.lengths.restore({n.removeprefix("bytes."): array for n, array in state.items() if n.startswith("bytes.")})


def _together(ids: list[PackedRows], lengths: list[PackedRows]) -> list[PackedRows]:
    return [replace(rows, target_bytes=counts.input_ids) for rows, counts in zip(ids, lengths, strict=True)]
