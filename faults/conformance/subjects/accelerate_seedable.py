"""accelerate's loop with skip_first_batches, use_seedable_sampler=True and set_epoch: the most careful settings of it.

packages: accelerate==1.15.0 transformers==5.23.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
    https://huggingface.co/docs/accelerate/v1.15.0/concept_guides/internal_mechanism
    https://huggingface.co/docs/accelerate/v1.15.0/package_reference/utilities#accelerate.utils.DataLoaderConfiguration
notes: The rows are right. The losses are not, inside an epoch, because making the loader's iterator draws a seed
    from the generator that load_state has just brought back: dropout differs from there on. A folder that was
    being written is the newest one, and cannot be loaded.
"""

from faults.conformance.accelerate_loop import train


def main() -> None:
    train(call_set_epoch=True, use_seedable_sampler=True)


if __name__ == "__main__":
    main()
