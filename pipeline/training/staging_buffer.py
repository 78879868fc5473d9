"""A safetensors file in memory: training copies its tensors in and continues, another process writes it to the disk."""

import json
import mmap
import os
import tempfile
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pipeline.hardware.processor import has_memory_files

# https://github.com/huggingface/safetensors#format
NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


class StagingBuffer:
    """Bytes equal to what safetensors would write for tensors of these names, types and shapes.

    The memory is taken once and used for every checkpoint. It has no name, so that it is gone with the last process
    that has it open, and does not count against /dev/shm, which containers often limit to 64 MB.
    """

    def __init__(self, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None):
        # 1. The header: of each tensor its type, shape, and where its bytes are among those of all tensors.
        self.layout = layout_of(tensors)
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        # The wider types first, then by name: then every tensor is aligned.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            size = tensors[name].numel() * tensors[name].element_size()
            dtype, shape = self.layout[name]
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # to a multiple of 8 bytes
        # 2. The file: 8 bytes with the header's length, the header, the tensors.
        self.start = 8 + len(text)
        self.bytes = self.start + offset  # of the whole file
        self.descriptor = unnamed_file()
        if hasattr(os, "posix_fallocate") and not has_memory_files():
            # A full disk is an error here, and a signal that kills in `fill`.
            os.posix_fallocate(self.descriptor, 0, self.bytes)
        os.ftruncate(self.descriptor, self.bytes)
        self.memory = mmap.mmap(self.descriptor, self.bytes)
        self.memory[: self.start] = len(text).to_bytes(8, "little") + text
        # 3. A view of the memory for each tensor, to copy it to; locked, so that CUDA copies at full bandwidth.
        pin = any(tensor.is_cuda for tensor in tensors.values())
        self.pinned = PinnedMemory(self.memory) if pin else None
        self.views = {name: self._view(header[name]["data_offsets"], *self.layout[name]) for name in tensors}

    def _view(self, offsets: list[int], dtype: torch.dtype, shape: torch.Size) -> Tensor:
        if offsets[0] == offsets[1]:
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(
            self.memory, dtype=torch.uint8, offset=self.start + offsets[0], count=offsets[1] - offsets[0]
        )
        return data.view(dtype).view(shape)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors, of the same layout, from wherever they are. From CUDA all at once: the host waits at the
        end."""
        for name, view in self.views.items():
            view.copy_(tensors[name], non_blocking=self.pinned is not None)
        if self.pinned is not None:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back, once nobody reads the views any more."""
        if self.pinned is not None:
            self.pinned.close()
        os.close(self.descriptor)


class PinnedMemory:
    """Memory that CUDA copies to at full bandwidth; where the system refuses to lock it, it stays as it is."""

    def __init__(self, memory: mmap.mmap):
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = whole.data_ptr()
        portable = 1  # cudaHostRegisterPortable, as torch.distributed registers what it shares
        self.registered = int(torch.cuda.cudart().cudaHostRegister(self.address, whole.numel(), portable)) == 0
        if not self.registered:
            with suppress(RuntimeError):  # the refusal is remembered, and raised at the next kernel, whichever that is
                torch.zeros(1, device="cuda").add_(1)

    def close(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.registered = False


def layout_of(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def unnamed_file() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system has that."""
    with suppress(AttributeError, OSError):  # not on macOS; some sandboxes refuse the call
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
