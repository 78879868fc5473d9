"""The name that `pipeline.run_dir.rows` had before 2026-11-23; it goes with the next version."""

from pipeline.run_dir.rows import last_attempts, read_rows

__all__ = ["last_attempts", "read_rows"]
