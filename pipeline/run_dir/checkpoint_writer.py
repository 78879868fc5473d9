"""The process of `pipeline.run_dir.checkpoints` by the name that it had before 2026-11-27, for trainings that have begun with that; it
goes with the next version."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.run_dir.checkpoints import main

if __name__ == "__main__":
    sys.exit(main())
