#!/usr/bin/env bash
# Title: litdata, resumed with two workers in place of none, leaves out rows that both uncut epochs hold
#   (drop_last).
# Packages: litdata==0.2.76 torch==2.13.0
# Guess: 64 rows in batches of 4 divide by one worker and by two, so the 44 rows behind the checkpoint come in 11
#   batches.
# Seen: 10 batches: 4 rows never come in this epoch, and every later step is one too early. The rows behind the
#   checkpoint are dealt to the workers anew, and drop_last cuts them to a multiple of workers x batch, 40. Uncut
#   with no worker or with two, and resumed with the same number, all 64 rows come; so do they with drop_last=False,
#   also in 16 batches. The log says "using elastic resume (no duplicates)". 2026-11-28, Python 3.11, Linux, CPU.
# Costs: up to workers x batch - 1 rows of the epoch at each such resume (511 with 8 workers and batches of 64), and
#   the number of steps in the epoch that a schedule was made for.
# Tandem: Does not use litdata; rows are read by their number, without loader workers (docs/recipes.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet litdata==0.2.76 torch==2.13.0 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
cat >program.py <<'PROGRAM'
from litdata import StreamingDataLoader, StreamingDataset, optimize


def row(number):
    return number


def loader_of(*, workers, drop_last, state=None):
    dataset = StreamingDataset("data", shuffle=True, drop_last=drop_last)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def epoch(*, workers, then, drop_last):
    """Return an epoch's batches: five with some workers, the rest from the saved state with others."""
    loader = loader_of(workers=workers, drop_last=drop_last)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 5 and then is not None:
            state = loader.state_dict()
            break
    if then is not None:
        for batch in loader_of(workers=then, drop_last=drop_last, state=state):
            batches.append(batch.tolist())
    return batches


def seen(name, batches):
    rows = [number for batch in batches for number in batch]
    print(f"{name}: {len(batches)} batches, {len(rows)} rows, {64 - len(set(rows))} missing")
    return len(batches), len(rows), 64 - len(set(rows))


if __name__ == "__main__":
    optimize(row, list(range(64)), "data", chunk_size=8, num_workers=1, start_method="fork", verbose=False)
    whole = (16, 64, 0)
    assert seen("uncut, no worker", epoch(workers=0, then=None, drop_last=True)) == whole
    assert seen("uncut, two workers", epoch(workers=2, then=None, drop_last=True)) == whole
    assert seen("none, then none", epoch(workers=0, then=0, drop_last=True)) == whole
    assert seen("two, then two", epoch(workers=2, then=2, drop_last=True)) == whole
    changed = seen("none, then two", epoch(workers=0, then=2, drop_last=True))
    assert changed == (15, 60, 4), f"no longer holds: {changed}"
    kept = seen("none, then two, drop_last=False", epoch(workers=0, then=2, drop_last=False))
    assert kept[1:] == (64, 0), f"no longer holds: {kept}"
PROGRAM
venv/bin/python program.py 2>"$folder/log" || { tail -n 20 "$folder/log" >&2; exit 1; }
