"""Samples of the GPUs and of the host, thin over the driver and the system."""
