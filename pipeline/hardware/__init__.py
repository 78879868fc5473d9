"""The machine: devices with their peaks and their sources, cores, memory, and what `auto` means on it."""
