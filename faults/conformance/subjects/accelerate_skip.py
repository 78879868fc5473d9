"""accelerate's loop with save_state, load_state and skip_first_batches, as its checkpointing page has it; defaults.

packages: accelerate==1.15.0 transformers==5.23.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
notes: The order of a shuffled loader is drawn from torch's random state when the epoch begins. load_state brings
    back the state of the moment of saving, so with one process the epoch is drawn anew, and skip_first_batches
    skips in another order. With two processes prepare() gives the sampler a generator of its own, seeded by the
    script: the first epoch is exact, a resume in the second one follows the order of the first. A folder that was
    being written is the newest one, and cannot be loaded. The documentation of accelerate's main branch says that
    a later version keeps the permutation (seen 2026-11-28).
"""

from faults.conformance.accelerate_loop import train


def main() -> None:
    train()


if __name__ == "__main__":
    main()
