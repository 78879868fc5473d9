"""TensorBoard, Weights & Biases and Trackio."""

import dataclasses
import html
import importlib.util
import netrc
import os
import queue
import re
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers import TrainerCallback

from pipeline.metrics import metric_of
from pipeline.process import commands
from pipeline.process.errors import InputMissingError, TandemError
from pipeline.process.secrets import known_secrets, redact_output
from pipeline.recipe import Recipe
from pipeline.run_dir.run_directory import RunDirectory

TRACKIO_WRITER = Path(__file__).with_name("trackio_writer.py")  # a process of its own
EVERY_NUMBER = "metrics.jsonl has every number"


def say_stopped(tracker: str, reason: str, then: str = f"{EVERY_NUMBER}.") -> None:
    print(f"{tracker} stopped taking numbers ({reason}); the run goes on without it. {then}", flush=True)


# TensorBoard under the same names as metrics.jsonl; what fails in it is reported once and never stops a run.


class TensorBoard(TrainerCallback):
    """Writes events; after a restart what an earlier attempt wrote beyond `start_step` is purged. Values are
    float32."""

    def __init__(self, folder: Path, *, start_step: int):
        self.folder, self.start_step = folder, start_step
        self.writer: Any = None
        self.described: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with self._warn_once():
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder), purge_step=self.start_step + 1 if self.start_step else 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for the row: add_scalar would make, queue and write one for each of its numbers.
            values = [
                Summary.Value(tag=name, simple_value=float(value), metadata=self._metadata(name))
                for name, value in (logs or {}).items()
                if isinstance(value, (int, float))
            ]
            with self._warn_once():
                self.writer.file_writer.add_summary(Summary(value=values), state.global_step)

    def _metadata(self, name: str) -> Any:
        """Return what TensorBoard shows of a metric beside its chart, with its first number only; it keeps it."""
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        metric = None if name in self.described else metric_of(name)
        self.described.add(name)
        return metric and create_summary_metadata(display_name="", description=metric.description)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        """Add them as a table of texts, shown as they are: Markdown and HTML that a model wrote do nothing."""
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.plugins.text.metadata import create_summary_metadata

            cells = ["prompt", "text"]
            for prompt, text in zip(prompts, texts, strict=True):
                cells += [f"<pre>{html.escape(prompt)}</pre>", f"<pre>{html.escape(text)}</pre>"]
            table = TensorProto(
                dtype="DT_STRING",
                string_val=[cell.encode() for cell in cells],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in (len(cells) // 2, 2)]),
            )
            metadata = create_summary_metadata(display_name="samples", description="")
            with self._warn_once():
                self.writer.file_writer.add_summary(
                    Summary(value=[Summary.Value(tag="samples", metadata=metadata, tensor=table)]), step
                )

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            with self._warn_once():
                self.writer.close()
            self.writer = None

    @contextmanager
    def _warn_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of its files, of its packages: none of them is worth a training run
            self.writer = None
            say_stopped("TensorBoard", str(error) or type(error).__name__)


# Weights & Biases under the same names as metrics.jsonl; a tracker that fails is reported once and never stops a
# run.

INIT_S = 20  # then the run is kept offline
# What the end of a run waits for a tracker to take the rest: little where a signal ends it, since the machine may be
# going away.
FINISH_S, FINISH_AFTER_SIGNAL_S = 30.0, 3.0


def finish_s(state: Any) -> float:
    return FINISH_S if state.global_step >= state.max_steps else FINISH_AFTER_SIGNAL_S


class Table(list):
    """Rows of step, prompt and text on their way to W&B."""

    def shown(self, wandb: Any) -> Any:
        return wandb.Table(columns=["step", "prompt", "text"], data=list(self))


class WandbRun(TrainerCallback):
    """One W&B run per run directory, continued by a restart (its id is kept in the manifest).

    Rows carry `step`, the axis of every chart, `attempt` and `tokens`. W&B's own counter only grows, and rows at or
    below it are dropped: those that a restart makes again after an unplanned end. A thread does the talking: starting
    takes seconds, and a server that hangs takes as long as it likes.
    """

    def __init__(self, run: RunDirectory, recipe: Recipe, *, attempt: int, tokens_at: Callable[[int], int]):
        self.run, self.recipe, self.attempt, self.tokens_at = run, recipe, attempt, tokens_at
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.sender: threading.Thread | None = None
        self.run_id = ""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        try:
            import wandb  # here, not in the thread: it patches the output streams
        except Exception as error:
            print(f"W&B cannot be used ({error}); the run goes on without it. {EVERY_NUMBER}.", flush=True)
            return
        redact_output()
        self.run_id = self.run.read_manifest().get("wandb_id") or uuid.uuid4().hex[:8]
        self.run.update_manifest(wandb_id=self.run_id)
        # A daemon: what it waits for must not hold the process.
        self.sender = threading.Thread(target=self._send, args=(wandb,), name="wandb", daemon=True)
        self.sender.start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and self.sender is not None:
            self._put(logs, state.global_step)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        rows = [[step, prompt, text] for prompt, text in zip(prompts, texts, strict=True)]
        if self.sender is not None:
            self._put({"samples": Table(rows)}, step)

    def _put(self, values: dict[str, Any], step: int) -> None:
        stamp = {"step": step, "attempt": self.attempt, "tokens": self.tokens_at(step)}
        self.messages.put({**values, **stamp})

    def on_train_end(self, args, state, control, **kwargs):
        if self.sender is None:
            return
        self.messages.put(None)
        wait_s = finish_s(state)
        self.sender.join(wait_s)
        if self.sender.is_alive():
            print(f"W&B did not take everything within {wait_s:.0f} s. {self._later()}", flush=True)

    def _send(self, wandb: Any) -> None:
        try:
            run = self._start(wandb)
            while (message := self.messages.get()) is not None:
                run.log(
                    {
                        name: value.shown(wandb) if isinstance(value, Table) else value
                        for name, value in message.items()
                    }
                )
            run.finish()
        except Exception as error:  # wandb raises many kinds; none of them is worth a training run
            say_stopped("W&B", str(error) or type(error).__name__, self._later())

    def _start(self, wandb: Any) -> Any:
        """Return the W&B run, offline when the server does not take it: its files can be sent later."""
        try:
            run = self._init(wandb, self.run_id, mode=None)
        except Exception as error:
            print(f"W&B could not start ({error}); the run is kept offline. {self._later()}", flush=True)
            # Another id: W&B's service still holds the first one, and letting go of it asks the server.
            run = self._init(wandb, uuid.uuid4().hex[:8], mode="offline")
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, wandb: Any, run_id: str, *, mode: str | None) -> Any:
        return wandb.init(
            project=self.recipe.monitor.project,
            name=self.run.name,
            id=run_id,
            resume="allow",
            mode=mode,
            config=dataclasses.asdict(self.recipe),
            notes=self.recipe.run.note,
            tags=self.recipe.run.tags,
            dir=str(self.run.path),
            settings=wandb.Settings(init_timeout=INIT_S, login_timeout=INIT_S),
        )

    def _later(self) -> str:
        folder = Path(self.run.path) / "wandb"
        return f"{EVERY_NUMBER}; send W&B's later with: wandb sync --include-online --id {self.run_id} {folder}/*run-*"


# Trackio under the same names as metrics.jsonl: a process of its own copies the run's files into its database.


class TrackioRun(TrainerCallback):
    """Starts trackio_writer.py beside the training, which hands it nothing: no row waits for Trackio.

    It sees no token, and writes the last rows in any case: it ends by itself once its input has, with the training.
    """

    def __init__(self, run: RunDirectory):
        self.run = run
        self.process: subprocess.Popen | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        secret = {where.rpartition("$")[2] for where in known_secrets()}
        environment = {name: value for name, value in commands.environment().items() if name not in secret}
        try:
            self.process = commands.start(TRACKIO_WRITER, self.run.path, "--follow", env=environment)
        except OSError as error:
            self._warn(str(error))

    def on_log(self, args, state, control, **kwargs):
        if self.process is not None and self.process.poll() is not None:
            self._end(None)

    def on_train_end(self, args, state, control, **kwargs):
        if self.process is not None:
            self._end(finish_s(state))

    def _end(self, wait_s: float | None) -> None:
        process: Any = self.process
        self.process = None
        try:
            _, stderr = process.communicate(timeout=wait_s)  # which closes its input
        except subprocess.TimeoutExpired:
            print(f"Trackio did not take everything within {wait_s:.0f} s; process {process.pid} goes on.", flush=True)
            return
        if process.returncode:
            self._warn(stderr.decode(errors="replace").strip().split("\n")[-1] or f"status {process.returncode}")

    def _warn(self, reason: str) -> None:
        later = f"write them all to Trackio with: python -m pipeline.callbacks.trackio_writer {self.run.path}"
        say_stopped("Trackio", reason, f"{EVERY_NUMBER}; {later}")


def trackers_of(
    recipe: Recipe, run: RunDirectory, *, attempt: int, start_step: int, tokens_at: Callable[[int], int]
) -> list[TrainerCallback]:
    """Return the callbacks of monitor.trackers, whose names recipe/schema.py allows. One with add_samples gets the
    samples too."""
    make: dict[str, Callable[[], TrainerCallback]] = {
        "tensorboard": lambda: TensorBoard(run.tensorboard, start_step=start_step),
        "wandb": lambda: WandbRun(run, recipe, attempt=attempt, tokens_at=tokens_at),
        "trackio": lambda: TrackioRun(run),  # reads the files of the run itself
    }
    return [make[name]() for name in make if name in recipe.monitor.trackers]


# Before step 1: whether trackers are installed, and W&B knows who is writing.

PACKAGES = {"trackio": "trackio>=0.43,<1"}  # as the extra of pyproject.toml says


def tracker_findings(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes): a tracker whose package is missing, and W&B where nobody is logged in."""
    missing = [name for name in recipe.monitor.trackers if importlib.util.find_spec(name) is None]
    messages = [
        f"{recipe.where('monitor.trackers')}: {name} is asked for and its package is not installed, so it would get "
        f"no numbers. Install it (pip install '{PACKAGES.get(name, name)}'), or remove it from the list."
        for name in missing
    ]
    if RunDirectory.of(recipe.run).has_trained():
        return [], [*(f"{text} The run has trained and goes on." for text in messages), *_wandb(recipe)]
    return [InputMissingError(text) for text in messages], _wandb(recipe)


def _wandb(recipe: Recipe) -> list[str]:
    if "wandb" not in recipe.monitor.trackers or _wandb_can_log_in():
        return []
    return [
        f"{recipe.where('monitor.trackers')}: W&B is asked for and nobody is logged in, so it will get no numbers; "
        "metrics.jsonl has them all. Set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline to upload them "
        "later."
    ]


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_MODE", "online").lower() != "online" or os.environ.get("WANDB_DISABLED"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    given = os.environ.get("NETRC")
    files = [Path(given)] if given else [Path.home() / name for name in (".netrc", "_netrc")]
    return any(_names(file, host) for file in files)


def _names(file: Path, host: str) -> bool:
    try:
        return host in netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        # wandb reads a file that Python's parser refuses (its permissions, another line): what counts is the machine.
        try:
            return re.search(rf"\bmachine\s+{re.escape(host)}\b", file.read_text(errors="replace")) is not None
        except OSError:
            return False
