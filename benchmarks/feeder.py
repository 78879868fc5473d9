"""Tokens a second from a memory-mapped shard to a training batch, on one core, against copying the same ids plainly.

    python benchmarks/feeder.py [--row-tokens 2048] [--batch-rows 32] [--pairs 50]

A shard of random ids on disk, warm in the page cache; each batch takes the next rows of a random order, as training does.
plain: numpy's indexing and conversion to int64, once for the ids and once for the labels, without which no batch is made.
"""

import tempfile
from pathlib import Path

import numpy as np
from common import arguments, in_turns, show

from pipeline.data.packing import PackedRows
from pipeline.data.rows import RowReader
from pipeline.data.shard_writer import write_rows
from pipeline.data.shards import Shard, shard_path

SHARD_ROWS = 2048
BATCHES = 8  # of one timed call


def make_shard(folder: Path, row_tokens: int) -> Shard:
    rng = np.random.default_rng(0)
    ids = rng.integers(10, 32768, (SHARD_ROWS, row_tokens + 1)).astype(np.uint16)
    ids[rng.random(ids.shape) < 1 / 500] = 0  # the BOS of a document
    ids[:, 0] = 0
    used = np.full(SHARD_ROWS, row_tokens + 1, np.int32)
    used[::8] = row_tokens // 2  # padded
    origins = np.zeros((SHARD_ROWS, 3), np.int32)
    write_rows(folder, 0, PackedRows(ids, origins, used))
    return Shard(shard_path(folder, 0))


def main() -> None:
    options = arguments(__doc__, row_tokens=2048, batch_rows=32, pairs=50)
    order = np.random.default_rng(1).permutation(SHARD_ROWS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shard = make_shard(Path(folder), options.row_tokens)
        numbers = [order[i * options.batch_rows % SHARD_ROWS :][: options.batch_rows] for i in range(BATCHES)]
        for isolated in (False, True):
            reader = RowReader(row_tokens=options.row_tokens, bos=0, pad=1, isolated=isolated)

            def ours(reader=reader) -> None:
                for batch in numbers:
                    reader.batch([(shard, int(row)) for row in batch])

            def plain() -> None:
                for batch in numbers:
                    ids = shard.input_ids[batch]
                    ids[:, :-1].astype(np.int64)
                    ids[:, 1:].astype(np.int64)

            found = in_turns(ours, plain, pairs=options.pairs)
            tokens = BATCHES * options.batch_rows * options.row_tokens
            rows.append({"isolated": isolated, "tokens_per_s": tokens / found["ours_s"], **found})
    show(options, rows)


if __name__ == "__main__":
    main()
