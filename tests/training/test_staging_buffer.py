"""A safetensors file in memory holds the bytes that safetensors would write."""

import os

import pytest
import torch
from safetensors.torch import save

from pipeline.training.staging_buffer import StagingBuffer

TENSORS = {
    "h.1.weight": torch.randn(3, 5),
    "h.0.weight": torch.randn(5, 3).t(),  # not contiguous
    "half": torch.randn(7).bfloat16(),
    "bits": torch.tensor([True, False, True]),
    "step": torch.tensor(3.0),
    "count": torch.tensor(3),
    "nothing": torch.empty(0),
    "überschrift/exp_avg": torch.randn(2, 2).double(),
}


def content(image):
    return os.pread(image.descriptor, image.bytes + 1, 0)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_image_has_the_bytes_that_safetensors_writes(metadata):
    image = StagingBuffer(TENSORS, metadata=metadata)
    image.fill(TENSORS)
    assert content(image) == save({name: t.contiguous() for name, t in TENSORS.items()}, metadata=metadata)


def test_a_filled_image_keeps_its_bytes_while_the_tensors_go_on_changing():
    weight = torch.ones(4)
    image = StagingBuffer({"weight": weight})
    image.fill({"weight": weight})
    before = content(image)
    weight.zero_()
    assert content(image) == before
    image.fill({"weight": weight})
    assert content(image) == save({"weight": weight})


def test_memory_is_locked_for_cuda_only():
    assert StagingBuffer(TENSORS).pinned is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_cuda_the_bytes_are_equal_and_memory_is_given_back():
    tensors = {name: tensor.cuda() for name, tensor in TENSORS.items()}
    for _ in range(2):  # registering the same pages again shows that they were given back
        image = StagingBuffer(tensors)
        image.fill(tensors)
        assert content(image) == save({name: t.contiguous() for name, t in TENSORS.items()})
        image.close()
