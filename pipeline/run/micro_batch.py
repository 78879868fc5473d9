"""The micro-batch of `train.per_device_train_batch_size: auto`: tried on the device before the first step, where memory
refuses what it does not have, else as planned.

The training does not depend on it but for the last bits: so a run that has begun keeps its own on the same device
while it fits (`shape` in its manifest).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from pipeline.hardware.device import batch_ranks, device_info
from pipeline.plan.memory import CPU_POSITIONS, CPU_SHARE, micro_batches
from pipeline.process.errors import OutOfMemoryError
from pipeline.recipe.batch import KEY
from pipeline.run.open_run import OpenRun
from pipeline.training.distributed import from_every_rank, on_rank_0

RESERVE = 0.05  # of the memory, left free while trying: for evaluations, the update's products, the collectives
# Bytes of address space for the threads that the training starts: glibc maps 64 MiB for the memory of each.
THREADS = 512 << 20


def find_micro_batch(
    run: OpenRun,
    args: TrainingArguments,
    model: Any,
    *,
    fits: Callable[..., bool],
    sharded: bool,
    planned: int,
    rows_per_step: int,
    where: str,
) -> int:
    """Return the number for `auto`, the same on all ranks. Every rank calls it.

    fits: trainer.fits_in_memory. planned: the micro-batch by arithmetic. where: begins a message. Raises
    OutOfMemoryError when not even one row fits.
    """
    possible = micro_batches(rows_per_step, batch_ranks(args.world_size))
    # Ranks may see other devices and other free memory: the first one's word counts.
    kept, rows = on_rank_0(lambda: (_kept(run, possible), planned))
    why = f"the largest divisor of {possible[0]} that fits"
    # Of a sharded model nothing is tried: a rank that runs out of memory would leave the others in a collective.
    refuses = not sharded and any(from_every_rank(_memory_refuses(args.device)))
    if not refuses:
        why += " by arithmetic"
        if args.device.type == "cpu":
            share = f"{100 * CPU_SHARE:.0f} % of the memory that is free"
            why += f" into {share}, at most {CPU_POSITIONS:,} positions on a CPU"
    if refuses and run.step < args.max_steps:
        # The run's own micro-batch is tried first, and again among the others, largest first.
        choices = possible if kept is None else [kept, *possible]
        tried = _first_that_fits(choices, args, model, partial(fits, step=run.step))
        if tried is None:
            raise OutOfMemoryError(
                f"{where}: auto finds no micro-batch: not even one row fits into the memory of {device_info().name}. "
                "Set train.gradient_checkpointing: true, shorten data.row_tokens, or take a smaller model."
            )
        rows, why = tried, f"{why}, as was just tried"
    elif kept is not None and kept <= rows:
        rows = kept
    if args.process_index == 0:
        if rows == kept:
            why = "as this run began"
        print(f"{KEY}: auto is {rows}: {why}", flush=True)
    return rows


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


def _first_that_fits(choices: list[int], args: TrainingArguments, model: Any, fits: Callable[..., bool]) -> int | None:
    """Return the first of these micro-batches that fits on every rank."""
    model.train()
    if args.activation_checkpointing:  # as Trainer does it when the training begins
        kwargs: Any = args.activation_checkpointing_kwargs  # text only as a command line gives it
        given = dict(kwargs or {})
        layers, offload = given.pop("every_n_layers", 1), given.pop("offload", False)
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=given or None, every_n_layers=layers, offload=offload
        )
    reserve = 0
    if args.world_size > 1:  # DDP will hold the gradients a second time
        reserve = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    on_cuda = args.device.type == "cuda"
    if on_cuda:
        total = torch.cuda.mem_get_info(args.device)[1]
        reserve += int(RESERVE * total)
    else:
        limit = max(_address_space(), 0)  # -1 is none
        reserve += max(int(RESERVE * limit), THREADS)
    found = None
    for rows in choices:
        if all(from_every_rank(fits(rows, reserve=reserve))):
            found = rows
            break
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(args.device)  # the manifest records the training's own peak
    return found
