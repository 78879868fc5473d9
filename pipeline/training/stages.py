"""The stage in which a thread is, read from its Python frames: the training itself keeps no record of it."""

import traceback
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[1])


# Functions of ours by name, and the stage that they are, in the order in which a step that was made leads to the next
# one.
STAGES = {
    "save_checkpoint": "save",
    "_wait_for_writer": "save",
    "evaluate": "evaluation",
    "sample": "sampling",
    "get_batch_samples": "data",
    "training_step": "forward+backward",
}


ORDER = ["step", *dict.fromkeys(STAGES.values())]  # step: all else, as the update and callbacks


COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


def stage_of(frames: list[FrameType]) -> str:
    """Return the stage that the innermost function of ours belongs to. frames: innermost first."""
    for frame in frames:
        name = frame.f_code.co_name
        if name in STAGES and frame.f_code.co_filename.startswith(PACKAGE):
            return STAGES[name]
    return "step"


def place_of(running: FrameType) -> dict[str, Any]:
    """Return the stage of a running thread, whether it waits for other ranks, and the innermost line that is not a
    library's."""
    frames = [frame for frame, _ in traceback.walk_stack(running)]
    waits = any(frame.f_code.co_filename.endswith(COLLECTIVES) for frame in frames)
    own = next((frame for frame in frames if "site-packages" not in frame.f_code.co_filename), frames[0])
    line = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} {own.f_code.co_name}"
    return {"stage": stage_of(frames), "waits": waits, "line": line}
