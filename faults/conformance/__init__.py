"""A test of trainers: does a killed one really continue where it stopped? `python -m faults.conformance --help`."""
