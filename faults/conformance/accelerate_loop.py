"""The loop of accelerate's checkpointing page and example, for the three adapters that differ in its settings.

https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
https://github.com/huggingface/accelerate/blob/v1.15.0/examples/by_feature/checkpointing.py
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import Batches, collate, number_rows, step_folders, tiny_model, warmup_and_decay


def train(*, call_set_epoch: bool = False, **loader_settings: bool) -> None:
    """Train to the end from the newest checkpoint. loader_settings: of DataLoaderConfiguration."""
    given = arguments()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loader_settings))
    set_seed(42)
    model = tiny_model()
    batches = Batches(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = warmup_and_decay(optimizer, given.steps)
    loader = torch.utils.data.DataLoader(
        number_rows(given.rows),
        batch_size=given.rank_batch,
        shuffle=True,
        collate_fn=collate,
        num_workers=given.workers,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    step = 0
    if checkpoints := step_folders(given.folder):
        accelerator.load_state(str(checkpoints[-1]))
        step = int(checkpoints[-1].name.removeprefix("step_"))
    journal = Journal(given.folder)
    journal.start(step)
    first_epoch, batches_done = divmod(step, len(loader))
    for epoch in range(first_epoch, given.epochs):
        model.train()
        if call_set_epoch:
            loader.set_epoch(epoch)
        rows = loader
        if epoch == first_epoch and batches_done and not loader_settings.get("use_stateful_dataloader"):
            rows = accelerator.skip_first_batches(loader, batches_done)
        for batch in rows:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            journal.step(step, *batches.take())
            if step % given.save_every == 0:
                accelerator.save_state(str(given.folder / f"step_{step}"))
    journal.end(step, accelerator.unwrap_model(model))
