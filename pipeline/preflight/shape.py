"""The shape a run is trained on: what may change between two starts, at the price of the last bits."""

from typing import Any

import torch

from pipeline.hardware.device import device_info
from pipeline.preflight.opening import OpenRun


def say_shape(run: OpenRun, trainer: Any) -> None:
    """Print the shape of this start and keep it in the manifest; say so when a run goes on with another one.

    On the same shape a resume is bitwise; on another one the same rows follow and the losses agree to rounding.
    """
    args = trainer.args
    if not trainer.is_world_process_zero():
        return
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    shape = {
        "device": device_info().name,
        "processes": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "micro_steps": args.gradient_accumulation_steps,
        "threads": torch.get_num_threads(),
        "dtype": "float8" if trainer.recipe.train.get("fp8") else half,
        "compiled": args.torch_compile,
        "attention": trainer.model.config._attn_implementation,
    }
    before = run.directory.read_manifest().get("shape")
    run.directory.update_manifest(shape=shape)
    print("shape: " + ", ".join(f"{name} {value}" for name, value in shape.items()), flush=True)
    changed = [
        f"{name} {before.get(name)} -> {value}" for name, value in shape.items() if before and before.get(name) != value
    ]
    if run.step and changed:
        print(
            f"note: going on with another shape ({'; '.join(changed)}): the same rows follow, equal to rounding but not bitwise.",
            flush=True,
        )
