"""Verified documents and conversations with their file, row group and row.

`open_sources(settings)` finds and checks every planned file and returns the sources; `OpenSource.read` gives
blocks of consecutive rows from any cursor (file, block), so that whoever reads can go on where they stopped.
"""
