"""Lightning's Trainer over torchdata's StatefulDataLoader, saved by ModelCheckpoint, continued with ckpt_path="last".

packages: lightning==2.6.6 torchdata==0.11.0 torch==2.13.0
offers: workers, ranks
docs: https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html
    https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
    https://lightning.ai/docs/pytorch/stable/data/alternatives.html
notes: Rows, weights, optimizer and schedule are continued; the random state is not in Lightning's checkpoint
    (2.6.6), so dropout draws other numbers from the first step on. From a checkpoint of an epoch's last step the
    loader is continued behind its end, and Lightning takes the empty pass for the next epoch: with two epochs the
    training ends at once, half done. With several processes Lightning deals out the order of the loader's own
    sampler, which is drawn anew at a resume. On another number of workers the loader's state does not fit, and
    Lightning's error hides the loader's.
"""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from faults.conformance.loader_subject import VOCABULARY, row_tensor
from faults.conformance.subject import Journal, arguments


class Tiny(lightning.LightningModule):
    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Dropout(0.1), nn.Linear(64, VOCABULARY))

    def training_step(self, ids_BT, batch_idx):
        logits_BTV = self.layers(ids_BT[:, :-1])
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KeepJournal(Callback):
    def __init__(self, journal: Journal):
        self.journal = journal

    def on_train_start(self, trainer, module) -> None:
        self.journal.start(trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.journal.step(trainer.global_step, batch[:, 0].tolist(), float(outputs["loss"]))

    def on_train_end(self, trainer, module) -> None:
        self.journal.end(trainer.global_step, module.layers)


def train(loader_class: type) -> None:
    given = arguments()
    lightning.seed_everything(0, verbose=False)
    # The journal is the first callback: it notes a step before the checkpoint of that step is written.
    checkpoints = ModelCheckpoint(given.folder / "checkpoints", every_n_train_steps=given.save_every, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=given.epochs,
        accelerator="cpu",
        devices=given.ranks,
        strategy="ddp" if given.ranks > 1 else "auto",
        callbacks=[KeepJournal(Journal(given.folder)), checkpoints],
        default_root_dir=given.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [row_tensor(row) for row in range(given.rows)]
    loader = loader_class(rows, batch_size=given.rank_batch, shuffle=True, num_workers=given.workers)
    trainer.fit(Tiny(given.steps), loader, ckpt_path="last")


def main() -> None:
    train(StatefulDataLoader)


if __name__ == "__main__":
    main()
