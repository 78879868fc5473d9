"""The micro-batch of `train.per_device_train_batch_size: auto`: tried on the device before the first step, where memory
refuses what it does not have, else as planned.

The training does not depend on it but for the last bits: so a run that has begun keeps its own on the same device
while it fits (`shape` in its manifest).
"""

from typing import Any

import torch

from pipeline.hardware.device import batch_ranks, device_info
from pipeline.plan.memory import CPU_POSITIONS, CPU_SHARE, micro_batches
from pipeline.process.errors import OutOfMemoryError
from pipeline.recipe import Recipe
from pipeline.recipe.batch import KEY, micro_batch, micro_steps, rows_per_step
from pipeline.recipe.schema import with_values
from pipeline.run.open_run import OpenRun
from pipeline.training.distributed import from_every_rank, on_rank_0
from pipeline.training.trainer import TandemTrainer

RESERVE = 0.05  # of the memory, left free while trying: for evaluations, the update's products, the collectives
# Bytes of address space for the threads that the training starts: glibc maps 64 MiB for the memory of each.
THREADS = 512 << 20


def resolve_micro_batch(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> Recipe:
    """Return the recipe with a number for `auto`, the same on all ranks, before anything of the training is made from
    it. Every rank calls it, and the trainer has it from then on.

    Raises OutOfMemoryError when not even one row fits.
    """
    args = trainer.args
    possible = micro_batches(rows_per_step(recipe), batch_ranks(args.world_size))
    # Ranks may see other devices and other free memory: the first one's word counts.
    kept, rows = on_rank_0(lambda: (_kept(run, possible), micro_batch(recipe)))
    why = f"the largest divisor of {possible[0]} that fits"
    # Of a sharded model nothing is tried: a rank that runs out of memory would leave the others in a collective.
    refuses = not trainer.is_sharded and any(from_every_rank(_memory_refuses(args.device)))
    if refuses and run.step < args.max_steps:
        tried = (kept and _tried(trainer, [kept], run.step)) or _tried(trainer, possible, run.step)
        if tried is None:
            raise OutOfMemoryError(
                f"{recipe.where(KEY)}: auto finds no micro-batch: not even one row of {recipe.data.row_tokens} tokens "
                f"fits into the memory of {device_info().name}. Set train.gradient_checkpointing: true, shorten "
                "data.row_tokens, or take a smaller model."
            )
        rows, why = tried, f"{why}, as was just tried"
    elif kept is not None and kept <= rows:
        rows = kept
    if not refuses:
        why += " by arithmetic"
    if args.device.type == "cpu" and not refuses:
        why += (
            f" into {100 * CPU_SHARE:.0f} % of the memory that is free, at most {CPU_POSITIONS:,} positions on a CPU"
        )
    recipe = with_values(recipe, {"micro_batch": rows})
    trainer.set_micro_batch(rows=rows, micro_steps=micro_steps(recipe, batch_ranks(args.world_size)))
    if trainer.is_world_process_zero():
        print(f"{KEY}: auto is {rows}: {'as this run began' if rows == kept else why}", flush=True)
    return recipe


def _kept(run: OpenRun, possible: list[int]) -> int | None:
    """Return what the run's last start had, if that was on this device and still divides the rows."""
    shape = run.directory.read_manifest().get("shape") or {}
    same = shape.get("device") == device_info().name and shape.get("micro_batch") in possible
    return shape["micro_batch"] if same else None


def _memory_refuses(device: torch.device) -> bool:
    """Return whether too large an allocation is an error: a CPU swaps or is killed, but under a limit of the address
    space."""
    return device.type == "cuda" or _address_space() >= 0


def _address_space() -> int:
    """Return the bytes of address space that the process may have; -1 where they are not limited, as on Windows."""
    try:
        import resource
    except ImportError:
        return -1
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _tried(trainer: TandemTrainer, possible: list[int], step: int) -> int | None:
    """Return the first of these micro-batches that fits on every rank."""
    args, model = trainer.args, trainer.model
    model.train()
    if args.activation_checkpointing:  # as Trainer does it when the training begins
        kwargs: Any = args.activation_checkpointing_kwargs  # text only as a command line gives it
        given = dict(kwargs or {})
        layers, offload = given.pop("every_n_layers", 1), given.pop("offload", False)
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=given or None, every_n_layers=layers, offload=offload
        )
    # DDP will hold the gradients a second time.
    reserve = sum(p.nbytes for p in model.parameters() if p.requires_grad) if args.world_size > 1 else 0
    on_cuda = args.device.type == "cuda"
    limit = torch.cuda.mem_get_info(args.device)[1] if on_cuda else _address_space()
    reserve += max(int(RESERVE * max(limit, 0)), 0 if on_cuda else THREADS)  # a limit of -1 is none
    found = None
    for n in possible:
        if all(from_every_rank(trainer.fits_in_memory(n, step=step, reserve=reserve))):
            found = n
            break
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(args.device)  # the manifest records the training's own peak
    return found
