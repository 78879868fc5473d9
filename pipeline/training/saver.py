"""Checkpoints on the disk without waiting for the disk: copied here, written by a process of its own."""

import errno
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from pipeline.artifacts import checkpoint_writer
from pipeline.artifacts.atomic import temporary_folder
from pipeline.artifacts.checkpoints import read_seal
from pipeline.artifacts.errors import CannotWriteError, DiskFullError, TandemError
from pipeline.artifacts.rows import last_attempts, read_rows
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.monitor.heartbeat import beat
from pipeline.training.file_image import FileImage, layout_of

Tensors = dict[str, Tensor]


# The validation result that makes a checkpoint the best one: the first that the stage has; lower is better.
BEST_BY = ("val/bpb", "sft/assistant_bpb", "val/loss")


class CheckpointSaver:
    """At most one checkpoint is being written; the next one, a stop and the end wait for it. Used on rank 0 only.

    keep, every: what `rotate` leaves; best: also the checkpoint with the lowest validation result.
    """

    def __init__(self, run: RunDirectory, *, keep: int | None, every: int | None, best: bool):
        self.run, self.keep, self.every, self.best = run, keep, every, best
        self.scores: dict[int, float] = {}
        if best:
            for row in last_attempts(read_rows(run.metrics)):
                self.add_score(row.get("step", 0), row)
        self.images: dict[str, FileImage] = {}
        self.last_good: tuple[int, int] | None = None  # step and bytes of the newest whole checkpoint
        self.job: checkpoint_writer.Job | None = None
        self.process: subprocess.Popen | None = None
        self.started = 0.0

    def add_score(self, step: int, metrics: dict[str, float]) -> None:
        """Remember the validation result of a step, where the metrics hold one."""
        name = next((name for name in BEST_BY if name in metrics), None)
        if self.best and name is not None:
            self.scores[step] = metrics[name]

    def note_good(self, checkpoint: Path) -> None:
        """This whole one is the newest: where a run that is killed now goes on from."""
        seal = read_seal(checkpoint)
        self.last_good = seal["step"], sum(file["bytes"] for file in seal["files"].values())

    def save(
        self, step: int, *, write_small: Callable[[Path], dict[str, tuple[Tensors, dict | None]]], **facts
    ) -> None:
        """Copy checkpoint-<step> and begin to write it. Waits for the one before; raises what made that one fail.

        write_small: writes the small files into a folder and gives the large ones, name -> (tensors, metadata).
        """
        self.wait()
        target = self.run.checkpoint(step)
        if target.exists():
            return
        try:
            temporary = temporary_folder(target)
        except OSError as error:
            raise not_written(target, error) from error
        try:
            large = write_small(temporary)
            for name, (tensors, metadata) in large.items():
                self._image(name, tensors, metadata).fill(tensors)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise (not_written(target, error) if isinstance(error, OSError) else error) from error
        self.job = checkpoint_writer.Job(
            temporary=str(temporary),
            target=str(target),
            facts={"step": step, "run": self.run.name, **facts},
            images={name: (self.images[name].descriptor, self.images[name].bytes) for name in large},
            keep=self.keep,
            every=self.every,
            scores=self.scores,
        )
        self.started = time.perf_counter()
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        assert self.job is not None
        try:
            return checkpoint_writer.start(self.job)
        except OSError as error:  # no memory, process or descriptor is left
            shutil.rmtree(self.job.temporary, ignore_errors=True)
            raise not_written(Path(self.job.target), error) from error

    def _image(self, name: str, tensors: Tensors, metadata: dict | None) -> FileImage:
        image = self.images.get(name)
        if image is None or image.layout != layout_of(tensors):  # an optimizer gets its state at the first step
            if image is not None:
                image.close()
            image = self.images[name] = FileImage(tensors, metadata=metadata)
        return image

    def check(self) -> float | None:
        """Seconds that the checkpoint took, once after it was written; None before. Does not wait; raises its failure."""
        if self.process is None or self.process.poll() is None:
            return None
        return self._end()

    def wait(self) -> float | None:
        """As `check`, after waiting for it."""
        return None if self.process is None else self._end()

    def _end(self) -> float:
        assert self.process is not None
        assert self.job is not None
        told, target = self._wait_for_writer(self.process), Path(self.job.target)
        status = self.process.returncode
        if status < 0 and not target.exists():  # killed, perhaps for memory; all that it was to write is here still
            self.process = self._start()
            told = self._wait_for_writer(self.process)
            status = self.process.returncode
        self.process = None
        if status > 0 and (not_deleted := checkpoint_writer.not_rotated(told)):  # that fills the disk in time
            print(f"{target.parent}: older checkpoints could not be deleted: {not_deleted}", flush=True)
        elif status > 0 or not target.exists():
            raise failure(self.job, status, told)
        self.note_good(target)
        return time.perf_counter() - self.started

    def _wait_for_writer(self, process: subprocess.Popen) -> bytes:
        """What the writer says at its end. While what it has written grows, a long wait for it is no hang."""
        assert self.job is not None
        written = 0
        while True:
            try:
                return process.communicate(timeout=1.0)[1]
            except subprocess.TimeoutExpired:
                with suppress(OSError):  # renamed meanwhile
                    now = sum(path.stat().st_size for path in Path(self.job.temporary).iterdir())
                    if now != written:
                        written = now
                        beat()


def failure(job: checkpoint_writer.Job, status: int, told: bytes) -> Exception:
    """What the writer says of its end, as the exception that it would have been here."""
    shutil.rmtree(job.temporary, ignore_errors=True)
    try:
        error = checkpoint_writer.last_words(told)
    except ValueError:
        text = told.decode(errors="replace").strip().rpartition("\n")[2]
        return CannotWriteError(
            f"{job.target}: the process that was to write it ended with status {status} ({text or 'without a word'}), so it does not exist. "
            "The checkpoints before it are whole: run the same command again."
        )
    if Path(job.target).exists():
        return CannotWriteError(
            f"{job.target}: {error['strerror']} while its name was being made safe, so a power cut may still take it; the checkpoints before it "
            "are whole. Mend that, then run the same command again."
        )
    return not_written(Path(job.target), OSError(error["errno"], error["strerror"], error["filename"]))


def not_written(target: Path, error: OSError) -> TandemError:
    """A checkpoint that the disk refused, for the user."""
    where = f"{error.filename or target}: {error.strerror}, so {target.name} was not written; the checkpoints before it are whole."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{where} Free some space (or inodes) or move the run directory, then run the same command again."
        )
    return CannotWriteError(f"{where} Mend that, then run the same command again.")
