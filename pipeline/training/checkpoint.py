"""A checkpoint of a run: its state gathered, written, verified and restored."""

import errno
import json
import math
import mmap
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import TrainerState

from pipeline.data.rows import IGNORED
from pipeline.hardware.processor import has_memory_files
from pipeline.metrics import BEST_BY
from pipeline.model.build import cut_like, load_weights, read_tensors, saved_form, saved_weights
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import CannotWriteError, DataError, DiskFullError, HangError, TandemError
from pipeline.process.progress import waiting
from pipeline.process.storage import DISK_FULL, folder_bytes, raise_if_moved, read_json, temporary_folder
from pipeline.run_dir import checkpoints
from pipeline.run_dir.checkpoints import read_seal
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import set_rng_state
from pipeline.training.guard import refuse_nonfinite

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer

# An optimizer's state as named tensors for safetensors, and back, for any torch optimizer. No pickle.

Tensors = dict[str, Tensor]

NO_STATE = "none"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def optimizer_tensors(optimizer: Any, model: torch.nn.Module) -> Tensors:
    """Return all state by name, not copied.

    model: the bare model whose parameters the optimizer updates. Raises TypeError for state that is neither a tensor
    nor a number.
    """
    tensors: Tensors = {}
    for parameter, name in named_members(optimizer, model):
        state = optimizer.state.get(parameter) or {NO_STATE: torch.empty(0)}
        for key, value in state.items():
            tensors[f"{name}/{key}"] = as_tensor(value, what=f"{name}/{key}")
    return tensors


def optimizer_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return rates, betas and the other settings of every group as they are now, without the parameters: JSON."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_optimizer_state(
    optimizer: Any, model: torch.nn.Module, tensors: Tensors, settings: list[dict[str, Any]] | None = None
) -> None:
    """Put the state of `optimizer_tensors` (copied) into an optimizer over the same parameters, whatever their order.

    settings: of `optimizer_settings`; without them the groups keep what they have, which suits a schedule that sets
    them from the step, or a fork with other rates. Raises DataError naming all parameters and states that are missing
    or extra.
    """
    members = named_members(optimizer, model)
    saved: dict[str, Tensors] = defaultdict(dict)
    for key, value in tensors.items():
        name, _, state = key.rpartition("/")
        saved[name][state] = value
    refuse_differences(optimizer, members, saved)
    plain = optimizer.state_dict()
    plain["state"] = {
        i: {key: as_state(value, parameter) for key, value in saved[name].items()}
        for i, (parameter, name) in enumerate(members)
        if NO_STATE not in saved[name]
    }
    if settings is not None:
        plain["param_groups"] = [
            now | {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in then.items()}
            for now, then in zip(plain["param_groups"], settings, strict=True)
        ]
    optimizer.load_state_dict(plain)


def named_members(optimizer: Any, model: torch.nn.Module) -> list[tuple[Tensor, str]]:
    """Return the optimizer's parameters in its own order, which is the numbering of its state_dict, with their
    names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def refuse_differences(optimizer: Any, members: list[tuple[Tensor, str]], saved: dict[str, Tensors]) -> None:
    names = {name for _, name in members}
    problems = [f"{name} is missing" for name in sorted(names - saved.keys())]
    problems += [f"{name} is not a parameter here" for name in sorted(saved.keys() - names)]
    name_of = {id(p): name for p, name in members}
    for group in optimizer.param_groups:
        # An update rule gives all parameters of one group and dimension the same states.
        states: dict[int, set[str]] = defaultdict(set)
        present = [(p, saved[name_of[id(p)]]) for p in group["params"] if name_of[id(p)] in saved]
        present = [(p, state) for p, state in present if NO_STATE not in state]
        for p, state in present:
            states[p.ndim] |= state.keys()
        for p, state in present:
            problems += [f"{name_of[id(p)]}/{key} is missing" for key in sorted(states[p.ndim] - state.keys())]
    if problems:
        raise DataError(
            f"optimizer state: {'; '.join(problems)}, so it is not the state of this model's optimizer and the run "
            "cannot go on exactly. Use the recipe that wrote it, or model.start_from to start a new run from the "
            "weights."
        )


def as_tensor(value: Any, *, what: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim == 0 and value.dtype in NUMBERS.values():
            raise TypeError(f"{what} is a {value.dtype} scalar tensor; it would come back as a Python number")
        return value.detach()
    if type(value) not in NUMBERS:
        raise TypeError(f"{what} is a {type(value).__name__}; only tensors and numbers can be kept without pickle")
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def as_state(value: Tensor, parameter: Tensor) -> Any:
    if value.ndim == 0:
        # Counters stay on the CPU; load_state_dict moves them where the update rule wants them on the device.
        return value.item() if value.dtype in NUMBERS.values() else value.clone()
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return cut_like(value, parameter)
    return value.to(parameter.device, copy=True)


# Bits per byte of the text that is trained on, from numbers that a step makes anyway.


class TrainedText:
    """Nats and bytes of this rank's trained targets since the last log, of text alone: as val/bpb counts them.

    The loss is a sum over all targets, BOS and control tokens among them. Their nats are taken off again: by the
    model's own nats per target, or by the logits of these few positions. Where they are is found before a batch leaves
    the host, so that nothing waits for the device. byte_lengths_V: (V,) raw bytes per id, 0 for specials; None where
    ids have no fixed bytes: then, and for a model that shows neither nats nor logits, there is no number.
    """

    def __init__(self, byte_lengths_V: np.ndarray | None, device: torch.device):
        self.byte_lengths_V = byte_lengths_V
        self.nats = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.bytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._before = self.nats.clone(), self.bytes

    def undo(self) -> None:
        """Forget the step that was made: its loss is not finite."""
        self.nats, self.bytes = self._before[0].clone(), self._before[1]

    def look(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Count the bytes of a micro-batch that is about to be trained on; gives where its special targets are."""
        if self.byte_lengths_V is None:
            return {}
        labels_N = batch["shift_labels"].numpy().ravel()
        lengths_N = np.where(labels_N == IGNORED, 0, self.byte_lengths_V[labels_N.clip(min=0)])
        self.bytes += int(lengths_N.sum())
        return {"special_targets": torch.from_numpy(np.flatnonzero((lengths_N == 0) & (labels_N != IGNORED)))}

    @torch.no_grad()
    def add(self, loss: torch.Tensor, outputs: Any, labels_BT: torch.Tensor, special: torch.Tensor) -> None:
        """Add a micro-batch. loss: the nats of all its targets. special: as look() found them."""
        if getattr(outputs, "nats", None) is not None:
            of_special = outputs.nats.flatten()[special].sum()
        elif getattr(outputs, "logits", None) is not None:
            logits = outputs.logits.flatten(0, 1)[special].float()
            of_special = F.cross_entropy(logits, labels_BT.flatten()[special], reduction="sum")
        else:
            self.byte_lengths_V = None
            return
        self.nats += loss.to(self.nats.dtype) - of_special

    def read(self) -> dict[str, float]:
        """Return this rank's sums since the last reading, for bits_per_byte."""
        if self.byte_lengths_V is None:
            return {}
        numbers = self.state()
        self.load([])
        return numbers

    def state(self) -> dict[str, float]:
        return {"nats": self.nats.item(), "bytes": self.bytes}

    def load(self, states: list[dict[str, float]]) -> None:
        """Take over these sums, which other ranks may have made: only the sum over all ranks counts."""
        self.nats.fill_(sum(state["nats"] for state in states))
        self.bytes = int(sum(state["bytes"] for state in states))
        self.begin()


def bits_per_byte(ranks: list[dict[str, float]]) -> float | None:
    """Return the figure over all ranks, from what each of them has read; None where no byte was trained on."""
    num_bytes = sum(rank.get("bytes", 0) for rank in ranks)
    return sum(rank["nats"] for rank in ranks) / (math.log(2) * num_bytes) if num_bytes else None


# A safetensors file in memory: training copies its tensors in and goes on, another process writes it to the disk.

# https://github.com/huggingface/safetensors#format
NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


class FileImage:
    """Bytes equal to what safetensors would write for tensors of these names, types and shapes.

    The memory is taken once and used for every checkpoint. It has no name, so that it is gone with the last process
    that has it open, and does not count against /dev/shm, which containers often limit to 64 MB.
    """

    def __init__(self, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None):
        self.layout = layout_of(tensors)
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        # The wider types first, then by name: then every tensor is aligned.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            size = tensors[name].numel() * tensors[name].element_size()
            dtype, shape = self.layout[name]
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.start = 8 + len(text)
        self.bytes = self.start + offset
        self.descriptor = unnamed_file()
        if hasattr(os, "posix_fallocate") and not has_memory_files():
            # A full disk is an error here, and a signal that kills in `fill`.
            os.posix_fallocate(self.descriptor, 0, self.bytes)
        os.ftruncate(self.descriptor, self.bytes)
        self.memory = mmap.mmap(self.descriptor, self.bytes)
        self.memory[: self.start] = len(text).to_bytes(8, "little") + text
        pin = any(tensor.is_cuda for tensor in tensors.values())
        self.pinned = PinnedMemory(self.memory) if pin else None
        self.views = {name: self._view(header[name]["data_offsets"], *self.layout[name]) for name in tensors}

    def _view(self, offsets: list[int], dtype: torch.dtype, shape: torch.Size) -> Tensor:
        if offsets[0] == offsets[1]:
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(
            self.memory, dtype=torch.uint8, offset=self.start + offsets[0], count=offsets[1] - offsets[0]
        )
        return data.view(dtype).view(shape)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors, of the same layout, from wherever they are. From CUDA all at once: the host waits at the
        end."""
        for name, view in self.views.items():
            view.copy_(tensors[name], non_blocking=self.pinned is not None)
        if self.pinned is not None:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back, once nobody reads the views any more."""
        if self.pinned is not None:
            self.pinned.close()
        os.close(self.descriptor)


class PinnedMemory:
    """Memory that CUDA copies to at full bandwidth; where the system refuses to lock it, it stays as it is."""

    def __init__(self, memory: mmap.mmap):
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = whole.data_ptr()
        portable = 1  # cudaHostRegisterPortable, as torch.distributed registers what it shares
        self.registered = int(torch.cuda.cudart().cudaHostRegister(self.address, whole.numel(), portable)) == 0
        if not self.registered:
            with suppress(RuntimeError):  # the refusal is remembered, and raised at the next kernel, whichever that is
                torch.zeros(1, device="cuda").add_(1)

    def close(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.registered = False


def layout_of(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def unnamed_file() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system has that."""
    with suppress(AttributeError, OSError):  # not on macOS; some sandboxes refuse the call
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# A checkpoint's files: the model that from_pretrained loads, and all that an exact continuation needs. No pickle.

STATE = "trainer_state.json"
MODEL, OPTIMIZER, SCHEDULER, POSITION = "model.safetensors", "optimizer.safetensors", "scheduler.json", "position.json"


def large_files(weights: Tensors, optimizer: Tensors) -> dict[str, tuple[Tensors, dict | None]]:
    """Return the tensors and metadata of each, as transformers writes them."""
    return {MODEL: (weights, {"format": "pt"}), OPTIMIZER: (optimizer, None)}


def rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


class ModelFiles:
    """Files that from_pretrained loads beside the weights: config, code, tokenizer. Made once: it never changes in a
    run."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.form: Any = None
        self.contents: dict[str, bytes] = {}

    def write(self, model: Any, folder: Path) -> Tensors:
        """Write the files into the empty folder, and give the weights for model.safetensors."""
        self.write_small(model, folder)
        return self.weights(model)

    def write_small(self, model: Any, folder: Path) -> None:
        if not self.contents:
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
        if self.form is None:
            self.form = saved_form(model, None, padded=True)
        return {name: tensor for name, tensor in saved_weights(self.form, model, part).items() if not tensor.is_meta}


def read_state(folder: Path) -> tuple[TrainerState, dict[str, Any]]:
    """Return trainer_state.json and position.json. Raises DataError where the checkpoint cannot be continued from."""
    index = f"{OPTIMIZER}.index.json"
    optimizer = index if (folder / index).exists() else OPTIMIZER
    missing = [name for name in (STATE, optimizer, SCHEDULER, POSITION) if not (folder / name).exists()]
    if missing:
        raise DataError(
            f"{folder}: {', '.join(missing)} missing, so the run cannot go on exactly. Use model.start_from to start "
            "a new run from its weights."
        )
    try:
        return TrainerState(**read_json(folder / STATE)), read_json(folder / POSITION)
    except TypeError as error:
        raise DataError(
            f"{folder / STATE}: is no state of a Trainer ({error}), so the run cannot go on exactly. Use "
            "model.start_from to start a new run from its weights."
        ) from None


# What of a Trainer goes into a checkpoint, and how it comes back.

ANOTHER = "Take an earlier checkpoint with run.resume=STEP."


def write_state(trainer: "TandemTrainer", folder: Path, *, ranks: list[tuple[dict, list, dict]]) -> None:
    """Write all files but the large ones. ranks: each one's random state, and what it has not logged: losses, and sums
    of TrainedText."""
    trainer.model_files.write_small(trainer.accelerator.unwrap_model(trainer.model), folder)
    state, scaler = trainer.state, trainer.accelerator.scaler
    state.save_to_json(str(folder / STATE))
    scheduler = {
        "schedule": trainer.lr_scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "optimizer": optimizer_settings(trainer.optimizer),
    }
    (folder / SCHEDULER).write_text(json.dumps(scheduler, indent=2))
    for rank, (rng, _, _) in enumerate(ranks):
        save_file(rng, folder / rng_file(rank))
    position = {
        "step": state.global_step,
        "rows": trainer.rows.position(state.global_step),
        "meter": trainer.meter.state_dict(),
        "unlogged": {
            "losses": [losses for _, losses, _ in ranks],
            "text": [text for _, _, text in ranks],
        },
        "guard": trainer.guard.state_dict(),
        "log_row": trainer.log_row.state_dict(),
    }
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


def load_optimizer_and_schedule(trainer: "TandemTrainer", checkpoint: Path) -> None:
    """Raise DataError for a state that is not this optimizer's."""
    tensors, saved = read_tensors(checkpoint, OPTIMIZER), read_json(checkpoint / SCHEDULER)
    # The groups' settings are the recipe's, but for transformers' schedules, whose current rate lives in the groups.
    settings = saved["optimizer"] if trainer.recipe.optimizer.type == "trainer" else None
    load_optimizer_state(trainer.optimizer, trainer.model, tensors, settings=settings)
    # Of a sharded model a rank has read no more than its part by now.
    refuse_nonfinite(optimizer_tensors(trainer.optimizer, trainer.model), where=str(checkpoint), instead=ANOTHER)
    trainer.lr_scheduler.load_state_dict(saved["schedule"])
    if saved["scaler"] and trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(saved["scaler"])


def unlogged_losses(saved: dict[str, Any], *, step: int, rank: int, ranks: int) -> list[float | None]:
    """Return what a checkpoint of `step` keeps of a rank's losses since the last log; where it was of another number
    of ranks, their means."""
    losses = saved["losses"]
    if "since" in saved:  # an earlier version kept each rank's sum
        steps = step - saved["since"]
        losses = [[loss / max(steps, 1)] * steps for loss in losses]
    if len(losses) == ranks:
        return losses[rank]
    return [None if None in of_a_step else sum(of_a_step) / len(losses) for of_a_step in zip(*losses, strict=True)]


class Restore(TrainerCallback):
    """Continues exactly from a checkpoint. The first callback: the others see the run as the checkpoint left it.

    Trainer.train is not given the checkpoint: it would look for files of its own, and for cadences of that start.
    """

    def __init__(self, trainer: "TandemTrainer"):
        self.trainer, self.start_step = trainer, 0
        self.checkpoint: Path | None = None
        self.rng: dict[str, Tensor] | None = None

    def read(self, checkpoint: Path) -> None:
        """Read where the training begins, before it does."""
        self.checkpoint, trainer = checkpoint, self.trainer
        self.saved, self.position = read_state(checkpoint)
        self.start_step = self.saved.global_step
        trainer.meter.load_state_dict(self.position["meter"])
        trainer.log_row.resume(trainer, checkpoint, self.position.get("log_row", {}))

    def on_train_begin(self, args, state, control, **kwargs):
        state.train_batch_size = args.per_device_train_batch_size  # found after Trainer noted it, where it was auto
        if self.checkpoint is None:
            return
        trainer, rank = self.trainer, args.process_index
        state.global_step, state.epoch = self.start_step, self.saved.epoch
        load_optimizer_and_schedule(trainer, self.checkpoint)
        # What was not logged: the next logged loss is then that of the uncut run.
        if unlogged := self.position.get("unlogged"):
            texts, same_ranks = unlogged.get("text", []), len(unlogged["losses"]) == args.world_size
            trainer.loss_sum.load(unlogged_losses(unlogged, step=self.start_step, rank=rank, ranks=args.world_size))
            trainer.text.load(texts[rank : rank + 1] if same_ranks else texts if rank == 0 else [])
        if guard := self.position.get("guard"):
            trainer.guard.load_state_dict(guard)
        file = self.checkpoint / rng_file(rank)
        self.rng = load_file(file) if file.exists() else None  # written by fewer ranks

    def on_step_begin(self, args, state, control, **kwargs):
        if self.rng is not None:  # only now: what the beginning of this start drew is not the training's
            set_rng_state(self.rng)
            self.rng = None


# Checkpoints on the disk without waiting for the disk: copied here, written by a process of its own.


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
        self.images: dict[str, FileImage] = {}
        self.last_good: tuple[int, int] | None = None  # step and bytes of the newest whole checkpoint
        self.job: checkpoints.Job | None = None
        self.process: subprocess.Popen | None = None
        self.started = 0.0

    def add_score(self, step: int, metrics: dict[str, float]) -> None:
        """Remember the validation result of a step, where the metrics hold one."""
        name = next((name for name in BEST_BY if name in metrics), None)
        if self.best and name is not None:
            self.scores[step] = metrics[name]

    def note_good(self, checkpoint: Path) -> None:
        """Record this whole checkpoint as the newest: where a run that is killed now goes on from."""
        seal = read_seal(checkpoint)
        self.last_good = seal["step"], sum(file["bytes"] for file in seal["files"].values())

    def save(
        self, step: int, *, write_small: Callable[[Path], dict[str, tuple[Tensors, dict | None]]], **facts
    ) -> None:
        """Copy checkpoint-<step> and begin to write it. Waits for the one before; raises what made that one fail.

        write_small: writes the small files into a folder and gives the large ones, name -> (tensors, metadata).
        """
        if (opened := self._open(step, write_small)) is not None:
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
        target = self.run.checkpoint(step)
        with discarded_after_an_error(target, temporary):
            for name, (tensors, metadata) in large.items():
                self._image(name, tensors, metadata).fill(tensors)
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

    def _image(self, name: str, tensors: Tensors, metadata: dict | None) -> FileImage:
        image = self.images.get(name)
        if image is None or image.layout != layout_of(tensors):  # an optimizer gets its state at the first step
            if image is not None:
                image.close()
            image = self.images[name] = FileImage(tensors, metadata=metadata)
        return image

    def check(self) -> float | None:
        """Return seconds that the checkpoint took, once after it was written, on rank 0; else None. Does not wait;
        raises its failure."""
        if self.process is None or self.process.poll() is None:
            return None
        return self._end()

    def wait(self, *, patience_s: float = math.inf) -> float | None:
        """Wait for the writing, then do as `check`. patience_s: while nothing is written; then None too, and the
        process goes on alone."""
        if self.process is None:
            return None
        with waiting("saving the checkpoint", after_s=1.0), suppress(subprocess.TimeoutExpired):
            return self._end(patience_s)
        return None

    def _end(self, patience_s: float = math.inf) -> float | None:
        assert self.process is not None
        assert self.job is not None
        stderr, target = self._wait_for_writer(self.process, patience_s), Path(self.job.target)
        status = self.process.returncode
        if status < 0 and not target.exists():  # killed, perhaps for memory; all that it was to write is here still
            self.process = self._start()
            stderr = self._wait_for_writer(self.process, patience_s)
            status = self.process.returncode
        self.process = None
        if self.job.rank and (status == 0 or target.exists()):
            return None  # rank 0's process has its report
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
                    if (now := folder_bytes(self.job.temporary)) != written:
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
        raise (not_written(target, error) if isinstance(error, OSError) else error) from error


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
            "the checkpoints before it are whole. Mend that, then run the same command again."
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
    cure = "Look at that host" if (error.errno, error.filename) == (errno.ETIMEDOUT, str(target)) else "Mend that"
    return CannotWriteError(f"{where} {cure}, then run the same command again.")
