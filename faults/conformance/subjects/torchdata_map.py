"""A plain loop over torchdata's StatefulDataLoader and rows in memory, shuffled; the checkpoint has its state_dict.

packages: torchdata==0.11.0 transformers==5.23.0 torch==2.13.0
offers: workers
docs: https://docs.pytorch.org/data/0.11/stateful_dataloader_tutorial.html
    https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader/README.md
notes: A state of a loader without workers cannot be loaded by one with workers. That the losses are exact takes a
    line that no page has: the iterator is made before torch's random state is put back, as making it draws a seed.
    The loop writes checkpoints to another name and renames them; nothing in a save can hurt it.
"""

from torchdata.stateful_dataloader import StatefulDataLoader

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import PlainTraining, collate, number_rows


def main() -> None:
    given = arguments()
    training = PlainTraining(given)
    loader = StatefulDataLoader(
        number_rows(given.rows),
        batch_size=given.batch,
        shuffle=True,
        collate_fn=collate,
        num_workers=given.workers,
    )
    state = training.load()
    epoch = 0
    if state is not None:
        epoch = state["epoch"]
        loader.load_state_dict(state["loader"])
    journal = Journal(given.folder)
    journal.start(training.step)
    while epoch < given.epochs and training.step < given.steps:
        for batch in training.batches_of(loader):
            if training.make_step(batch, journal):
                training.save(loader=loader.state_dict(), epoch=epoch)
        epoch += 1
    journal.end(training.step, training.model)


if __name__ == "__main__":
    main()
