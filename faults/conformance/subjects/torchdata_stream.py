"""A plain loop over torchdata's StatefulDataLoader and a stream of datasets, not shuffled, as on datasets' page.

packages: torchdata==0.11.0 datasets==5.2.0 transformers==5.23.0 torch==2.13.0
offers: workers
docs: https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration
    https://docs.pytorch.org/data/0.11/stateful_dataloader_tutorial.html
notes: Without a shuffle, of which the page of datasets says that a resume loses the rows of its buffer. Otherwise
    as torchdata_map.
"""

from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from faults.conformance.subject import Journal, arguments
from faults.conformance.torch_subject import PlainTraining, collate, number_rows


def main() -> None:
    given = arguments()
    training = PlainTraining(given)
    rows = Dataset.from_list(number_rows(given.rows)).to_iterable_dataset(num_shards=4)
    loader = StatefulDataLoader(rows, batch_size=given.batch, collate_fn=collate, num_workers=given.workers)
    state = training.load()
    epoch = 0
    if state is not None:
        epoch = state["epoch"]
        loader.load_state_dict(state["loader"])
    journal = Journal(given.folder)
    journal.start(training.step)
    while epoch < given.epochs and training.step < given.steps:
        rows.set_epoch(epoch)
        for batch in training.batches_of(loader):
            if training.make_step(batch, journal):
                training.save(loader=loader.state_dict(), epoch=epoch)
        epoch += 1
    journal.end(training.step, training.model)


if __name__ == "__main__":
    main()
