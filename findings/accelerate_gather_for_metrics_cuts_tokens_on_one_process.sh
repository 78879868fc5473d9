#!/usr/bin/env bash
# Title: accelerate's gather_for_metrics drops token values of the last batch on one process, too.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: it drops the rows that other processes repeat, so on one process it gives back what it gets.
# Seen: in a last batch that is not full it keeps as many entries as the batch has rows, whatever the entries are: of
#   10 rows of 6 tokens in batches of 4, flattened token losses come back as 50 of 60 (2 of the last 12). With 12 rows,
#   with one value a row, or with gather() instead, none is lost; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a perplexity or accuracy over tokens leaves out most of the last rows; here the mean is 4.68 instead of
#   5.5, and it changes with the batch size. A test on a data set that fills its batches passes. Nothing is logged.
# Tandem: does not use gather_for_metrics; it sums losses and targets over all ranks itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PROGRAM'
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

TOKENS = 6


def gathered(rows, how, batch_size=4):
    """Return how many losses come back, and their mean. The loss of each token of a row is the row's number + 1."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(rows), batch_size=batch_size))
    values = []
    for batch in loader:
        losses = (batch + 1.0).unsqueeze(1).expand(-1, TOKENS)
        if how == "rows":
            values.append(accelerator.gather_for_metrics(losses.mean(1)))
        elif how == "tokens":
            values.append(accelerator.gather_for_metrics(losses.flatten()))
        else:
            values.append(accelerator.gather(losses.flatten()))
    values = torch.cat(values)
    return len(values), round(values.mean().item(), 4)


for how in ("tokens", "gather", "rows"):
    for rows in (10, 12):
        print(f"{how} of {rows} rows: number and mean:", *gathered(rows, how))
print("tokens of 10 rows in batches of 5: number and mean:", *gathered(10, "tokens", batch_size=5))
assert gathered(10, "tokens") == (50, 4.68), "no longer holds: the last batch is not cut on one process"
assert gathered(10, "tokens", batch_size=5) == gathered(10, "gather") == (60, 5.5), "no longer holds: the controls"
assert gathered(12, "tokens") == (72, 6.5) and gathered(10, "rows") == (10, 5.5), "no longer holds: the controls"
PROGRAM
