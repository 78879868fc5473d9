"""Grain's MapDataset, shuffled anew in each epoch, in a plain loop that keeps the iterator's get_state.

packages: grain==0.2.18 torch==2.13.0
offers: workers, ranks
docs: https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html
    https://google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html
notes: The state belongs to the pipeline, and the number of workers is a part of it: Grain 0.2.18 does not continue on
    another one, and says so with a KeyError.
"""

import grain
import numpy as np

from faults.conformance.loader_subject import LoaderTraining
from faults.conformance.subject import arguments, row_ids


def main() -> None:
    given = arguments()
    training = LoaderTraining(given)
    rows = [np.array(row_ids(row)) for row in range(given.rows)]
    dataset = grain.MapDataset.source(rows).seed(0).shuffle().repeat(given.epochs)
    dataset = dataset[given.rank :: given.ranks].batch(given.rank_batch, drop_remainder=True).to_iter_dataset()
    if given.workers:
        dataset = dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=given.workers))
    batches = iter(dataset)
    if training.loader_state is not None:
        batches.set_state(training.loader_state)
    training.train(batches, state_of=batches.get_state)


if __name__ == "__main__":
    main()
