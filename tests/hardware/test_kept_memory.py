"""What a step frees serves the next one."""

import subprocess
import sys

import pytest

SECOND_USE = """
import resource, sys, torch
from pipeline.hardware.cpu import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
torch.set_num_threads(1)
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str) -> int:
    """Of the second of two tensors of 64 MiB that live one after the other, in a process of their own."""
    command = [sys.executable, "-c", SECOND_USE, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_tensor_is_made_in_memory_that_was_freed_before_without_page_faults():
    assert 4 * page_faults("keep") < page_faults()  # by default one for every 4 KiB
