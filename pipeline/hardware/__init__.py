"""What the machine is: devices with their peaks and their sources, cores, memory, and what `auto` means on it."""
