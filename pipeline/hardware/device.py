"""The device of this process, how many processes share the model, and what `auto` means for formats and
compilation."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo, Kind, cpu_was_asked_for, device_of_driver
from pipeline.hardware.processor import cpu_can_compile, cpu_name, memory_bytes
from pipeline.hardware.rates import bfloat16_is_faster


@cache
def device_info() -> DeviceInfo:
    """Return the device of this process: CUDA or ROCm, else Apple's MPS, else the processor."""
    import torch

    kind: Kind = "cpu"
    if not cpu_was_asked_for():
        if torch.cuda.is_available():
            # Not current_device(): until a rank has chosen its device that is 0 for all of them.
            rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            properties = torch.cuda.get_device_properties(rank if rank < count else 0)
            return device_of_driver(properties.name, count, properties.total_memory / 2**30)
        if torch.backends.mps.is_available():
            kind = "mps"
    return DeviceInfo(kind, cpu_name(), 1, memory_bytes() / 2**30)


def shards_model() -> bool:
    """Return whether processes share a model: FSDP2 (accelerate_configs/fsdp2.yaml) or tensor parallelism
    (tp.yaml)."""
    fsdp = os.environ.get("FSDP_VERSION") == "2" and int(os.environ.get("WORLD_SIZE", 1)) > 1
    return fsdp or tensor_parallel_size() > 1


def tensor_parallel_size() -> int:
    """Return how many processes compute each layer together, on the same rows (accelerate_configs/tp.yaml); 1 without
    it."""
    return parallelism_size("tp") if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 1


def batch_ranks(processes: int) -> int:
    """Return among how many ranks the rows of a step are dealt: those that share layers read the same ones."""
    return processes // tensor_parallel_size()


def batch_rank(rank: int) -> int:
    """Return the place of a rank among batch_ranks: those that share layers have the same one."""
    return rank // tensor_parallel_size()


def model_replicas() -> int:
    """Return how often the ranks hold the whole of a sharded model: once under FSDP2, more often under HSDP
    (accelerate_configs/hsdp.yaml)."""
    return parallelism_size("dp_replicate") if shards_model() else 1


def model_shards(processes: int) -> int:
    """Return how many processes share a copy of the model: 1 where it is not sharded."""
    return processes // model_replicas() if shards_model() else 1


def parallelism_size(name: str) -> int:
    """Return a size of accelerate's parallelism_config (dp_replicate, dp_shard, tp, cp, sp); 1 where it is not
    given."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1))


def bf16_is_fast() -> bool:
    """Return whether bf16 is the format to train in here: tensor cores have it, or this CPU multiplies it faster."""
    import torch

    kind = device_info().kind
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and bfloat16_is_faster()


def can_compile() -> bool:
    """Return whether torch.compile works here: Triton on CUDA and ROCm, a C++ compiler on the CPU; not on MPS.

    torch's own switches turn it into nothing, and a run would be recorded as compiled.
    """
    if "1" in (os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE")):
        return False
    kind = device_info().kind
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    return kind == "cpu" and cpu_can_compile()


def decide_bf16(value: bool | str | None, *, fp16: bool = False) -> bool:
    """Return train.bf16 resolved: `auto` is True where bf16 is fast and fp16 is not set."""
    if value == "auto":
        return not fp16 and bf16_is_fast()
    return bool(value)


def autocast_dtype(train: Mapping[str, Any]) -> str:
    """Return the type that a recipe's `train:` computes in, by its name in torch."""
    fp16 = bool(train.get("fp16"))
    if decide_bf16(train.get("bf16"), fp16=fp16):
        return "bfloat16"
    return "float16" if fp16 else "float32"


def decide_compile(value: bool | str | None) -> bool:
    """Return train.torch_compile resolved: `auto` is True where a compiler is at hand and the model is not sharded."""
    if value == "auto":
        return can_compile() and not shards_model()
    return bool(value)


def compute_format(*, bf16: bool, fp16: bool, tf32: bool, fp8: bool = False) -> str:
    """Return the format the matrices are multiplied in, as `peak_flops` names it; of the blocks' under train.fp8."""
    if fp8:
        return "float8"
    if bf16:
        return "bfloat16"
    if fp16:
        return "float16"
    return "tf32" if tf32 and device_info().kind == "cuda" else "float32"
