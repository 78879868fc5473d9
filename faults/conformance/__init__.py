"""A test of trainers: does one that was killed really go on where it stopped? `python -m faults.conformance --help`."""
