"""The fault laboratory: breaks runs, files, services and the code on purpose, and counts what holds: `python -m faults NAME`."""
