"""transformers' Trainer over rows that are all in memory, by epochs, continued as resume_from_checkpoint=True does.

packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/transformers/trainer#checkpoints
notes: resume_from_checkpoint=True takes the newest folder, whole or not: after a kill in a save the next start
    fails until somebody deletes that folder.
"""

import os

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import TrainerJournal, number_rows, tiny_model


def main() -> None:
    given = arguments()
    os.environ["ACCELERATE_USE_CPU"] = "true"  # gloo for several ranks
    output = given.folder / "output"
    training = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.rank_batch,
        save_steps=given.save_every,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        dataloader_num_workers=given.workers,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(tiny_model(), training, train_dataset=number_rows(given.rows))
    TrainerJournal(trainer, Journal(given.folder))
    last = get_last_checkpoint(str(output)) if output.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
