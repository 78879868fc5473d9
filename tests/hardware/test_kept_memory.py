"""What a step frees serves the next one."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

STEPS = """
import resource, sys, torch
from pipeline.hardware.processor import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
torch.set_num_threads(1)
x, weight = torch.ones(512, 64), torch.ones(64, 32768, requires_grad=True)
for step in range(8):
    if step == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (x @ weight).tanh().square().mean().backward()
    weight.grad = None
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str) -> int:
    """Of four steps that follow four others, in a process of their own."""
    command = [sys.executable, "-c", STEPS, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_tensors_reuse_memory_of_the_last_step_without_page_faults():
    assert 2 * page_faults("keep") < page_faults()  # by default one for every 4 KiB
