"""What a run was and became, told from its directory alone: also after a crash, for old runs, on another machine."""
