"""A plain loop over a shuffled stream of datasets, with set_epoch and the stream's own state_dict, as its page has it.

packages: datasets==5.2.0 torch==2.13.0
docs: https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration
    https://huggingface.co/docs/datasets/stream#reshuffle
notes: The page says that the rows in a shuffle buffer are lost by a resume, and the buffer is filled with new ones.
"""

from datasets import Dataset

from faults.conformance.loader_subject import LoaderTraining
from faults.conformance.subject import arguments, row_ids


def main() -> None:
    given = arguments()
    training = LoaderTraining(given)
    rows = Dataset.from_list([{"ids": row_ids(row)} for row in range(given.rows)])
    stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=42, buffer_size=16).batch(given.batch)
    if training.loader_state is not None:
        stream.load_state_dict(training.loader_state)
    training.train(stream, set_epoch=stream.set_epoch)


if __name__ == "__main__":
    main()
