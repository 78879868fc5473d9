"""TRL's SFTTrainer with packing=True over tokenized texts, by epochs, continued as by resume_from_checkpoint=True.

A row is the numbers of the four texts that were packed into it.

packages: trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/trl/sft_trainer#packing
    https://huggingface.co/docs/transformers/trainer#checkpoints
notes: Rows are packed before the training, so it continues as the Trainer does on rows in memory. After a kill in
    a save see trainer_map.
"""

import os

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import TrainerJournal, tiny_model

FILLERS = 64  # ids below it fill the texts, ids from it on are the numbers of the texts
ROW_TOKENS = 64
LENGTHS = (24, 8, 24, 8)  # of the texts: four of them fill a row


def main() -> None:
    given = arguments()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    num_texts = len(LENGTHS) * given.rows
    output = given.folder / "output"
    training = SFTConfig(
        output_dir=str(output),
        packing=True,
        max_length=ROW_TOKENS,
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
        bf16=False,
    )
    texts = []
    for text in range(num_texts):
        length = LENGTHS[text % len(LENGTHS)]
        fillers = [(text * 7 + place * 3) % FILLERS for place in range(1, length)]
        texts.append({"input_ids": [FILLERS + text, *fillers]})
    words = {f"word{number}": number for number in range(FILLERS + num_texts)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="word0", pad_token="word0"
    )
    model = tiny_model(vocab_size=len(words))
    trainer = SFTTrainer(model, training, train_dataset=Dataset.from_list(texts), processing_class=tokenizer)
    TrainerJournal(trainer, Journal(given.folder), of_batch=packed_rows)
    last = get_last_checkpoint(str(output)) if output.exists() else None
    trainer.train(resume_from_checkpoint=last)


def packed_rows(batch: dict) -> list[str]:
    """Return each row's texts; the rows of a batch may be one line, one behind the other."""
    rows = []
    for row in batch["input_ids"].reshape(-1, ROW_TOKENS).tolist():
        rows.append("+".join(str(number - FILLERS) for number in row if number >= FILLERS))
    return rows


if __name__ == "__main__":
    main()
