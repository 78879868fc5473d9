"""MosaicML's StreamingDataset and StreamingDataLoader, shuffled, in a plain loop that keeps the loader's state_dict.

packages: mosaicml-streaming==0.13.0 torch==2.14.1
offers: workers, ranks
docs: https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/fast_resumption.html
    https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/elastic_determinism.html
"""

import numpy as np
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from faults.conformance.loader_subject import LoaderTraining, wait_for_all
from faults.conformance.subject import arguments, row_ids


def main() -> None:
    given = arguments()
    training = LoaderTraining(given)
    data = given.folder / "data"
    if given.rank == 0 and not data.exists():
        with MDSWriter(out=str(data), columns={"ids": "ndarray:int64"}, size_limit=2048) as writer:
            for row in range(given.rows):
                writer.write({"ids": np.array(row_ids(row))})
    wait_for_all(given)
    clean_stale_shared_memory()  # a killed training leaves its blocks of shared memory behind
    dataset = StreamingDataset(local=str(data), shuffle=True, batch_size=given.rank_batch)
    loader = StreamingDataLoader(dataset, batch_size=given.rank_batch, num_workers=given.workers)
    if training.loader_state is not None:
        loader.load_state_dict(training.loader_state)
    training.train(loader)


if __name__ == "__main__":
    main()
