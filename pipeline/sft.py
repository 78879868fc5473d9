"""Stage 2: chat SFT. `accelerate launch pipeline/sft.py RECIPE [section.key=value ...]`"""

import sys
from pathlib import Path

if not __package__:  # started as a file: `pipeline/` stands first on the path and would hide libraries
    sys.path[0] = str(Path(__file__).parents[1])

from pipeline.run_dir.failures import exit_with_status
from pipeline.stage import run_stage


def main(argv: list[str]) -> int:
    return run_stage(argv, stage="sft")


if __name__ == "__main__":
    exit_with_status(main)
