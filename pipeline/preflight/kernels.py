"""Formats and kernels that a recipe asks for and this machine may lack. Imports torch."""

import importlib.util
import os

from pipeline.artifacts.errors import InputMissingError, RecipeError, TandemError
from pipeline.hardware.device import DeviceInfo, can_compile, decide_compile
from pipeline.recipe import Recipe
from pipeline.recipe.batch import isolates_documents
from pipeline.recipe.presets import options_of
from pipeline.recipe.start_from import becomes_tandem

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def kernel_problems(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    """fp16, tf32, fp8, torch.compile and attention kernels against the device of this process."""
    return [*_formats(recipe, device), *_float8(recipe, device), *_compiler(recipe), *_attention(recipe, device)]


def _formats(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    problems: list[TandemError] = []
    if recipe.train.get("fp16") and device.kind == "cpu":
        problems.append(
            RecipeError(
                f"{recipe.where('train.fp16')}: fp16 needs a GPU, and this run is on a CPU. Write bf16: auto and remove fp16."
            )
        )
    if recipe.train.get("tf32") and not _has_tf32(device):
        problems.append(
            RecipeError(f"{recipe.where('train.tf32')}: {device.name} has no TF32. Remove the key; fp32 is used.")
        )
    return problems


def _has_tf32(device: DeviceInfo) -> bool:
    import torch

    return device.kind == "cuda" and (torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8)


def _float8(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    where, problems = recipe.where("train.fp8"), list[TandemError]()
    if not recipe.train.get("fp8"):
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
            told = "accelerate's config file has mixed_precision: fp8 and the recipe does not, whose choice it is. Write train.fp8: true beside bf16: true, or mixed_precision: bf16 there."
            problems.append(RecipeError(f"{where}: {told}"))
        return problems
    if not _has_float8(device):
        told = f"float8 is for NVIDIA GPUs of compute capability 8.9 (Ada, Hopper) or later, and this is {device.name}. Remove the key; bf16 stays."
        problems.append(RecipeError(f"{where}: {told}"))
    if importlib.util.find_spec("torchao") is None:
        told = "float8 needs the package torchao, which is not installed. Install it (pip install 'torchao>=0.18'), or remove the key."
        problems.append(InputMissingError(f"{where}: {told}"))
    started = recipe.model.start_config
    if recipe.model.start_from is not None and started is None:
        return problems  # of such a model it is told when its weights are here (training/build.py)
    has_bias = started is None or started.get("model_type") != "nanochat"  # where the config does not say
    if not becomes_tandem(recipe):
        problems.append(
            RecipeError(f"{where}: is for model.type tandem, and this model is another one. Remove the key.")
        )
    elif (options_of(recipe) if started is None else started).get("use_bias", has_bias):
        cure = "Remove the key" if started else "Remove the key, or set model.options.use_bias: false"
        told = f"this model's matrices have biases, as GPT-2's, and such are not converted. {cure}."
        problems.append(RecipeError(f"{where}: {told}"))
    return problems


def _has_float8(device: DeviceInfo) -> bool:
    import torch

    return device.kind == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def _compiler(recipe: Recipe) -> list[TandemError]:
    if recipe.train.get("torch_compile") is not True or can_compile():
        return []
    return [
        InputMissingError(
            f"{recipe.where('train.torch_compile')}: torch.compile finds no compiler here (on a CPU: g++ and Python's headers; on a GPU: Triton). "
            "Install them, or write torch_compile: auto."
        )
    ]


def drops_attention(recipe: Recipe) -> bool:
    """Whether a model of Tandem's has dropout inside its attention."""
    config = recipe.model.start_config or options_of(recipe)
    name, default = ("attention_dropout", 0.0) if config.get("model_type") == "nanochat" else ("attn_pdrop", 0.1)
    return becomes_tandem(recipe) and config.get(name, default) > 0


def _attention(recipe: Recipe, device: DeviceInfo) -> list[TandemError]:
    asked, where = recipe.model.attn_implementation, recipe.where("model.attn_implementation")
    if asked in (None, "eager", "sdpa"):
        return []
    if asked == "flex_attention":
        if device.kind == "cuda" and drops_attention(recipe):
            cure = "Write sdpa" if recipe.model.start_config else "Write model.options: {attn_pdrop: 0.0}, or sdpa"
            return [RecipeError(f"{where}: flex_attention has no dropout, and the model's attention has some. {cure}.")]
        if device.kind == "cuda":
            return []
        return [
            RecipeError(
                f"{where}: flex_attention has no backward pass on {device.kind}. Write sdpa, or remove the key."
            )
        ]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from_hub = "/" in str(asked)  # a kernel of the Hub, as kernels-community/flash-attn
    if not from_hub and asked not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())])
        return [RecipeError(f"{where}: {asked!r} is no attention that transformers knows. Write one of {known}.")]
    package = "kernels" if from_hub else FLASH_PACKAGES.get(str(asked))
    if package is not None and device.kind != "cuda":
        return [RecipeError(f"{where}: {asked} needs a CUDA device. Write sdpa, or remove the key.")]
    if package is not None and importlib.util.find_spec(package) is None:
        return [
            InputMissingError(
                f"{where}: {asked} needs the package {package.replace('_', '-')}, which is not installed. Install it, or write sdpa."
            )
        ]
    if package is not None and isolates_documents(recipe) and decide_compile(recipe.train.get("torch_compile")):
        told = f"{asked} must read from the device where documents begin, which ends one compiled graph in every layer. Remove the key: flex_attention skips what other documents hold inside the graph. Or write train.torch_compile: false."
        return [RecipeError(f"{where}: {told}")]
    return []
