#!/usr/bin/env bash
# Title: After accelerate's load_state inside an epoch the rows are right and the dropout is another one.
# Packages: accelerate==1.15.0 torch==2.13.0
# Guess: load_state restores torch's random state, so with the rows skipped as documented every later loss is that of
#   the uninterrupted run.
# Seen: with use_seedable_sampler=True, set_epoch and skip_first_batches the rows are those of the uninterrupted run,
#   and every loss from the first resumed step on differs. Making the loader's iterator draws a seed for its workers
#   (also without workers) from the generator that load_state has just restored; in the uninterrupted run that draw
#   was made when the epoch began. At an epoch's end, without dropout, or with the random state put back once more
#   behind iter(), the resumed losses are exact; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a resumed run with dropout, or any other random number in the model, cannot be compared with an uncut one;
#   a check of a resume by its losses fails although the rows are right.
# Tandem: does not use a DataLoader for its rows; losses after a kill are the uncut run's bits (docs/reliability.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
CUDA_VISIBLE_DEVICES="" venv/bin/python - <<'PROGRAM'
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

ROWS, BATCH, EPOCHS = 40, 4, 2


def train(*, dropout=0.5, save_at=None, resume_at=None, put_back=False):
    """Return [(rows, loss)] of the steps that this start makes."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(dropout), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.TensorDataset(torch.arange(ROWS), features)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    random_state = None
    if resume_at is not None:
        accelerator.load_state("checkpoint")
        step = resume_at
        random_state = torch.get_rng_state()
    first_epoch, done = divmod(step, len(loader))
    steps = []
    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and done:
            batches = accelerator.skip_first_batches(loader, done)
        iterator = iter(batches)
        first = next(iterator, None)  # accelerate makes the DataLoader's iterator at the first batch
        if put_back and epoch == first_epoch:
            torch.set_rng_state(random_state)
        while first is not None:
            numbers, x = first
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            steps.append((sorted(numbers.tolist()), loss.item()))
            if step == save_at:
                accelerator.save_state("checkpoint")
            first = next(iterator, None)
    return steps


def compare(name, resume_at, **how):
    """Return how many resumed steps have other rows, and how many another loss, than in the uninterrupted run."""
    dropout = {"dropout": how.pop("dropout", 0.5)}
    uncut = train(**dropout, save_at=resume_at)[resume_at:]
    resumed = train(**dropout, resume_at=resume_at, **how)
    assert len(uncut) == len(resumed) == EPOCHS * ROWS // BATCH - resume_at
    other_rows = sum(a[0] != b[0] for a, b in zip(uncut, resumed))
    other_losses = sum(a[1] != b[1] for a, b in zip(uncut, resumed))
    print(f"{name}: of {len(resumed)} resumed steps {other_rows} with other rows, {other_losses} with another loss")
    return other_rows, other_losses


inside = compare("resumed inside the first epoch", 5)
second = compare("resumed inside the second epoch", 15)
boundary = compare("resumed at the end of the first epoch", 10)
plain = compare("inside, without dropout", 5, dropout=0.0)
put_back = compare("inside, random state put back behind iter()", 5, put_back=True)
assert inside == (0, 15) and second == (0, 5), "no longer holds: the losses after load_state"
assert boundary == plain == put_back == (0, 0), "no longer holds: one of the controls"
PROGRAM
