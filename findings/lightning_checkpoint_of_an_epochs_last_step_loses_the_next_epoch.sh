#!/usr/bin/env bash
# Title: Lightning, resumed from an epoch's last step with a StatefulDataLoader, leaves out the whole next epoch.
# Packages: lightning==2.6.6 torchdata==0.11.0 torch==2.13.0
# Guess: a resume from the last step of epoch 1 is the easiest one: the loader begins epoch 2, and it is trained.
# Seen: ModelCheckpoint(every_n_train_steps=8), 16 steps in an epoch, 2 epochs. Resumed from step 8 the training
#   ends at step 32; resumed from step 16 it ends at once, at step 16: fit returns with "max_epochs=2 reached", and
#   64 of the 128 rows were never trained. The loader is given its state of a finished epoch, so its first pass is
#   empty, and Lightning takes that pass for epoch 2. With torch's DataLoader, which has no state, the same resume
#   trains all of epoch 2. 2026-11-28, Python 3.11, Linux, CPU.
# Costs: an epoch of the training, without a word, if the interval of the checkpoints divides the steps of an epoch.
# Tandem: Does not use Lightning; the conformance program cuts Tandem at an epoch's last step as well (epoch_end).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lightning==2.6.6 torchdata==0.11.0 torch==2.13.0 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
cat >program.py <<'PROGRAM'
import logging
import warnings

warnings.simplefilter("ignore")
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Tiny(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows += batch[:, 0].int().tolist()
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(name, loader_class, *, resume_from=None):
    """Return the step at which a training of two epochs ends, and the rows it trained."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(name, filename="{step}", every_n_train_steps=8, save_top_k=-1)],
    )
    data = torch.arange(64.0)[:, None]
    model = Tiny()
    ckpt_path = None if resume_from is None else f"{name}/step={resume_from}.ckpt"
    trainer.fit(model, loader_class(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    print(f"{name}, resumed from {resume_from}: ends at step {trainer.global_step}, {len(model.rows)} rows trained")
    return trainer.global_step, len(model.rows)


assert train("StatefulDataLoader", StatefulDataLoader) == (32, 128)
assert train("StatefulDataLoader", StatefulDataLoader, resume_from=8) == (32, 96)
seen = train("StatefulDataLoader", StatefulDataLoader, resume_from=16)
assert seen == (16, 0), f"no longer holds: {seen}"
assert train("DataLoader", DataLoader) == (32, 128)
assert train("DataLoader", DataLoader, resume_from=16) == (32, 64)
PROGRAM
venv/bin/python program.py 2>"$folder/log" || { tail -n 20 "$folder/log" >&2; exit 1; }
