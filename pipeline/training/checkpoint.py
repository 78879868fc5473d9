"""A checkpoint of a run: the model that from_pretrained loads, and all that an exact continuation needs. No pickle."""

import errno
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState

from pipeline.metrics import BEST_BY
from pipeline.model.saved import load_weights, read_tensors, saved_form, saved_weights
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import CannotWriteError, DataError, DiskFullError, HangError, TandemError
from pipeline.process.progress import waiting
from pipeline.process.storage import DISK_FULL, folder_bytes, raise_if_moved, read_json, temporary_folder
from pipeline.run_dir import checkpoints
from pipeline.run_dir.checkpoints import read_seal
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.guard import refuse_nonfinite
from pipeline.training.optimizer_state import Tensors, load_optimizer_state, optimizer_tensors
from pipeline.training.staging_buffer import StagingBuffer, layout_of

STATE = "trainer_state.json"
MODEL, OPTIMIZER, SCHEDULER, POSITION = "model.safetensors", "optimizer.safetensors", "scheduler.json", "position.json"


def large_files(weights: Tensors, optimizer: Tensors, *, model: str = MODEL) -> dict[str, tuple[Tensors, dict | None]]:
    """Return the tensors and metadata of each, as transformers writes them. model: the file of the weights."""
    return {model: (weights, {"format": "pt"}), OPTIMIZER: (optimizer, None)}


def rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


class ModelFiles:
    """Files that from_pretrained loads besides the weights: config, code, tokenizer. Made once: it never changes in a
    run."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.form: Any = None
        self.contents: dict[str, bytes] = {}
        self.weights_file = MODEL

    def write(self, model: Any, folder: Path) -> Tensors:
        """Write the files into the empty folder, and give the weights for model.safetensors."""
        self.write_small(model, folder)
        return self.weights(model)

    def write_small(self, model: Any, folder: Path) -> None:
        if not self.contents:  # transformers writes them once; afterwards they are copied
            if hasattr(model, "peft"):
                from pipeline.model.adapter import ADAPTER_WEIGHTS, write_adapter_config

                write_adapter_config(model, folder)
                self.weights_file = ADAPTER_WEIGHTS
            else:
                self.form = saved_form(model, folder, padded=True)
                self.form.save_pretrained(folder, state_dict={})
            self.tokenizer.save_pretrained(folder)
            self.contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        else:
            for name, content in self.contents.items():
                (folder / name).write_bytes(content)

    def weights(self, model: Any, part: Tensors | None = None) -> Tensors:
        """Return the weights as they are saved; of a sharded model this rank's part. part: of the model's own,
        whole."""
        if hasattr(model, "peft"):
            from pipeline.model.adapter import adapter_weights

            return adapter_weights(model)
        if self.form is None:
            self.form = saved_form(model, None, padded=True)
        return {name: tensor for name, tensor in saved_weights(self.form, model, part).items() if not tensor.is_meta}


def read_state(folder: Path) -> tuple[TrainerState, dict[str, Any]]:
    """Return trainer_state.json and position.json. Raises DataError where the checkpoint cannot be continued from."""
    # Of a sharded model each rank has written a part, and the index names the parts.
    index = f"{OPTIMIZER}.index.json"
    optimizer = index if (folder / index).exists() else OPTIMIZER
    missing = [name for name in (STATE, optimizer, SCHEDULER, POSITION) if not (folder / name).exists()]
    if missing:
        raise DataError(
            f"{folder}: {', '.join(missing)} missing, so the run cannot continue exactly. Use model.start_from to "
            "start a new run from its weights."
        )
    try:
        return TrainerState(**read_json(folder / STATE)), read_json(folder / POSITION)
    except TypeError as error:
        raise DataError(
            f"{folder / STATE}: is no state of a Trainer ({error}), so the run cannot continue exactly. Use "
            "model.start_from to start a new run from its weights."
        ) from None


ANOTHER = "Take an earlier checkpoint with run.resume=STEP."


def write_state(
    folder: Path,
    *,
    state: TrainerState,
    scheduler: dict[str, Any],
    rng: Sequence[Tensors],
    position: dict[str, Any],
) -> None:
    """Write all that an exact continuation needs except the tensors. rng: the random state of each rank."""
    state.save_to_json(str(folder / STATE))
    (folder / SCHEDULER).write_text(json.dumps(scheduler, indent=2))
    for rank, of_rank in enumerate(rng):
        save_file(of_rank, folder / rng_file(rank))
    (folder / POSITION).write_text(json.dumps(position, indent=2))


def load_model(model: PreTrainedModel, checkpoint: Path) -> None:
    """Raise DataError for weights of another model, or that are not finite."""
    try:
        load_weights(model, checkpoint)
    except ValueError as error:
        raise DataError(
            f"{error} The recipe describes another model than the checkpoint; give this run another name."
        ) from error
    refuse_nonfinite(model.state_dict(), where=str(checkpoint), instead=ANOTHER)


def load_optimizer(
    optimizer: Any, model: PreTrainedModel, checkpoint: Path, *, settings: list[dict[str, Any]] | None
) -> None:
    """Raise DataError for a state that is not this optimizer's, or not finite. settings: as load_optimizer_state takes
    them."""
    load_optimizer_state(optimizer, model, read_tensors(checkpoint, OPTIMIZER), settings=settings)
    # Of a sharded model a rank has read no more than its part by now.
    refuse_nonfinite(optimizer_tensors(optimizer, model), where=str(checkpoint), instead=ANOTHER)


def read_scheduler(checkpoint: Path) -> dict[str, Any]:
    """Return the states of the schedule and the fp16 scaler, and the optimizer's settings."""
    return read_json(checkpoint / SCHEDULER)


def read_rng(checkpoint: Path, rank: int) -> Tensors | None:
    """Return a rank's random state; None where the checkpoint is of fewer ranks."""
    file = checkpoint / rng_file(rank)
    return load_file(file) if file.exists() else None


def unlogged_losses(saved: dict[str, Any], *, step: int, rank: int, ranks: int) -> list[float | None]:
    """Return what a checkpoint of `step` keeps of a rank's losses since the last log; where it is of another number of
    ranks, their means."""
    losses = saved["losses"]  # by rank, then by step
    if "since" in saved:  # until November 2026 each rank's sum was kept
        num_steps = step - saved["since"]
        losses = [[loss / max(num_steps, 1)] * num_steps for loss in losses]
    if len(losses) == ranks:
        return losses[rank]
    means: list[float | None] = []
    for of_a_step in zip(*losses, strict=True):
        mean = None
        if None not in of_a_step:
            mean = sum(of_a_step) / len(of_a_step)
        means.append(mean)
    return means


class CheckpointSaver:
    """At most one checkpoint is being written; the next one, a stop and the end wait for it. Used on rank 0 only, but
    for a sharded model, of which every rank writes a part (training/sharding.py).

    keep, every: what `rotate` leaves; best: also the checkpoint with the lowest validation result.
    """

    def __init__(self, run: RunDirectory, *, keep: int | None, every: int | None, best: bool):
        self.run, self.keep, self.every, self.best = run, keep, every, best
        self.scores: dict[int, float] = {}
        if best:
            for row in last_attempts(read_rows(run.metrics)):
                self.add_score(row.get("step", 0), row)
        self.images: dict[str, StagingBuffer] = {}
        self.last_good: tuple[int, int] | None = None  # step and bytes of the newest whole checkpoint
        self.job: checkpoints.Job | None = None
        self.process: subprocess.Popen | None = None
        self.started = 0.0

    def add_score(self, step: int, metrics: dict[str, float]) -> None:
        """Remember the validation result of a step, where the metrics hold one."""
        scores = [metrics[name] for name in BEST_BY if name in metrics]  # the first one counts
        if self.best and scores:
            self.scores[step] = scores[0]

    def note_good(self, checkpoint: Path) -> None:
        """Record this whole checkpoint as the newest: from which a run that is killed now continues."""
        seal = read_seal(checkpoint)
        self.last_good = seal["step"], sum(file["bytes"] for file in seal["files"].values())

    def save(
        self, step: int, *, write_small: Callable[[Path], dict[str, tuple[Tensors, dict | None]]], **facts
    ) -> None:
        """Copy checkpoint-<step> and begin to write it. Waits for the one before; raises what made that one fail.

        write_small: writes the small files into a folder and gives the large ones, name -> (tensors, metadata).
        """
        opened = self._open(step, write_small)
        if opened is not None:
            self._begin(step, *opened, **facts)

    def _open(self, step: int, write_small: Callable[[Path], Any]) -> tuple[Path, Any] | None:
        """Return the folder that becomes checkpoint-<step>, with the small files, and what `write_small` gave; None
        where that is there."""
        self.wait()
        target = self.run.checkpoint(step)
        if target.exists():
            return None
        try:
            temporary = temporary_folder(target)
        except OSError as error:
            raise not_written(target, error) from error
        with discarded_after_an_error(target, temporary):
            return temporary, write_small(temporary)

    def _begin(
        self,
        step: int,
        temporary: Path,
        large: dict[str, tuple[Tensors, dict | None]],
        *,
        rank: int = 0,
        ranks: int = 1,
        **facts,
    ) -> None:
        # 1. The copies, after which the training may change its tensors.
        target = self.run.checkpoint(step)
        with discarded_after_an_error(target, temporary):
            for name, (tensors, metadata) in large.items():
                self._image(name, tensors, metadata).fill(tensors)
        # 2. The process that writes them, hashes them, and gives the folder its name when it is whole.
        self.job = checkpoints.Job(
            temporary=str(temporary),
            target=str(target),
            facts={"step": step, "run": self.run.name, **facts},
            images={name: (self.images[name].descriptor, self.images[name].bytes) for name in large},
            keep=self.keep,
            every=self.every,
            scores=self.scores,
            rank=rank,
            ranks=ranks,
        )
        self.started = time.perf_counter()
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        assert self.job is not None
        with discarded_after_an_error(Path(self.job.target), Path(self.job.temporary)):
            return checkpoints.start(self.job)  # an error: no memory, process or descriptor is left

    def _image(self, name: str, tensors: Tensors, metadata: dict | None) -> StagingBuffer:
        image = self.images.get(name)
        if image is not None and image.layout == layout_of(tensors):
            return image
        if image is not None:  # an optimizer gets its state at the first step
            image.close()
        self.images[name] = StagingBuffer(tensors, metadata=metadata)
        return self.images[name]

    def check(self) -> float | None:
        """Return seconds that the checkpoint took, once after it was written, on rank 0; else None. Does not wait;
        raises its failure."""
        if self.process is None or self.process.poll() is None:
            return None
        return self._end()

    def wait(self, *, patience_s: float = math.inf) -> float | None:
        """Wait for the writing, then do as `check`. patience_s: while nothing is written; then None too, and the
        process continues alone."""
        if self.process is None:
            return None
        with waiting("saving the checkpoint", after_s=1.0), suppress(subprocess.TimeoutExpired):
            return self._end(patience_s)
        return None

    def _end(self, patience_s: float = math.inf) -> float | None:
        assert self.process is not None
        assert self.job is not None
        target = Path(self.job.target)
        # 1. Wait. A writer that was killed, perhaps for memory, is started again: all that it was to write is here.
        stderr = self._wait_for_writer(self.process, patience_s)
        if self.process.returncode < 0 and not target.exists():
            self.process = self._start()
            stderr = self._wait_for_writer(self.process, patience_s)
        status = self.process.returncode
        self.process = None
        # 2. Report. Of a sharded model rank 0's process has the reports of the others.
        if self.job.rank and (status == 0 or target.exists()):
            return None
        if status > 0 and (not_deleted := checkpoints.not_rotated(stderr)):  # that fills the disk in time
            print(f"{target.parent}: older checkpoints could not be deleted: {not_deleted}", flush=True)
        elif status > 0 or not target.exists():
            raise failure(self.job, status, stderr)
        self.note_good(target)
        return time.perf_counter() - self.started

    def _wait_for_writer(self, process: subprocess.Popen, patience_s: float) -> bytes:
        """Return what the writer says at its end. While what it has written grows, a long wait for it is no hang."""
        assert self.job is not None
        written, since = 0, time.monotonic()
        while True:
            try:
                return process.communicate(timeout=1.0)[1]
            except subprocess.TimeoutExpired:
                with suppress(OSError):  # renamed meanwhile
                    now = folder_bytes(self.job.temporary)
                    if now != written:
                        written, since = now, time.monotonic()
                        beat()
                if time.monotonic() - since > patience_s:
                    raise


@contextmanager
def discarded_after_an_error(target: Path, temporary: Path) -> Iterator[None]:
    """Remove what there is of the checkpoint when the block fails, and raise an error of the disk as the user is to
    read it."""
    try:
        yield
    except BaseException as error:
        checkpoints.discard(temporary)
        if isinstance(error, OSError):
            raise not_written(target, error) from error
        raise


def failure(job: checkpoints.Job, status: int, stderr: bytes) -> Exception:
    """Return what the writer says of its end, as the exception that it would have been here."""
    if job.rank == 0:  # whose process still writes there, and has yet to read why another rank's ended
        checkpoints.discard(Path(job.temporary))
    try:
        error = checkpoints.last_words(stderr)
    except ValueError:
        text = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        kind = HangError if status < 0 else CannotWriteError  # killed: a next start may be spared
        return kind(
            f"{job.target}: the process that was to write it ended with status {status} ({text or 'without a word'}), "
            "so it does not exist. The checkpoints before it are whole: run the same command again."
        )
    if Path(job.target).exists():
        return CannotWriteError(
            f"{job.target}: {error['strerror']} while its name was being made safe, so a power cut may still take it; "
            "the checkpoints before it are whole. Fix that, then run the same command again."
        )
    return not_written(Path(job.target), OSError(error["errno"], error["strerror"], error["filename"]))


def not_written(target: Path, error: OSError) -> TandemError:
    """Return a checkpoint that the disk refused, for the user; or that the run directory was renamed or removed
    meanwhile."""
    try:
        raise_if_moved(target, after_error=error.errno in (errno.ENOENT, errno.ESTALE))
    except CannotWriteError as moved:
        return moved
    where = (
        f"{error.filename or target}: {error.strerror}, so {target.name} was not written; the checkpoints before it "
        "are whole."
    )
    if error.errno in DISK_FULL:
        return DiskFullError(
            f"{where} Free some space (or inodes) or move the run directory, then run the same command again."
        )
    cure = "Fix that"
    if error.errno == errno.ETIMEDOUT and error.filename == str(target):  # a host that wrote no part in time
        cure = "Look at that host"
    return CannotWriteError(f"{where} {cure}, then run the same command again.")
