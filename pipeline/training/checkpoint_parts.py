"""A checkpoint of a sharded model: each tensor is gathered by all ranks and written whole by one, and all ranks write
about as many bytes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.run_dir import checkpoints
from pipeline.training.checkpoint import CheckpointSaver
from pipeline.training.distributed import from_every_rank, on_every_rank, on_rank_0
from pipeline.training.optimizer_state import Tensors


def own_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the tensors, whole and on the CPU; each tensor is in the part of one rank. Every rank
    calls it with all. On the device there is never more than one whole."""
    own: dict[str, Tensor] = {}
    parts = divided(tensors, dist.get_world_size())
    of_this_rank = set(parts[dist.get_rank()])
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name in of_this_rank:
            own[name] = whole.detach().cpu().contiguous()
    return own


def divided(tensors: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """Return the names in so many lists of about as many bytes, the largest tensors first; the same on every rank."""
    # Each goes to the list that has the fewest bytes so far.
    lists: list[list[str]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = filled.index(min(filled))
        lists[least].append(name)
        filled[least] += tensors[name].nbytes
    return lists


def part_file(name: str, rank: int, ranks: int) -> str:
    """Return the file of a rank's part of model.safetensors or optimizer.safetensors, named as transformers names the
    files of a large model."""
    return name.replace(".", f"-{rank + 1:05}-of-{ranks:05}.")


def write_index(folder: Path, name: str, parts: list[dict[str, int]]) -> None:
    """Write what finds the tensors of model.safetensors or optimizer.safetensors that the ranks write a part each of.
    parts: bytes by name of each rank."""
    files: dict[str, str] = {}
    num_bytes = 0
    for rank, part in enumerate(parts):
        files |= dict.fromkeys(part, part_file(name, rank, len(parts)))
        num_bytes += sum(part.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / f"{name}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class PartSaver(CheckpointSaver):
    """Writes this rank's part of each checkpoint; every rank has one."""

    def save_part(
        self,
        step: int,
        *,
        write_small: Callable[[Path], Any],
        large: dict[str, tuple[Tensors, dict | None]],
        **facts,
    ) -> None:
        """Do as `save` with the parts of all ranks, which all call it. large: this one's part of the tensors."""
        # 1. The checkpoint before this one is written; every rank knows which tensors the others will write.
        on_every_rank(self.wait)
        own = {}
        for file, (tensors, _) in large.items():
            own[file] = {name: tensor.nbytes for name, tensor in tensors.items()}
        sizes, rank = from_every_rank(own), dist.get_rank()

        # 2. The first rank opens the folder, with the small files and the index of the parts.
        def write_all_small(folder: Path) -> None:
            write_small(folder)
            for file in large:
                write_index(folder, file, [of_rank[file] for of_rank in sizes])
            checkpoints.reports(folder).mkdir()

        opened = on_rank_0(lambda: self._open(step, write_all_small))
        if opened is None:
            return

        # 3. Every rank writes its part.
        parts = {part_file(file, rank, len(sizes)): part for file, part in large.items()}
        try:
            on_every_rank(lambda: self._begin(step, opened[0], parts, rank=rank, ranks=len(sizes), **facts))
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """End the writing of a checkpoint that another rank could not begin to write."""
        if self.process is not None and self.job is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
            checkpoints.discard(Path(self.job.temporary))
