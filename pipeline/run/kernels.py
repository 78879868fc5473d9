"""Kernels and formats that only some recipes ask for: float8, an attention by its name, and the trial of an attention
kernel.

run/checks.py imports them where a recipe asks for them.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import decide_bf16, decide_compile
from pipeline.process.errors import InputMissingError, RecipeError, TandemError
from pipeline.recipe import Recipe
from pipeline.recipe.batch import isolates_documents
from pipeline.recipe.model_statistics import CountedSizes
from pipeline.recipe.sizes import Sizes, options_of
from pipeline.recipe.start_from import becomes_tandem, drops_attention


def float8_problems(recipe: Recipe, device: DeviceInfo) -> Iterator[TandemError]:
    """Yield what train.fp8 lacks: the device, its package, or matrices that it would convert."""
    where = recipe.where("train.fp8")
    if not _has_float8(device):
        message = (
            f"float8 is for NVIDIA GPUs of compute capability 8.9 (Ada, Hopper) or later, and this is {device.name}. "
            "Remove the key; bf16 stays."
        )
        yield RecipeError(f"{where}: {message}")
    if importlib.util.find_spec("torchao") is None:
        message = (
            "float8 needs the package torchao, which is not installed. Install it (pip install 'torchao>=0.18'), or "
            "remove the key."
        )
        yield InputMissingError(f"{where}: {message}")
    started = recipe.model.start_config
    if recipe.model.start_from is not None and started is None:
        return  # of such a model it is reported when its weights are here (training/build.py)
    has_bias = started is None or started.get("model_type") != "nanochat"  # where the config does not say
    if not becomes_tandem(recipe):
        yield RecipeError(f"{where}: is for model.type tandem, and this model is another one. Remove the key.")
    elif (options_of(recipe) if started is None else started).get("use_bias", has_bias):
        cure = "Remove the key" if started else "Remove the key, or set model.options.use_bias: false"
        message = f"this model's matrices have biases, as GPT-2's, and such are not converted. {cure}."
        yield RecipeError(f"{where}: {message}")


def _has_float8(device: DeviceInfo) -> bool:
    import torch

    return device.kind == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def refuse_attention(recipe: Recipe, device: DeviceInfo) -> None:
    """Raise what keeps this run from the attention that its recipe names, another one than eager and sdpa."""
    asked, where = recipe.model.attn_implementation, recipe.where("model.attn_implementation")
    if asked == "flex_attention":
        if device.kind != "cuda":
            raise RecipeError(
                f"{where}: flex_attention has no backward pass on {device.kind}. Write sdpa, or remove the key."
            )
        if drops_attention(recipe):
            cure = "Write sdpa" if recipe.model.start_config else "Write model.options: {attn_pdrop: 0.0}, or sdpa"
            raise RecipeError(f"{where}: flex_attention has no dropout, and the model's attention has some. {cure}.")
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from_hub = "/" in str(asked)  # a kernel of the Hub, as kernels-community/flash-attn
    if not from_hub and asked not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())])
        raise RecipeError(f"{where}: {asked!r} is no attention that transformers knows. Write one of {known}.")
    package = "kernels" if from_hub else FLASH_PACKAGES.get(str(asked))
    if package is None:
        return
    if device.kind != "cuda":
        raise RecipeError(f"{where}: {asked} needs a CUDA device. Write sdpa, or remove the key.")
    if importlib.util.find_spec(package) is None:
        raise InputMissingError(
            f"{where}: {asked} needs the package {package.replace('_', '-')}, which is not installed. Install it, or "
            "write sdpa."
        )
    if isolates_documents(recipe) and decide_compile(recipe.train.get("torch_compile")):
        raise RecipeError(
            f"{where}: {asked} must read from the device where documents begin, which ends one compiled graph in "
            "every layer. Remove the key: flex_attention skips what other documents hold inside the graph. Or write "
            "train.torch_compile: false."
        )


# An attention kernel is tried on its device against attention spelt out, before it is believed.
#
# Shapes: B rows, T token, H heads, K width of a head.

# Largest difference from eager attention in float32, as a share of the largest value. What a format rounds away came
# to 7e-3 in bfloat16 and 4e-6 in float32 (sdpa on a CPU), a window one key too short to 1e-1 and more.
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-5}
LONGEST_TRIAL = 2048  # tokens: attention spelt out takes memory with their square


def try_attention(
    implementation: str, recipe: Recipe, sizes: Any, trial: Callable[..., float] | None = None
) -> tuple[bool, str]:
    """Return whether the implementation works in the run's format, and what was found. trial: as
    difference_from_eager."""
    fp16 = bool(recipe.train.get("fp16"))
    dtype = "bfloat16" if decide_bf16(recipe.train.get("bf16"), fp16=fp16) else "float16" if fp16 else "float32"
    trial = trial or difference_from_eager
    try:
        difference = trial(implementation, sizes, isolated=isolates_documents(recipe), dtype=dtype, device="cuda")
    except Exception as error:  # of Triton, the compiler, the driver or the kernel: each has classes of its own
        lines = str(error).strip().splitlines() or [""]
        return False, f"{type(error).__name__}: {lines[0]}"
    return difference <= TOLERANCE[dtype], f"on this device it differs by {difference:.0e} from eager, in {dtype}"


def difference_from_eager(
    implementation: str, sizes: Sizes | CountedSizes, *, isolated: bool, dtype: str, device: str
) -> float:
    """Largest difference of output and gradients from eager attention in float32, each as a share of its largest
    value.

    Forward and backward of one layer with the model's heads, window and documents on random numbers, in two short
    rows. FlexAttention is compiled into one graph, as in a compiled model.
    """
    import torch

    window = min(sizes.windows)
    length = min(sizes.row_tokens, LONGEST_TRIAL)
    if window < sizes.row_tokens:
        window = min(window, LONGEST_TRIAL // 2)
        length = min(length, (window + 256) // 128 * 128 + 128)  # some blocks are whole, some cut, some skipped
    windowed = window < length
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
    results = []
    for name in (implementation, "eager"):
        attend = _layer(name, sizes, window if windowed else None, length, positions)
        if name == "flex_attention":
            attend = torch.compile(attend, fullgraph=True)
        float32 = torch.float32 if name == "eager" else None
        given = [x.detach().to(float32 or x.dtype).requires_grad_() for x in (query, key, value)]
        output = attend(*given)
        results.append([output, *torch.autograd.grad(output, given, toward.to(output.dtype))])
    pairs = zip(*results, strict=True)
    differences = [(found.float() - true).abs().max() / true.abs().max() for found, true in pairs]
    return torch.stack(differences).max().item()


def _layer(
    implementation: str, sizes: Sizes | CountedSizes, window: int | None, length: int, positions: Any
) -> Callable:
    """Return the attention of a layer as Tandem computes it, (B, H, T, K) to (B, T, H, K)."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from pipeline.model.configuration_tandem import TandemConfig
    from pipeline.model.modeling_tandem import TandemModel, attention_masks, eager_attention, flash_documents

    config = TandemConfig(
        vocab_size=8,
        n_positions=length,
        n_layer=2,
        n_embd=sizes.n_head * sizes.head_dim,
        n_head=sizes.n_head,
        n_kv_head=sizes.n_kv_head,
        window_pattern=None if window is None else "SL",
        sliding_window=window,
    )
    with torch.device("meta"):  # the weights are not used
        model = TandemModel._from_config(config, attn_implementation=implementation).train()
    config, layer = model.config, model.h[0].attn
    kind = "full_attention" if window is None else "sliding_attention"

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        states = query.transpose(1, 2).flatten(2)
        mask = attention_masks(config, states, position_ids=positions)[kind]
        documents = {} if positions is None else flash_documents(config, states, positions)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(layer.implementation(value, mask), eager_attention)
        options = {"scaling": layer.scaling, "sliding_window": layer.sliding_window, **documents}
        return attention(layer, query, key, value, mask, **options)[0]

    return attend
