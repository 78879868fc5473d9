#!/usr/bin/env bash
# Title: A stream split by take(10) and skip(10) trains on 7 of its 10 validation rows once ranks or workers read it.
# Packages: datasets==5.2.0 torch==2.13.0
# Guess: take(10) is rows 0..9 and skip(10) is the rest, whoever reads them: ranks and workers share out what is left.
# Seen: a stream of 4 shards of 10 rows. With 1 rank and 0 workers take(10) is rows 0..9 and skip(10) rows 10..39.
#   With 2 ranks (split_dataset_by_node) or 2 workers of a DataLoader each shard group skips 5 rows of its own:
#   skip(10) then holds the rows 5..9 and lacks 10..14. With 4 ranks or workers each skips 2 or 3: 7 of the 10 rows
#   that the evaluation on one process read as validation are trained, and 7 training rows come in neither. The other
#   way round, take(10) with 4 workers is 0-2, 10-12, 20-21, 30-31. The number of rows is always right. A stream of
#   one shard is split rightly. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: the validation loss is partly measured on trained rows; another number of GPUs is another split.
# Tandem: does not use them: what is held out is fixed by file and row, not by who reads (docs/data.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 torch==2.13.0 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" OMP_NUM_THREADS=1 venv/bin/python - <<'PROGRAM'
import warnings

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")  # of 4 workers on 2 processors
ROWS = list(range(40))


def stream(shards=4):
    return Dataset.from_dict({"row": ROWS}).to_iterable_dataset(num_shards=shards)


def by_ranks(data, ranks):
    """Return the rows that all ranks read together."""
    return sorted(row["row"] for rank in range(ranks) for row in split_dataset_by_node(data, rank, ranks))


def by_workers(data, workers):
    """Return the rows that a loader with so many workers hands out."""
    loader = DataLoader(data, batch_size=5, num_workers=workers)
    return sorted(row for batch in loader for row in batch["row"].tolist())


validation = [row["row"] for row in stream().take(10)]  # as an evaluation on one process reads them
assert validation == ROWS[:10]

leaks = {}
for count in (1, 2, 4):
    train = by_ranks(stream().skip(10), count)
    workers = by_workers(stream().skip(10), 0 if count == 1 else count)
    assert len(train) == 30, "no longer holds: the number of rows changed"
    assert train == workers, "no longer holds: ranks and workers differ"
    leaks[count] = sorted(set(train) & set(validation))
    never = sorted(set(ROWS) - set(train) - set(validation))
    print(f"validation rows trained by {count} ranks or workers: {leaks[count]}, rows in neither: {never}")
    assert len(never) == len(leaks[count])
taken = by_workers(stream().take(10), 4)
print("take(10) by 4 workers:", taken)
one_shard = by_ranks(stream(1).skip(10), 4)
print("validation rows trained by 4 ranks, one shard:", sorted(set(one_shard) & set(validation)))

assert leaks[2] == [5, 6, 7, 8, 9], "no longer holds: 2 ranks or workers"
assert leaks[4] == [3, 4, 5, 6, 7, 8, 9], "no longer holds: 4 ranks or workers"
assert taken == [0, 1, 2, 10, 11, 12, 20, 21, 30, 31], "no longer holds: take by 4 workers"
# The controls: one process, and a stream that is one shard.
assert leaks[1] == [] and one_shard == ROWS[10:], "the control is wrong"
PROGRAM
