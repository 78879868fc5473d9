"""litdata's StreamingDataset and StreamingDataLoader, shuffled, in a plain loop that keeps the loader's state_dict.

packages: litdata==0.2.76 torch==2.13.0
offers: workers, ranks
docs: https://github.com/Lightning-AI/litData#pause-resume
    https://github.com/Lightning-AI/litData#shuffle
notes: On another number of workers litdata 0.2.76 deals the rest of the epoch anew and, with the drop_last that its
    page asks for, cuts it to a multiple of workers x batch: 4 rows of the epoch are left out, and what follows
    comes a step early.
    Continued by two processes the next epoch is in the order of two.
"""

from litdata import StreamingDataLoader, StreamingDataset, optimize

from faults.conformance.loader_subject import LoaderTraining, row_tensor, wait_for_all
from faults.conformance.subject import arguments


def main() -> None:
    given = arguments()
    training = LoaderTraining(given)
    data = given.folder / "data"
    if given.rank == 0 and not data.exists():
        optimize(
            fn=row_tensor,
            inputs=list(range(given.rows)),
            output_dir=str(data),
            chunk_size=8,
            num_workers=1,
            start_method="fork",
            verbose=False,
        )
    wait_for_all(given)
    dataset = StreamingDataset(str(data), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=given.rank_batch, num_workers=given.workers)
    if training.loader_state is not None:
        loader.load_state_dict(training.loader_state)
    training.train(loader)


if __name__ == "__main__":
    main()
