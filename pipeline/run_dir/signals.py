"""The name that `pipeline.run.Signals` lay under before 2026-11-26; it goes with the next version."""

from pipeline.run_dir.failures import Signals

__all__ = ["Signals"]
