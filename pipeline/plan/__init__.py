"""The plan of a run: steps, tokens, FLOPs, memory, disk, hours and cost, before anything is trained."""
