"""Grain's DataLoader with an IndexSampler, shuffled, in a plain loop that keeps the iterator's get_state.

packages: grain==0.2.18 torch==2.13.0
offers: workers
docs: https://google-grain.readthedocs.io/en/latest/tutorials/data_loader_tutorial.html
notes: Continued on another number of workers it is refused. Its state belongs to one process, and this adapter keeps one
    state for all, so several processes are not offered.
"""

import grain
import numpy as np

from faults.conformance.loader_subject import LoaderTraining
from faults.conformance.subject import arguments, row_ids


def main() -> None:
    given = arguments()
    training = LoaderTraining(given)
    rows = [np.array(row_ids(row)) for row in range(given.rows)]
    shard = grain.sharding.ShardOptions(shard_index=given.rank, shard_count=given.ranks, drop_remainder=True)
    sampler = grain.samplers.IndexSampler(
        num_records=given.rows, num_epochs=given.epochs, shard_options=shard, shuffle=True, seed=0
    )
    loader = grain.DataLoader(
        data_source=rows,
        sampler=sampler,
        operations=[grain.transforms.Batch(given.rank_batch, drop_remainder=True)],
        worker_count=given.workers,
    )
    batches = iter(loader)
    if training.loader_state is not None:
        try:
            batches.set_state(training.loader_state)
        except ValueError as error:  # "Worker count in checkpoint does not match ..."
            raise SystemExit(str(error)) from error
    training.train(batches, state_of=batches.get_state)


if __name__ == "__main__":
    main()
