"""A model that all ranks share (FSDP2): each holds a part of every parameter, its gradient and its optimizer state.

transformers shards the model by its own plan (base_model_fsdp_plan) and the Trainer takes it as one that was loaded so; unlike
accelerate's FSDP this runs on gloo too. Parameters stay float32 and autocast computes in half precision, as without
sharding: gradients are reduced in float32 and the loss keeps its digits. accelerate's policy would reduce in bfloat16 and
give the loss in it, and fsdp_mixed_precision of transformers would round num_items_in_batch.

What needs a whole tensor (a checkpoint, model/) gathers it with all ranks, one tensor at a time, for rank 0 alone.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from pipeline.process.errors import RecipeError
from pipeline.training.fp8 import without_fp8


def shard_model(model: PreTrainedModel) -> None:
    """Shard the model among all ranks, in place; every rank calls it with the same weights."""
    kind = type(model)
    if not model.fsdp_plan:
        raise RecipeError(
            f"command line: the launcher asks for FSDP, and {kind.__name__} has no plan for it (base_model_fsdp_plan of its config), so it "
            "cannot be sharded. Launch with accelerate_configs/ddp.yaml, or take model.type: tandem."
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
    config = DistributedConfig(fsdp_size=torch.distributed.get_world_size())
    resolved, _, mesh = kind.prepare_distribute_model(config)
    kind.maybe_distribute_model(model, resolved, mesh)
    if hasattr(model, "per_token_nll"):  # called beside forward, whose hooks gather the weights
        register_fsdp_forward_method(model, "per_token_nll")


@contextmanager
def forward_only(model: torch.nn.Module) -> Iterator[None]:
    """Let evaluations and samples use the model: without float8, and a sharded one as the training left it. After a forward
    some weights, the head's among them, stay gathered until a backward, and are then no parameters of the optimizer."""
    with without_fp8(model):
        try:
            yield
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def whole_on_rank_0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whole, on the CPU of rank 0, and nothing on the others; every rank calls it. Without sharding the same tensors."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return dict(tensors)
    first, whole = torch.distributed.get_rank() == 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = gathered.detach().cpu()
    return whole
