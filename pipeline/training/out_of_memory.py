"""Memory ran out in a step: which micro-batch fits, tried on the spot instead of estimated."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pipeline.data.rows import on_device
from pipeline.process.errors import HangError, OutOfMemoryError, first_line
from pipeline.recipe.resolve import KEY
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.training.distributed import preserved_rng

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer

# Where a thread stands in the training, read from its Python frames: the training itself keeps no record of it.

PACKAGE = str(Path(__file__).parents[1])
# Functions of ours by name, and the stage that they are, in the order in which a step that was made leads to the next one.
STAGES = {
    "save_checkpoint": "save",
    "_wait_for_writer": "save",
    "evaluate": "evaluation",
    "sample": "sampling",
    "get_batch_samples": "data",
    "training_step": "forward+backward",
}
ORDER = ["step", *dict.fromkeys(STAGES.values())]  # step: whatever else, as the update and callbacks
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


def stage_of(frames: list[FrameType]) -> str:
    """Return the stage that the innermost function of ours belongs to. frames: innermost first."""
    for frame in frames:
        name = frame.f_code.co_name
        if name in STAGES and frame.f_code.co_filename.startswith(PACKAGE):
            return STAGES[name]
    return "step"


def stack(frame: FrameType | None) -> list[FrameType]:
    """Return a running thread's frames, innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def raised_in(trace: TracebackType | None) -> list[FrameType]:
    """Return the frames that an error came through, innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def place_of(frames: list[FrameType]) -> dict[str, Any]:
    """Return the stage, whether the thread waits for other ranks, and the innermost line that is not a library's."""
    waits = any(frame.f_code.co_filename.endswith(COLLECTIVES) for frame in frames)
    own = next((frame for frame in frames if "site-packages" not in frame.f_code.co_filename), frames[0])
    line = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} {own.f_code.co_name}"
    return {"stage": stage_of(frames), "waits": waits, "line": line}


RESERVE = 1 << 24  # bytes for what a run takes beside its steps, such as the stacks of threads that start later


def out_of_memory(trainer: "TandemTrainer", error: BaseException) -> OutOfMemoryError:
    """Return the error for the user. The training is over: its gradients are dropped to try smaller micro-batches."""
    stage, step, recipe = stage_of(raised_in(error.__traceback__)), trainer.state.global_step, trainer.recipe
    what = f"memory ran out at step {step} in {stage} ({first_line(error)})"
    if stage == "evaluation":
        rows = recipe.evals.bpb.batch_rows or trainer.args.per_device_eval_batch_size
        return OutOfMemoryError(
            f"{recipe.where('evals.bpb.batch_rows')}: {what}, with {rows} rows at once. Set it to {max(1, rows // 2)} or lower; the scores stay the same."
        )
    if stage != "forward+backward":
        return OutOfMemoryError(
            f"{recipe.path}: {what}, where the size of the micro-batch does not matter. Take a smaller model, more processes or more memory."
        )
    traceback.clear_frames(error.__traceback__)  # which hold the activations
    micro_batch = trainer.args.per_device_train_batch_size
    begin = f"{recipe.where(KEY)}: {what}, with {micro_batch} rows of {trainer.rows.row_tokens} tokens"
    if trainer.is_sharded:  # nothing can be tried: a forward needs all ranks
        return OutOfMemoryError(
            f"{begin}. Set {KEY} to {max(1, micro_batch // 2)} or lower, or train.gradient_checkpointing: true; the global batch and the training "
            "stay the same."
        )
    fitting = fitting_micro_batch(trainer)
    if fitting is None:
        return OutOfMemoryError(
            f"{begin}, and no smaller number fits either. Set train.gradient_checkpointing: true, shorten data.row_tokens, or take a smaller model."
        )
    accumulation = ""
    if "gradient_accumulation_steps" in recipe.train:  # which would make another batch of a run that has not begun
        steps = trainer.args.gradient_accumulation_steps * micro_batch // fitting
        accumulation = f" and train.gradient_accumulation_steps to {steps}"
    return OutOfMemoryError(
        f"{begin}; {fitting} fit, as was just tried. Set {KEY} to {fitting}{accumulation}; the global batch and the training stay the same."
    )


def fitting_micro_batch(trainer: "TandemTrainer") -> int | None:
    """Return the largest divisor of the micro-batch, itself left out, of which two forward and backward passes fit; None: not even 1.

    A divisor, so that the rows of a step are dealt out as evenly as before.
    """
    micro_batch = trainer.args.per_device_train_batch_size
    for rows in range(micro_batch // 2, 0, -1):
        if micro_batch % rows == 0 and fits(trainer, rows, step=trainer.state.global_step, reserve=RESERVE):
            return rows
    return None


def fits(trainer: "TandemTrainer", rows: int, *, step: int, reserve: int = 0) -> bool:
    """Return whether forward, backward and the optimizer's state fit with that micro-batch, beside `reserve` bytes.

    On this rank alone, with its rows of the step, without DDP and not compiled: the other ranks wait in a collective. No
    gradient is left, and the random state does not move.
    """
    model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    model.zero_grad(set_to_none=True)
    _give_back()
    state = []
    try:
        # What the first update will take, where it was not made: two numbers a parameter are the most of ours.
        made = trainer.optimizer.state if trainer.optimizer is not None else {}
        unmade = [p for p in model.parameters() if p.requires_grad and not made.get(p)]
        state = [torch.empty_like(p) for p in unmade for _ in range(2)]
        state.append(torch.empty(reserve, dtype=torch.uint8, device=args.device))
        for micro_step in range(2):  # the second one has the gradients beside its activations
            batch = trainer.rows.micro_batch(
                step, micro_step, rank=args.process_index, world_size=args.world_size, rows=rows
            )
            batch = on_device(batch, args.device)
            with preserved_rng(), trainer.accelerator.autocast():  # which the model has itself once it is prepared
                loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(1.0, device=args.device))
            loss.backward()
            del loss, batch
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return False
    finally:
        state.clear()
        model.zero_grad(set_to_none=True)


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# What an error that ended the training means for the user: memory that ran out, or a rank that was lost.


@contextmanager
def explained_errors(trainer: "TandemTrainer") -> Iterator[None]:
    """Raise OutOfMemoryError or HangError in the place of the library's error; every other one goes its way."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            explained: Exception = out_of_memory(trainer, error)
        elif gone := trainer.ranks.found_gone():
            explained = trainer.ranks.lost(gone, trainer.run, step=trainer.state.global_step)
        elif trainer.ranks.on_other_hosts() and _is_of_connection(error):
            explained = HangError(
                f"{trainer.run.path}: the connection to another host broke at step {trainer.state.global_step} ({first_line(error)}). "
                "The last checkpoint is whole. Run the same command again to go on from it."
            )
        else:
            raise
        traceback.clear_frames(error.__traceback__)
        raise explained from error


def _is_of_connection(error: BaseException) -> bool:
    """Return whether a collective lost its peer: NCCL has a class for that, gloo its file's name in the text."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
