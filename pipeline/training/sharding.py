"""A model that ranks share (FSDP2, HSDP, tensor parallelism), and one that multiplies in float8: for runs that ask for
it."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.distributed import DistributedConfig

from pipeline.hardware.device import model_replicas, tensor_parallel_size
from pipeline.process.errors import RecipeError
from pipeline.run_dir import checkpoints
from pipeline.training.checkpoint import CheckpointSaver, Tensors
from pipeline.training.distributed import from_every_rank, on_every_rank, on_rank_0
from pipeline.training.muon import chunk_sizes, local

# A model that all ranks share (FSDP2): each holds a part of every parameter, its gradient and its optimizer state.
# Under HSDP several groups of ranks share a copy each, and sum their gradients.
#
# transformers shards the model by its own plan (base_model_fsdp_plan) and the Trainer takes it as one that was loaded
# so; unlike accelerate's FSDP this runs on gloo too. Parameters stay float32 and autocast computes in half precision,
# as without sharding: gradients are reduced in float32 and the loss keeps its digits. accelerate's policy would reduce
# in bfloat16 and give the loss in it, and fsdp_mixed_precision of transformers would round num_items_in_batch.
#
# A checkpoint needs whole tensors: each is made whole by one rank, which writes it, and all ranks write about as many
# bytes. model/ is gathered with all ranks, one tensor at a time, for rank 0 alone.


def shard_model(model: PreTrainedModel, *, compile_options: dict[str, Any] | None = None) -> None:
    """Shard the model among all ranks, in place; every rank calls it with the same weights.

    compile_options: of torch.compile, which then compiles each block by itself: the weights are gathered between them,
    by hooks that no graph holds. None: nothing is compiled.
    """
    kind = type(model)
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in conversions):
        raise RecipeError(
            f"command line: the launcher asks for a sharded model, and transformers saves a {kind.__name__} with "
            "several parameters merged into one, which ranks that write a part each cannot do. Launch with "
            "accelerate_configs/ddp.yaml."
        )
    if (ranks := tensor_parallel_size()) > 1:
        _split_layers(model, ranks)
        return
    if not model.fsdp_plan:
        raise RecipeError(
            f"command line: the launcher asks for FSDP, and {kind.__name__} has no plan for it (base_model_fsdp_plan "
            "of its config), so it cannot be sharded. Launch with accelerate_configs/ddp.yaml, or take model.type: "
            "tandem."
        )
    # What stays with the outermost weights: one parameter of two modules, and the last norm with the head, for which
    # transformers waits until both were called; the chunked loss takes the head's weight alone.
    ends = (model.get_input_embeddings(), model.get_output_embeddings()) if model.config.tie_word_embeddings else ()
    tied = {name for name, module in model.named_modules() if module in ends}
    plan = {name: how for name, how in model.fsdp_plan.items() if name not in tied and how != "keep_full_weight"}
    model.fsdp_plan = plan  # type: ignore[misc]  # its setter stands apart, where mypy does not look
    # torch's own FSDP2 calls what torch calls deprecated.
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning
    )
    replicas = model_replicas()
    config = DistributedConfig(fsdp_size=dist.get_world_size() // replicas, dp_replicate_size=replicas)
    resolved, _, mesh = kind.prepare_distribute_model(config)
    kind.maybe_distribute_model(model, resolved, mesh)
    if compile_options is not None:
        for blocks in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
            for block in blocks:
                if isinstance(block, FSDPModule):  # gathered by itself
                    block.compile(**compile_options)
    if hasattr(model, "per_token_nll"):  # called beside forward, whose hooks gather the weights
        register_fsdp_forward_method(model, "per_token_nll")


def _split_layers(model: PreTrainedModel, ranks: int) -> None:
    """Have all ranks compute each layer together, each some heads and some of the MLP's neurons (tensor parallelism),
    by the model's plan."""
    kind = type(model)
    if not model.tp_plan:
        raise RecipeError(
            f"command line: the launcher asks for tensor parallelism, and {kind.__name__} has no plan for it "
            "(base_model_tp_plan of its config; a model with value embeddings or biases has none). Launch with "
            "accelerate_configs/fsdp2.yaml, or take model.preset: portable."
        )
    # The chunked loss takes the head's weight alone, so that each rank keeps it whole, and the table where it is tied
    # to it.
    ends = (model.get_output_embeddings(), model.get_input_embeddings())[: 1 + model.config.tie_word_embeddings]
    whole = {name for name, module in model.named_modules() if module in ends}
    own_heads = [name for name, how in model.tp_plan.items() if how == GRADIENT_OF_OWN_HEADS]
    model.tp_plan = {  # type: ignore[misc]  # as fsdp_plan's
        name: how for name, how in model.tp_plan.items() if name not in whole and name not in own_heads
    }
    resolved, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_size=ranks))
    kind.maybe_distribute_model(model, resolved, mesh)
    model._tp_size = None  # or the Trainer would have accelerate prepare it, which refuses to on gloo
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        if parameter.placements not in ((Shard(0),), (Shard(1),)):  # Muon and the parts of a checkpoint know these
            raise RecipeError(
                f"command line: the launcher asks for tensor parallelism, and the plan of {kind.__name__} has {name} "
                f"as {parameter.placements[0]}, not in whole rows or columns, which cannot be trained here. Launch "
                "with accelerate_configs/fsdp2.yaml."
            )
        # The gradient of a table of tokens comes whole.
        parameter.register_hook(partial(DTensor.redistribute, placements=parameter.placements))
    for name, module in model.named_modules():
        if re.sub(r"\.\d+\.", ".*.", name) in own_heads:
            for parameter in module.parameters(recurse=False):
                parameter.register_hook(_summed_over_ranks)


# transformers' name for a weight that every rank has whole and uses for its own heads, as Qwen3's norms of queries and
# keys. It sums the gradient that has accumulated, of earlier micro-steps again: a hook on the gradient of one backward
# pass sums each once.
GRADIENT_OF_OWN_HEADS = "replicated_with_grad_allreduce"


def _summed_over_ranks(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def own_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the tensors, whole and on the CPU; each tensor is in the part of one rank. Every rank
    calls it with all.

    In a round each rank is sent the rows of one tensor by those that hold them: on the device there are never more
    than two whole.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    plain = {name: tensor.detach().cpu() for name, tensor in tensors.items() if name not in sharded}
    own = {name: plain[name] for name in divided(plain, dist.get_world_size())[dist.get_rank()]}
    if not sharded:  # an optimizer before its first update
        return own
    first = next(iter(sharded.values()))
    group = first.device_mesh.get_group(len(first.placements) - 1)
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    parts = divided(sharded, dist.get_world_size())
    nothing = torch.empty(0, dtype=torch.uint8, device=local(first).device)
    # Shard's
    cut = {name: tensor.placements[-1].dim for name, tensor in sharded.items()}  # type: ignore[attr-defined]
    for names in zip_longest(*(parts[rank] for rank in ranks)):
        sent = [
            local(sharded[n]).detach().movedim(cut[n], 0).reshape(-1).view(torch.uint8) if n else nothing
            for n in names
        ]
        sizes = [0] * len(ranks)
        if name := names[place]:
            shape = list(sharded[name].shape)
            shape.insert(0, shape.pop(cut[name]))
            row_bytes = sharded[name].nbytes // shape[0]
            sizes = [rows * row_bytes for rows in chunk_sizes(shape[0], len(ranks))]
        received = nothing.new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(sent), sizes, [len(part) for part in sent], group=group)
        if name:
            own[name] = received.view(sharded[name].dtype).view(shape).movedim(0, cut[name]).cpu().contiguous()
    return own


def divided(tensors: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """Return the names in so many lists of about as many bytes, the largest tensors first; the same on every rank."""
    lists: list[list[str]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = filled.index(min(filled))
        lists[least].append(name)
        filled[least] += tensors[name].nbytes
    return lists


# A checkpoint that all ranks write together: each writes a part of its tensors.


def part_file(name: str, rank: int, ranks: int) -> str:
    """Return the file of a rank's part of model.safetensors or optimizer.safetensors, named as transformers names the
    files of a large model."""
    return name.replace(".", f"-{rank + 1:05}-of-{ranks:05}.")


def write_index(folder: Path, name: str, parts: list[dict[str, int]]) -> None:
    """Write what finds the tensors of model.safetensors or optimizer.safetensors that the ranks write a part each of.
    parts: bytes by name of each rank."""
    files = {tensor: part_file(name, rank, len(parts)) for rank, part in enumerate(parts) for tensor in part}
    index = {"metadata": {"total_size": sum(sum(part.values()) for part in parts)}, "weight_map": files}
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
        on_every_rank(self.wait)
        own = {file: {name: tensor.nbytes for name, tensor in tensors.items()} for file, (tensors, _) in large.items()}
        sizes, rank = from_every_rank(own), dist.get_rank()

        def write_all_small(folder: Path) -> None:
            write_small(folder)
            for file in large:
                write_index(folder, file, [of_rank[file] for of_rank in sizes])
            checkpoints.reports(folder).mkdir()

        opened = on_rank_0(lambda: self._open(step, write_all_small))
        if opened is None:
            return
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


# train.fp8: matrices of the blocks multiplied in float8 by torchao; everything else stays in bfloat16.
#
# The converted modules are nn.Linear with another product: their weights keep names, float32 and identity, so that
# optimizer, checkpoints and export see no difference.

ROLES = ("input", "hidden", "output")  # of the blocks' matrices; gates and the head are others
MULTIPLE = 16  # of both widths, as the float8 kernels ask for


def is_converted(module: nn.Module, name: str = "") -> bool:
    """Return whether train.fp8 converts the module; name: its place in the model, which torchao hands to its filters
    too."""
    return (
        isinstance(module, nn.Linear)
        and getattr(module, "init_role", None) in ROLES
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def convert_to_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the model's matrices multiply in float8; the rest of the step is bfloat16 autocast's.

    Scales are made anew for each tensor, from its largest value. Not on CUDA float8 is imitated: right, slow, and
    refused by preflight.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padding is for micro-batches whose positions are no multiple of 16, and costs nothing otherwise.
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


def refuse_without_fp8(model: nn.Module, where: str) -> None:
    """Raise RecipeError for a model none of whose matrices train.fp8 would convert."""
    if not any(is_converted(module) for module in model.modules()):
        raise RecipeError(
            f"{where}: a {type(model).__name__} of these sizes has no matrix for it: only those of a Tandem's blocks "
            f"without bias count, with widths that {MULTIPLE} divides. Remove the key, or change the model."
        )


# Such a model used without training, and whole.


@contextmanager
def between_steps(model: nn.Module) -> Iterator[None]:
    """Let evaluations and samples use the model: without float8, and a sharded one as the training left it. After a
    forward some weights, the head's among them, stay gathered until a backward, and are then no parameters of the
    optimizer. Its blocks run uncompiled here: each shape and cache of a sample would be compiled anew, until the
    compiler gives up."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Set by Module.compile
    compiled = [(module, module._compiled_call_impl) for module in sharded]  # type: ignore[attr-defined]
    with without_fp8(model):
        try:
            for module in sharded:
                module._compiled_call_impl = None  # type: ignore[attr-defined]
            yield
        finally:
            for module, call in compiled:
                module._compiled_call_impl = call  # type: ignore[attr-defined]
                module.reshard()


def whole_on_rank_0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whole, on the CPU of rank 0, and nothing on the others; every rank calls it. Without sharding
    the same tensors."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return dict(tensors)
    first, whole = dist.get_rank() == 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = gathered.detach().cpu()
    return whole


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had never been converted: scores and samples are those of the model that is
    saved.

    The class is swapped, not the modules or an attribute: compiled graphs of steps find all as it was when they come
    again.
    """
    converted = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m).__module__.startswith("torchao.")]
    classes: list[Any] = [type(module) for module in converted]
    try:
        for module in converted:
            module.__class__ = nn.Linear
        yield
    finally:
        for module, kind in zip(converted, classes, strict=True):
            module.__class__ = kind
