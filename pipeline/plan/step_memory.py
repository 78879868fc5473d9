"""Memory of a training step of any causal LM of transformers, by a trial on tensors without data.

The model of two depths makes forward and backward with one row and with two: torch runs every operation on shapes
alone (FakeTensorMode), and each tensor is counted from its first use to its last. Bytes grow by a straight line in rows
and in blocks, so four trials give those of any number. As on a CPU and not compiled: kernels of a GPU keep about the
same for the backward pass, and a compiled step less.
"""

import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.recipe.schema import Adapter

DEPTHS = (2, 1)  # blocks of the models that are tried
DOCUMENTS_A_ROW = 4  # where documents are kept apart


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond weights and gradients at two moments: where the blocks hold most, and where the head does, there
    without and in logits and their gradients."""

    blocks: float
    at_head: float
    logits: float


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What trials have counted. fixed, row: of a step whatever its rows, and for each row. trained: parameters that
    have gradients. total: all of them. chunked: the loss takes a chunk of the logits at a time."""

    fixed: Peaks
    row: Peaks
    trained: int
    total: int
    chunked: bool

    def peaks(self, rows: int) -> Peaks:
        """Return the bytes of a step of so many rows."""
        return _combined(self.fixed, self.row, lambda a, b: a + rows * b)

    def of_rows(self, times: float) -> "StepMemory":
        """Return the memory of rows so many times as long."""
        return replace(self, row=_combined(self.row, self.row, lambda a, _: times * a))


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, from the first to the last reference, and notes when they are most.

    vocab_rows: the last side of logits. known: tensors that do not count.
    """

    def __init__(self, vocab_rows: int, known: list[torch.Tensor]):
        super().__init__()
        self.vocab_rows = vocab_rows
        self.live = self.live_logits = 0
        self.blocks = self.head = self.logits = 0
        self.counted = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        if not self.live_logits:
            self.blocks = max(self.blocks, self.live)
        elif self.live > self.head:
            self.head, self.logits = self.live, self.live_logits
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.counted:
            return
        size, of_logits = storage.nbytes(), 0
        if tensor.ndim and tensor.shape[-1] == self.vocab_rows:
            of_logits = size
        self.counted.add(storage._cdata)
        self.live += size
        self.live_logits += of_logits
        weakref.finalize(storage, self._free, storage._cdata, size, of_logits)

    def _free(self, address: int, size: int, of_logits: int) -> None:
        self.counted.discard(address)  # another storage may get the address
        self.live -= size
        self.live_logits -= of_logits

    def peaks(self) -> Peaks:
        return Peaks(self.blocks, self.head - self.logits, self.logits)


def step_memory(
    model: Any, *, row_tokens: int, half: bool, isolated: bool, checkpointing: dict[str, Any] | None
) -> StepMemory:
    """Return the memory of a step of this model, which is on the device meta and is cut down by the trials.

    half: bf16 autocast. isolated: documents of a row do not see each other. checkpointing: settings of recomputing
    activations, None without.
    """
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    model.config.get_text_config().use_cache = False
    every = 1
    if checkpointing is not None:
        given = dict(checkpointing)
        every = given.pop("every_n_layers", 1)
        given.pop("offload", None)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given or None, every_n_layers=every)
    model.train()
    blocks = _blocks(model)
    num_blocks = len(blocks)
    tried: list[tuple[int, list[Peaks]]] = []
    with FakeTensorMode():
        _leave_meta(model)
        for depth in sorted({min(every * depth, num_blocks) for depth in DEPTHS}, reverse=True):
            del blocks[depth:]
            of_rows = [_try(model, rows, row_tokens, half=half, isolated=isolated) for rows in (1, 2)]
            tried.append((depth, of_rows))
    # By rows first, then by blocks: a line through two points each.
    lines = []
    for depth, (one, two) in tried:
        row = _combined(two, one, lambda a, b: a - b)
        lines.append((depth, _combined(one, row, lambda a, b: a - b), row))
    (deep, fixed_deep, row_deep), (shallow, fixed_shallow, row_shallow) = lines[0], lines[-1]
    more = 0.0
    if deep > shallow:
        more = (num_blocks - deep) / (deep - shallow)
    fixed = _combined(fixed_deep, fixed_shallow, lambda a, b: a + more * (a - b))
    row = _combined(row_deep, row_shallow, lambda a, b: a + more * (a - b))
    return StepMemory(fixed=fixed, row=row, trained=trained, total=total, chunked=hasattr(model, "per_token_nll"))


def _combined(first: Peaks, second: Peaks, by: Callable[[float, float], float]) -> Peaks:
    return Peaks(*map(by, astuple(first), astuple(second)))


def _blocks(model: Any) -> torch.nn.ModuleList:
    """Return the list of the model's equal blocks: the longest one, each of which holds weights."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


def _leave_meta(model: torch.nn.Module) -> None:
    """Put tensors of the mode that is on in the places of the model's, tied ones once."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new: Any = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = new
                tensors[name] = made[id(tensor)]  # type: ignore[index,assignment]


def _try(model: Any, rows: int, row_tokens: int, *, half: bool, isolated: bool) -> Peaks:
    """Return the peaks of one forward and backward pass, with gradients in place as from the second micro-step on."""
    known = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            known.append(parameter.grad)
    ids_BT = torch.zeros(rows, row_tokens, dtype=torch.long)
    batch = {"input_ids": ids_BT, "labels": ids_BT, "shift_labels": ids_BT, "num_items_in_batch": torch.tensor(1.0)}
    if isolated:
        document = -(-row_tokens // DOCUMENTS_A_ROW)
        batch["position_ids"] = (torch.arange(row_tokens) % document).repeat(rows, 1)
    live = LiveBytes(model.get_input_embeddings().num_embeddings, known)
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = model(**batch)
        loss = outputs.loss
        if half and outputs.get("logits") is not None:
            outputs.logits.float()  # accelerate gives the Trainer outputs in fp32
        del outputs
        loss.backward()
    return live.peaks()


def memory_of_config(
    config: Any, *, attention: str, adapter: Adapter | None, on_cpu: bool, row_tokens: int, **how: Any
) -> StepMemory | None:
    """Return the memory of a step of the model that a training loads by this config; None where no trial can be made.
    how: as step_memory takes it."""
    from transformers import AutoModelForCausalLM

    from pipeline.model.build import use_chunked_loss
    from pipeline.model.modeling_tandem import TandemForCausalLM
    from pipeline.model.native import tandem_config

    config = config.get_text_config()
    build: Any = AutoModelForCausalLM.from_config
    if config.model_type == "gpt2" and adapter is None:  # it is trained as a Tandem (model/load.py)
        ours = tandem_config(config)
        if ours is not None:
            config, build = ours, TandemForCausalLM._from_config
    for name in ("attn_pdrop", "attention_dropout"):
        if not on_cpu and hasattr(config, name):
            setattr(config, name, 0.0)  # a GPU's kernels drop what they attend to without keeping it
    try:
        with torch.device("meta"):
            model: Any = build(config, attn_implementation=attention, dtype=torch.float32)
            use_chunked_loss(model)
        if adapter is not None:
            from pipeline.model.adapter import add_adapter
            from pipeline.training.adapter import peft_settings

            add_adapter(model, peft_settings(adapter), base="", revision=None, new_ids=(), seed=0)
        return step_memory(model, row_tokens=row_tokens, **how)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None  # a forward may look at its values, of which there are none: experts that are chosen by them
