#!/usr/bin/env bash
# Title: grain's ShardOptions with drop_remainder=False still leaves rows out of every epoch: 6 and 13 of 20 on 3
#   ranks.
# Packages: grain==0.2.18
# Guess: drop_remainder=False means that no row is dropped: ranks get 7, 7 and 6 of 20 rows, as even_split says.
# Seen: the shards are of 7, 7 and 6 rows, but IndexSampler ends every rank after 6: unshuffled the rows 6 and 13 are
#   read by nobody. Shuffled, other two are left out. With num_epochs=2 each rank ends after 13 rows: a rank of 7 rows
#   is one short of two epochs, the rank of 6 reads one row a third time. On 8 ranks 4 of the 20 rows are never read
#   in one epoch. With drop_remainder=True the last 2 are dropped, as said. Where the ranks divide the rows (4 ranks),
#   and with MapDataset[rank::ranks], nothing is lost. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: an evaluation with one epoch scores fewer rows than it says; the count is that of drop_remainder=True.
# Tandem: does not use grain; its losses and scores are those of one process for any number (docs/promises.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import collections
import logging

logging.disable(logging.WARNING)
import grain.python as grain

ROWS = list(range(20))


def read(ranks, drop, shuffle=False, epochs=1):
    """Return the rows of each rank."""
    rows = []
    for rank in range(ranks):
        shard = grain.ShardOptions(shard_index=rank, shard_count=ranks, drop_remainder=drop)
        sampler = grain.IndexSampler(
            num_records=len(ROWS), shard_options=shard, shuffle=shuffle, num_epochs=epochs, seed=1
        )
        rows.append([int(row) for row in grain.DataLoader(data_source=ROWS, sampler=sampler, worker_count=0)])
    return rows


def left_out(shares):
    return sorted(set(ROWS) - {row for share in shares for row in share})


three = read(3, drop=False)
shuffled = read(3, drop=False, shuffle=True)
twice = collections.Counter(row for share in read(3, drop=False, shuffle=True, epochs=2) for row in share)
eight = read(8, drop=False)
print("rows of 3 ranks:", three)
print("left out by 3 ranks:", left_out(three))
print("left out by 3 ranks, shuffled: ", len(left_out(shuffled)), "rows")
print("how many rows are read how often in 2 epochs:", dict(sorted(collections.Counter(twice.values()).items())))
print("left out by 8 ranks:", left_out(eight))
assert left_out(three) == [6, 13] and [len(share) for share in three] == [6, 6, 6], "no longer holds: 3 ranks"
assert len(left_out(shuffled)) == 2, "no longer holds: shuffled"
assert collections.Counter(twice.values()) == {1: 2, 2: 17, 3: 1}, "no longer holds: two epochs"
assert len(left_out(eight)) == 4, "no longer holds: 8 ranks"

# The controls: the rows that drop_remainder=True leaves out, ranks that divide the rows, and the newer interface.
dropped = read(3, drop=True)
slices = [list(grain.MapDataset.source(ROWS)[rank::3]) for rank in range(3)]
print("left out by 3 ranks with drop_remainder=True:", left_out(dropped))
print("left out by 4 ranks:", left_out(read(4, drop=False)), "by slices of a MapDataset:", left_out(slices))
assert left_out(dropped) == [18, 19], "the control is wrong"
assert left_out(read(4, drop=False)) == [] and left_out(slices) == [], "the control is wrong"
PROGRAM
