"""Report of a run from its directory alone: also after a crash, for old runs, on another machine."""
