"""Deprecated alias of `pipeline.run.Signals`, to be removed in the next version."""

from pipeline.run_dir.failures import Signals

__all__ = ["Signals"]
