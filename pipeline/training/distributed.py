"""Distributed training: collectives over ranks, errors that all of them raise, random states, and sharding of the model
(FSDP2, HSDP, tensor parallelism), in float8 where the recipe asks for it.
"""

import os
import random
import re
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.distributed import DistributedConfig

from pipeline.hardware import model_replicas, tensor_parallel_size
from pipeline.process.errors import CannotWriteError, HangError, RecipeError, TandemError
from pipeline.process.storage import remove_file
from pipeline.run_dir.failures import has_reported_error
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.muon import local

# Ranks that agree: values shared, votes, and failures of one rank that all must know.

# What one rank decides, all ranks know: also when the decision is that the run cannot start.

Decision = TypeVar("Decision")


def on_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Call `decide` on rank 0 only and give every rank its result; its TandemError or OSError is raised on every rank.

    Without it the other ranks would wait in their next collective for a rank that has left.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return decide()
    outcome: list = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except (TandemError, OSError) as error:
            outcome = [None, error]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].of_all_ranks = True
        raise outcome[1]
    return outcome[0]


def on_every_rank(act: Callable[[], Decision]) -> list[Decision]:
    """Call `act` on every rank and give every rank all results, in rank order; a TandemError or OSError of one is raised on all."""
    result, error = None, None
    try:
        result = act()
    except (TandemError, OSError) as raised:
        error = raised
    outcomes = from_every_rank((result, error))
    if (found := next((e for _, e in outcomes if e is not None), None)) is not None:
        found.of_all_ranks = True
        raise found
    return [value for value, _ in outcomes]


def from_every_rank(value: Any) -> list:
    """Return what every rank has to say, in rank order; every rank must call this."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [value]
    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def numbers_of_every_rank(numbers: dict[str, float], device: torch.device) -> list[dict[str, float]]:
    """Return the numbers of every rank, which all have the same names, by one gather on the device."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [numbers]
    own_1N = torch.tensor([list(numbers.values())], dtype=torch.float64, device=device)
    every_RN = own_1N.new_empty(torch.distributed.get_world_size(), len(numbers))
    torch.distributed.all_gather_into_tensor(every_RN, own_1N)
    return [dict(zip(numbers, rank, strict=True)) for rank in every_RN.tolist()]


def store_of_ranks() -> Any:
    """Return where a rank leaves word for the others without waiting for them; None for one rank alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    store: Any = torch.distributed.PrefixStore("tandem", torch.distributed.distributed_c10d._get_default_store())
    # A connection of its own: the other one is held for as long as somebody waits for a key on it.
    return store.clone()


# Several machines of one run share its directory and its prepared data: proven before anything is written there.


def refuse_unshared(folder: Path, *, key: str = "run.directory") -> None:
    """Raise CannotWriteError on every rank when a machine of this run sees another folder under that path, or cannot write there.

    key: what sets the folder. A file that rank 0 makes must be there for all, and each must be able to make one beside it.
    On a single machine there is nothing to prove.
    """
    if (
        not torch.distributed.is_initialized()
        or int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == torch.distributed.get_world_size()
    ):
        return
    name = [f".shared-{secrets.token_hex(8)}"]
    torch.distributed.broadcast_object_list(name, src=0)
    mark = folder / name[0]
    first = torch.distributed.get_rank() == 0
    refusal = _refusal(mark, keep=True) if first else ""
    torch.distributed.barrier()
    there = not first and _is_there(mark)
    refusal = refusal or (_refusal(mark.with_name(f"{mark.name}-{torch.distributed.get_rank()}")) if there else "")
    seen: list[tuple[str, bool, str]] = [("", False, "")] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, (socket.gethostname(), first or there, refusal))
    if first and not refusal:
        remove_file(mark)
    hosts = {host: reason for host, _, reason in seen if reason}
    blind = sorted({host for host, sees, _ in seen if not sees})
    if hosts:
        listed = "; ".join(f"{host} ({reason})" for host, reason in sorted(hosts.items()))
        raise CannotWriteError(
            f"{folder}: cannot be written by {listed}, and every machine of a run writes there. Set {key} to a folder that all of them can write."
        )
    if blind:
        raise CannotWriteError(
            f"{folder}: {', '.join(blind)} cannot see what {seen[0][0]} writes there, and all machines of a run share it. "
            f"Set {key} to a folder that all of them share."
        )


def _refusal(file: Path, *, keep: bool = False) -> str:
    """Return why the file cannot be made here; empty when it can. Raises nothing: the other ranks wait for this one's word."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if not keep:
            remove_file(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_there(mark: Path) -> bool:
    """Return whether the file exists now: network file systems remember for a while that it did not, until its folder is listed."""
    try:
        return mark.name in os.listdir(mark.parent)
    except OSError:  # absent, or not for this user: the other ranks wait for this one's word
        return False


# The processes of this run: who they are, which are gone, and what it means when one is.

SETTLE_S = 3.0  # a connection breaks a moment before its process is seen to be gone


@dataclass(frozen=True)
class Process:
    machine: tuple[str, str]
    host: str
    pid: int
    began: str

    @classmethod
    def this(cls) -> "Process":
        # Containers may share a host name and not their process numbers.
        namespace = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
        host, pid = socket.gethostname(), os.getpid()
        return cls((host, namespace), host, pid, _state_and_beginning(pid)[1])

    def is_gone(self) -> bool:
        try:
            state, began = _state_and_beginning(self.pid)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True
        return began != self.began or state in ("Z", psutil.STATUS_ZOMBIE)


def _state_and_beginning(pid: int) -> tuple[str, str]:
    """Return a process's state and start time, which tells it from a later one of the same number. Not psutil's create_time on Linux: that moves when the
    system's clock is set, and a rank would look lost."""
    if sys.platform == "linux":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may hold spaces
        return fields[0], fields[19]
    process = psutil.Process(pid)
    return process.status(), str(process.create_time())


class Ranks:
    """All ranks of this start; every rank must make one."""

    def __init__(self) -> None:
        self.processes: list[Process] = from_every_rank(Process.this())
        self.own = next(n for n, process in enumerate(self.processes) if process == Process.this())

    def gone(self) -> list[int]:
        """Return the ranks whose process is gone, as far as this machine can see."""
        own = self.processes[self.own]
        return [
            n
            for n, process in enumerate(self.processes)
            if n != self.own and process.machine == own.machine and process.is_gone()
        ]

    def on_other_hosts(self) -> bool:
        return any(process.machine != self.processes[self.own].machine for process in self.processes)

    def found_gone(self) -> list[int]:
        """Return the same after an error in a collective, which comes a moment before."""
        ends = time.monotonic() + (SETTLE_S if len(self.processes) > 1 else 0)
        while not (gone := self.gone()) and time.monotonic() < ends:
            time.sleep(0.05)
        return gone

    def lost(self, gone: list[int], run: RunDirectory, *, step: int) -> HangError:
        """Return what the ranks that are left say. A rank that could tell its own error has written it by now."""
        names = " and ".join(f"rank {n} (process {self.processes[n].pid} on {self.processes[n].host})" for n in gone)
        if has_reported_error(run):
            return HangError(f"ended with {names}, whose error is reported above.")
        return HangError(
            f"{run.path}: {names} was lost at step {step}: it ended without a word, killed from outside or for lack of memory. "
            "The last checkpoint is whole. Run the same command again to go on from it."
        )


# The random state of a process, as tensors: python, numpy, torch and the accelerator.


def get_rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that training may draw from; safetensors holds all of it."""
    version, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator_module().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what get_rng_state gave."""
    version, *python = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(python), None if np.isnan(gauss) else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator_module().set_rng_state(state["accelerator"])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Preserve the random state around evaluations and samples: training draws the same numbers as if they had not happened."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _accelerator_module():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return getattr(torch, accelerator.type)


# A model that all ranks share (FSDP2): each holds a part of every parameter, its gradient and its optimizer state. Under HSDP several
# groups of ranks share a copy each, and sum their gradients.
#
# transformers shards the model by its own plan (base_model_fsdp_plan) and the Trainer takes it as one that was loaded so; unlike
# accelerate's FSDP this runs on gloo too. Parameters stay float32 and autocast computes in half precision, as without
# sharding: gradients are reduced in float32 and the loss keeps its digits. accelerate's policy would reduce in bfloat16 and
# give the loss in it, and fsdp_mixed_precision of transformers would round num_items_in_batch.
#
# A checkpoint needs whole tensors: each is made whole by one rank, which writes it, and all ranks write about as many bytes.
# model/ is gathered with all ranks, one tensor at a time, for rank 0 alone.


def shard_model(model: PreTrainedModel, *, compile_options: dict[str, Any] | None = None) -> None:
    """Shard the model among all ranks, in place; every rank calls it with the same weights.

    compile_options: of torch.compile, which then compiles each block by itself: the weights are gathered between them, by hooks
    that no graph holds. None: nothing is compiled.
    """
    kind = type(model)
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in conversions):
        raise RecipeError(
            f"command line: the launcher asks for a sharded model, and transformers saves a {kind.__name__} with several parameters merged into one, "
            "which ranks that write a part each cannot do. Launch with accelerate_configs/ddp.yaml."
        )
    if (ranks := tensor_parallel_size()) > 1:
        _split_layers(model, ranks)
        return
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
    """Have all ranks compute each layer together, each some heads and some of the MLP's neurons (tensor parallelism), by the model's plan."""
    kind = type(model)
    if not model.tp_plan:
        raise RecipeError(
            f"command line: the launcher asks for tensor parallelism, and {kind.__name__} has no plan for it (base_model_tp_plan of its "
            "config; a model with value embeddings or biases has none). Launch with accelerate_configs/fsdp2.yaml, or take "
            "model.preset: portable."
        )
    # The chunked loss takes the head's weight alone, so that each rank keeps it whole, and the table where it is tied to it.
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
                f"command line: the launcher asks for tensor parallelism, and the plan of {kind.__name__} has {name} as {parameter.placements[0]}, not "
                "in whole rows or columns, which cannot be trained here. Launch with accelerate_configs/fsdp2.yaml."
            )
        # The gradient of a table of tokens comes whole.
        parameter.register_hook(partial(DTensor.redistribute, placements=parameter.placements))
    for name, module in model.named_modules():
        if re.sub(r"\.\d+\.", ".*.", name) in own_heads:
            for parameter in module.parameters(recurse=False):
                parameter.register_hook(_summed_over_ranks)


# transformers' name for a weight that every rank has whole and uses for its own heads, as Qwen3's norms of queries and keys. It sums the
# gradient that has accumulated, of earlier micro-steps again: a hook on the gradient of one backward pass sums each once.
GRADIENT_OF_OWN_HEADS = "replicated_with_grad_allreduce"


def _summed_over_ranks(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


@contextmanager
def forward_only(model: torch.nn.Module) -> Iterator[None]:
    """Let evaluations and samples use the model: without float8, and a sharded one as the training left it. After a forward
    some weights, the head's among them, stay gathered until a backward, and are then no parameters of the optimizer. Its
    blocks run uncompiled here: each shape and cache of a sample would be compiled anew, until the compiler gives up."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    compiled = [(module, module._compiled_call_impl) for module in sharded]  # type: ignore[attr-defined]  # set by Module.compile
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
    """Return the tensors whole, on the CPU of rank 0, and nothing on the others; every rank calls it. Without sharding the same tensors."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return dict(tensors)
    first, whole = dist.get_rank() == 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = gathered.detach().cpu()
    return whole


def own_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the tensors, whole and on the CPU; each tensor is in the part of one rank. Every rank calls it with all.

    In a round each rank is sent the rows of one tensor by those that hold them: on the device there are never more than two whole.
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
    cut = {name: tensor.placements[-1].dim for name, tensor in sharded.items()}  # type: ignore[attr-defined]  # Shard's
    for names in zip_longest(*(parts[rank] for rank in ranks)):
        sent = [
            local(sharded[n]).detach().movedim(cut[n], 0).reshape(-1).view(torch.uint8) if n else nothing for n in names
        ]
        sizes = [0] * len(ranks)
        if name := names[place]:
            shape = list(sharded[name].shape)
            shape.insert(0, shape.pop(cut[name]))
            rows, row_bytes = shape[0], sharded[name].nbytes // shape[0]
            most = -(-rows // len(ranks))
            sizes = [min(max(rows - r * most, 0), most) * row_bytes for r in range(len(ranks))]  # as torch.chunk cuts
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


# train.fp8: matrices of the blocks multiplied in float8 by torchao; everything else stays in bfloat16.
#
# The converted modules are nn.Linear with another product: their weights keep names, float32 and identity, so that optimizer,
# checkpoints and export see no difference.

ROLES = ("input", "hidden", "output")  # of the blocks' matrices; gates and the head are others
MULTIPLE = 16  # of both widths, as the float8 kernels ask for


def is_converted(module: nn.Module, name: str = "") -> bool:
    """Return whether train.fp8 converts the module; name: its place in the model, which torchao hands to its filters too."""
    return (
        isinstance(module, nn.Linear)
        and getattr(module, "init_role", None) in ROLES
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def convert_to_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the model's matrices multiply in float8; the rest of the step is bfloat16 autocast's.

    Scales are made anew for each tensor, from its largest value. Not on CUDA float8 is imitated: right, slow, and refused
    by preflight.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padding is for micro-batches whose positions are no multiple of 16, and costs nothing otherwise.
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had never been converted: scores and samples are those of the model that is saved.

    The class is swapped, not the modules or an attribute: compiled graphs of steps find all as it was when they come again.
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
