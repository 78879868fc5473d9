"""The four levels of device memory, from a stand-in for torch.cuda that keeps the documented counters."""

import inspect

import torch

from pipeline.training.meters import GIB, DeviceMemory


class Allocator:
    """torch.cuda's memory functions as its documentation describes them, over one device of 80 GiB."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = self.retries = self.ooms = 0

    def hold(self, gib):
        self.allocated = gib * GIB
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }

    def mem_get_info(self, device):
        return 80 * GIB - self.reserved - GIB, 80 * GIB  # the driver also sees the context

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated


def test_the_peak_of_an_interval_begins_again_and_that_of_the_run_does_not():
    cuda = Allocator()
    memory = DeviceMemory(torch.device("cuda"), cuda=cuda)
    for gib in (40, 64, 43):
        cuda.hold(gib)
    first = memory.read()
    cuda.hold(50)
    cuda.hold(43)
    cuda.retries = 2
    second = memory.read()
    assert (first["mem/allocated_gib"], first["mem/reserved_gib"], first["mem/device_used_gib"]) == (43, 64, 65)
    assert (first["mem/peak_allocated_gib"], first["mem/run_peak_allocated_gib"]) == (64, 64)
    assert (second["mem/peak_allocated_gib"], second["mem/run_peak_allocated_gib"]) == (50, 64)
    assert (second["mem/alloc_retries"], second["mem/ooms"]) == (2, 0)
    assert memory.peak() == 64 * GIB


def test_the_peak_of_an_earlier_attempt_counts_in_the_run_and_not_in_this_process():
    cuda = Allocator()
    memory = DeviceMemory(torch.device("cuda"), cuda=cuda)
    memory.run_peak = 70 * GIB
    cuda.hold(64)
    assert memory.read()["mem/run_peak_allocated_gib"] == 70
    assert memory.peak() == 64 * GIB


def test_the_stand_in_has_the_keys_of_this_version_of_torch():
    # Without a GPU torch gives an empty dict; the names are in its own summary, which reads the same one.
    summary = inspect.getsource(torch.cuda.memory_summary)
    for name in ("allocated_bytes", "reserved_bytes", "num_alloc_retries", "num_ooms"):
        assert name in summary


def test_without_cuda_there_is_nothing():
    assert DeviceMemory(torch.device("cpu")).read() == {}
