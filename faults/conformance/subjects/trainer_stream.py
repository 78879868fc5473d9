"""transformers' Trainer over a shuffled stream, to a number of steps, continued as by resume_from_checkpoint=True.

packages: transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/transformers/trainer#checkpoints
    https://huggingface.co/docs/datasets/stream#shuffle
notes: In an epoch after the first the Trainer takes all steps so far for steps of the first epoch, skips beyond
    its end, and begins the epoch again. max_steps is looked at after a step, so a finished training that is
    started again makes one more. The order of a stream depends on the number of loader workers, and the steps that
    are skipped are counted in the new order. After a kill in a save see trainer_map.
"""

import os

from datasets import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import TrainerJournal, numbered, tiny_model


def main() -> None:
    given = arguments()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    output = given.folder / "output"
    training = TrainingArguments(
        output_dir=str(output),
        max_steps=given.max_steps,
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
    shards = [list(range(first, given.rows, 4)) for first in range(4)]
    rows = IterableDataset.from_generator(numbered, gen_kwargs={"shards": shards}).shuffle(seed=42, buffer_size=16)
    trainer = Trainer(tiny_model(), training, train_dataset=rows)
    TrainerJournal(trainer, Journal(given.folder))
    last = get_last_checkpoint(str(output)) if output.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
