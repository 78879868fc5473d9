"""accelerate's loop with skip_first_batches, use_seedable_sampler=True and set_epoch: its most careful settings for this way.

packages: accelerate==1.15.0 transformers==5.23.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
    https://huggingface.co/docs/accelerate/v1.15.0/concept_guides/internal_mechanism
    https://huggingface.co/docs/accelerate/v1.15.0/package_reference/utilities#accelerate.utils.DataLoaderConfiguration
"""

from faults.conformance.accelerate_loop import train


def main() -> None:
    train(call_set_epoch=True, use_seedable_sampler=True)


if __name__ == "__main__":
    main()
