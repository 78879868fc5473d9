"""A model that all ranks share: FSDP2, HSDP and tensor parallelism.

Each rank holds a part of every parameter, its gradient and its optimizer state. Under HSDP several groups of ranks
share a copy each, and sum their gradients. transformers shards the model by its own plan (base_model_fsdp_plan) and the
Trainer takes it as one that was loaded so; unlike accelerate's FSDP this runs on gloo too. Parameters stay float32 and
autocast computes in half precision, as without sharding: gradients are reduced in float32 and the loss keeps its
digits. accelerate's policy would reduce in bfloat16 and give the loss in it, and fsdp_mixed_precision of transformers
would round num_items_in_batch. model/ is gathered with all ranks, one tensor at a time, for rank 0 alone.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

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
from pipeline.training.fp8 import without_fp8


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
    ends: tuple[nn.Module, ...] = ()
    if model.config.tie_word_embeddings:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = {name for name, module in model.named_modules() if module in ends}
    plan = {name: how for name, how in model.fsdp_plan.items() if name not in tied and how != "keep_full_weight"}
    model.fsdp_plan = plan  # type: ignore[misc]  # mypy does not see its setter
    # torch's own FSDP2 calls what torch calls deprecated.
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning
    )
    replicas = model_replicas()
    config = DistributedConfig(fsdp_size=dist.get_world_size() // replicas, dp_replicate_size=replicas)
    resolved, _, mesh = kind.prepare_distribute_model(config)
    kind.maybe_distribute_model(model, resolved, mesh)
    if compile_options is not None:
        for blocks in model.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    if isinstance(block, FSDPModule):  # gathered by itself
                        block.compile(**compile_options)
    if hasattr(model, "per_token_nll"):  # called instead of forward, whose hooks gather the weights
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
