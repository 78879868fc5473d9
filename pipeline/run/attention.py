"""The attention implementation of a run: chosen by what the model's attention hides, and tried on the device against
eager attention before it is used.

Shapes: B rows, T token, H heads, K width of a head.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import can_compile
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe.sizes import Sizes

AS_RECIPE = "as the recipe says"
FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
# Largest difference from eager attention in float32, as a share of the largest value. What a format rounds away came
# to 7e-3 in bfloat16 and 4e-6 in float32 (sdpa on a CPU), a window one key too short to 1e-1 and more.
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-5}
LONGEST_TRIAL = 2048  # tokens: attention spelt out takes memory with their square


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """The facts of a recipe by which its attention implementation is chosen."""

    named: str | None  # model.attn_implementation
    where: str  # the place of that key
    is_tandem: bool  # known as Tandem's model before it is loaded
    isolated: bool  # documents of a row do not see each other
    has_dropout: bool
    starts_from_config: bool  # of a model that the recipe starts from, whose options are not the recipe's to set
    dtype: str
    compiled: bool


def choose_attention(
    needs: AttentionNeeds,
    device: DeviceInfo,
    sizes: Sizes | None,
    *,
    trial: Callable[..., float] | None = None,
) -> tuple[str | None, str]:
    """Return the attention implementation by its name in transformers (None leaves it to transformers), and why.

    What the recipe names is kept, and tried as what is chosen here is. trial: difference_from_eager by default. Raises
    RecipeError when what the recipe names does not work on this device.
    """
    named = needs.named
    if named in ("eager", "sdpa") or (named and (device.kind != "cuda" or sizes is None)):
        return named, AS_RECIPE
    if named:
        worked, found = try_attention(named, needs, sizes, trial)
        if worked:
            return named, f"{AS_RECIPE}; {found}"
        raise RecipeError(
            f"{needs.where}: {named} does not give this model's attention on {device.name} ({found}). Write sdpa, or "
            "remove the key."
        )
    if not needs.is_tandem or sizes is None:
        return None, "transformers' choice for a model that is not known as Tandem's before it is loaded"
    hidden = _hidden(needs, sizes)
    if not hidden:
        return "sdpa", "every layer sees all of its row before it"
    if needs.has_dropout:
        return "sdpa", f"{hidden}, by a dense mask: flex_attention has no dropout, and the model's attention has some"
    if device.kind != "cuda":
        # The place of a kernel that skips blocks on other devices: FlexAttention has no backward pass there.
        return "sdpa", f"{hidden}, by a dense mask: flex_attention has no backward pass on {device.kind}"
    if not can_compile():
        return "sdpa", f"{hidden}, by a dense mask: flex_attention needs a compiler, and Triton is not here"
    worked, found = try_attention("flex_attention", needs, sizes, trial)
    if worked:
        return "flex_attention", f"{hidden}, whose hidden blocks it skips; {found}"
    return "sdpa", f"{hidden}, by a dense mask: flex_attention does not work here ({found})"


def attention_line(implementation: str | None, why: str) -> str:
    return f"attention: {implementation or 'default'} ({why})"


def _hidden(needs: AttentionNeeds, sizes: Sizes) -> str:
    """Return what causal attention over the whole row would see and the model does not; empty when nothing."""
    parts = []
    window = min(sizes.windows)
    if window < sizes.row_tokens:
        parts.append(f"windows of {window:,} in rows of {sizes.row_tokens:,} tokens")
    if needs.isolated:
        parts.append("documents that do not see each other")
    return " and ".join(parts)


def refuse_attention(needs: AttentionNeeds, device: DeviceInfo) -> None:
    """Raise what keeps this run from the attention that its recipe names."""
    named, where = needs.named, needs.where
    if named in (None, "eager", "sdpa"):
        return
    if named == "flex_attention":
        if device.kind != "cuda":
            raise RecipeError(
                f"{where}: flex_attention has no backward pass on {device.kind}. Write sdpa, or remove the key."
            )
        if needs.has_dropout:
            cure = "Write sdpa" if needs.starts_from_config else "Write model.options: {attn_pdrop: 0.0}, or sdpa"
            raise RecipeError(f"{where}: flex_attention has no dropout, and the model's attention has some. {cure}.")
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from_hub = "/" in str(named)  # a kernel of the Hub, as kernels-community/flash-attn
    if not from_hub and named not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())])
        raise RecipeError(f"{where}: {named!r} is no attention that transformers knows. Write one of {known}.")
    package = "kernels" if from_hub else FLASH_PACKAGES.get(str(named))
    if package is None:
        return
    if device.kind != "cuda":
        raise RecipeError(f"{where}: {named} needs a CUDA device. Write sdpa, or remove the key.")
    if importlib.util.find_spec(package) is None:
        raise InputMissingError(
            f"{where}: {named} needs the package {package.replace('_', '-')}, which is not installed. Install it, or "
            "write sdpa."
        )
    if needs.isolated and needs.compiled:
        raise RecipeError(
            f"{where}: {named} reads from the device where documents begin, which ends a compiled graph in every "
            "layer. Remove the key (flex_attention skips other documents), or write train.torch_compile: false."
        )


def try_attention(
    implementation: str, needs: AttentionNeeds, sizes: Any, trial: Callable[..., float] | None = None
) -> tuple[bool, str]:
    """Return whether the implementation works in the run's format, and what was found. trial: as
    difference_from_eager."""
    trial, dtype = trial or difference_from_eager, needs.dtype
    try:
        difference = trial(implementation, sizes, isolated=needs.isolated, dtype=dtype, device="cuda")
    except Exception as error:  # of Triton, the compiler, the driver or the kernel: each raises its own classes
        lines = str(error).strip().splitlines() or [""]
        return False, f"{type(error).__name__}: {lines[0]}"
    return difference <= TOLERANCE[dtype], f"on this device it differs by {difference:.0e} from eager, in {dtype}"


def difference_from_eager(implementation: str, sizes: Sizes, *, isolated: bool, dtype: str, device: str) -> float:
    """Return the largest difference of output and gradients from eager attention in float32, each as a share of its
    largest value.

    Forward and backward of one layer with the model's heads, window and documents on random numbers, in two short
    rows. FlexAttention is compiled into one graph, as in a compiled model.
    """
    import torch

    window = min(sizes.windows)
    length = min(sizes.row_tokens, LONGEST_TRIAL)
    if window < sizes.row_tokens:
        window = min(window, LONGEST_TRIAL // 2)
        length = min(length, (window + 256) // 128 * 128 + 128)  # some blocks are whole, some cut, some skipped
    shown_window = window if window < length else None
    generator = torch.Generator().manual_seed(0)
    heads = (sizes.n_head, sizes.n_kv_head, sizes.n_kv_head, sizes.n_head)
    shapes = [(2, count, length, sizes.head_dim) for count in heads]
    states = [torch.randn(shape, generator=generator).to(device, getattr(torch, dtype)) for shape in shapes]
    query, key, value, toward = states
    query, toward = 3 * query, toward.transpose(1, 2)  # sharper than a model's, so that no key is lost in a mean
    positions = None
    if isolated:
        tokens, cut = torch.arange(length, device=device), length // 8
        positions = torch.stack([torch.where(tokens < cut, tokens, tokens - cut), tokens % (length // 5 + 1)])
    # Both implementations on the same numbers: eager is the reference, in float32.
    results = []
    for name in (implementation, "eager"):
        attend = _layer(name, sizes, shown_window, length, positions)
        if name == "flex_attention":
            attend = torch.compile(attend, fullgraph=True)
        float32 = torch.float32 if name == "eager" else None
        given = [x.detach().to(float32 or x.dtype).requires_grad_() for x in (query, key, value)]
        output = attend(*given)
        results.append([output, *torch.autograd.grad(output, given, toward.to(output.dtype))])
    pairs = zip(*results, strict=True)
    differences = [(found.float() - true).abs().max() / true.abs().max() for found, true in pairs]
    return torch.stack(differences).max().item()


def _layer(implementation: str, sizes: Sizes, window: int | None, length: int, positions: Any) -> Callable:
    """Return the attention of a layer as Tandem computes it, (B, H, T, K) to (B, T, H, K)."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from pipeline.model.configuration_tandem import TandemConfig
    from pipeline.model.modeling_tandem import TandemModel, attention_masks, eager_attention, flash_documents

    kind, pattern = "full_attention", None
    if window is not None:
        kind, pattern = "sliding_attention", "SL"
    config = TandemConfig(
        vocab_size=8,
        n_positions=length,
        n_layer=2,
        n_embd=sizes.n_head * sizes.head_dim,
        n_head=sizes.n_head,
        n_kv_head=sizes.n_kv_head,
        window_pattern=pattern,
        sliding_window=window,
    )
    with torch.device("meta"):  # the weights are not used
        model = TandemModel._from_config(config, attn_implementation=implementation).train()
    config, layer = model.config, model.h[0].attn

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        states = query.transpose(1, 2).flatten(2)
        mask = attention_masks(config, states, position_ids=positions)[kind]
        documents = {} if positions is None else flash_documents(config, states, positions)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(layer.implementation(value, mask), eager_attention)
        options = {"scaling": layer.scaling, "sliding_window": layer.sliding_window, **documents}
        return attention(layer, query, key, value, mask, **options)[0]

    return attend
