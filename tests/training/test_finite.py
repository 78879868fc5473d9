"""Which tensor holds a number that is not finite."""

import pytest
import torch

from pipeline.model.finite import first_nonfinite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_tensor_with_nan_or_infinity_is_named_in_every_dtype(value, dtype):
    bad = torch.zeros(3, 5, dtype=dtype)
    bad[1, 2] = value
    tensors = {
        "step": torch.tensor(3),
        "none": torch.empty(0),
        "scalar": torch.tensor(1.0),
        "b": bad,
        "a": bad.clone(),
    }
    assert first_nonfinite(tensors) == "b"
    del tensors["b"], tensors["a"]
    assert first_nonfinite(tensors) is None


def test_the_largest_finite_numbers_are_finite():
    most = torch.finfo(torch.float32).max
    assert first_nonfinite({"a": torch.tensor([most, -most]), "b": torch.tensor([1e300], dtype=torch.float64)}) is None
