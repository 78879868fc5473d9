"""accelerate's loop with save_state, load_state and skip_first_batches, as its checkpointing page has it; all defaults.

packages: accelerate==1.15.0 transformers==5.23.0 torch==2.13.0
offers: workers, ranks
docs: https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint
"""

from faults.conformance.accelerate_loop import train


def main() -> None:
    train()


if __name__ == "__main__":
    main()
