"""accelerate's loop with use_stateful_dataloader=True, where load_state brings the loader's place back, and set_epoch.

packages: accelerate==1.15.0 torchdata==0.11.0 transformers==5.23.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
    https://huggingface.co/docs/accelerate/v1.15.0/package_reference/utilities#accelerate.utils.DataLoaderConfiguration
notes: With loader workers the first epoch of an uncut training has an order of its own, which a resumed loader
    does not take up again. A state of a loader without workers cannot be loaded by one with workers. Losses differ
    as in accelerate_seedable, here also behind an epoch's end. A folder that was being written is the newest one,
    and cannot be loaded.
"""

from faults.conformance.accelerate_loop import train


def main() -> None:
    train(call_set_epoch=True, use_stateful_dataloader=True, use_seedable_sampler=True)


if __name__ == "__main__":
    main()
