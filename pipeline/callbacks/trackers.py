"""TensorBoard, Weights & Biases and Trackio, under the names of metrics.jsonl.

A tracker that fails is reported once and never stops a run.
"""

import html
import importlib.util
import netrc
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers import TrainerCallback

from pipeline.metrics import metric_of
from pipeline.process.errors import InputMissingError, TandemError
from pipeline.process.secrets import redact_output
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.rows import counts, read_rows
from pipeline.run_dir.run_directory import RunDirectory

EVERY_NUMBER = "metrics.jsonl has every number"
Row = dict[str, Any]  # numbers by name, or samples
PACKAGES = {"trackio": "trackio>=0.43,<1"}  # as the extra of pyproject.toml says
INIT_S = 20  # of W&B; then the run is kept offline
# Seconds that the end of a run waits for W&B to take the rest: few where a signal ends it, since the machine may be
# going away.
FINISH_S, FINISH_AFTER_SIGNAL_S = 30.0, 3.0
FLUSH_S = 10.0  # between two writings to Trackio's database
BATCH_ROWS = 1000


def print_stopped(tracker: str, error: BaseException, then: str) -> None:
    reason = str(error) or type(error).__name__
    print(f"{tracker} stopped taking numbers ({reason}); the run continues without it. {then}", flush=True)


class LocalTracker(TrainerCallback):
    """A tracker that writes files of its own. writer: None until the training begins, and again after an error."""

    name: str
    then = f"{EVERY_NUMBER}."
    writer: Any = None

    @contextmanager
    def stop_at_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of its files, of its packages: none of them is worth a training run
            self.writer = None
            print_stopped(self.name, error, self.then)


class TensorBoard(LocalTracker):
    """Writes events; after a restart the events of an earlier attempt beyond `start_step` are purged. Values are
    float32."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, start_step: int):
        self.folder, self.start_step = folder, start_step
        self.described: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with self.stop_at_an_error():
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder), purge_step=self.start_step + 1 if self.start_step else 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.writer is None or not logs:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for the row: add_scalar would make, queue and write one for each of its numbers.
        values = []
        for name, value in logs.items():
            if isinstance(value, (int, float)):
                values.append(Summary.Value(tag=name, simple_value=float(value), metadata=self._metadata(name)))
        with self.stop_at_an_error():
            self.writer.file_writer.add_summary(Summary(value=values), state.global_step)

    def _metadata(self, name: str) -> Any:
        """Return the description that TensorBoard shows with a chart, for the first number only; it keeps it."""
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        metric = None if name in self.described else metric_of(name)
        self.described.add(name)
        return metric and create_summary_metadata(display_name="", description=metric.description)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        """Add them as texts that are shown as they are: Markdown and HTML that a model wrote do nothing."""
        if self.writer is None:
            return
        parts = []
        for prompt, text in zip(prompts, texts, strict=True):
            parts.append(f"<pre>{html.escape(prompt)}</pre>\n\n<pre>{html.escape(text)}</pre>")
        with self.stop_at_an_error():
            self.writer.add_text("samples", "\n\n".join(parts), step)

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            with self.stop_at_an_error():
                self.writer.close()
            self.writer = None


class WandbRun(TrainerCallback):
    """One W&B run per run directory, continued by a restart (its id is kept in the manifest).

    Rows carry `step`, the axis of every chart, `attempt` and `tokens`. W&B's own counter only grows, and rows at or
    below it are dropped: those that a restart makes again after an unplanned end. A thread sends them: starting takes
    seconds, and a server that hangs takes as long as it likes.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        project: str,
        config: dict[str, Any],
        note: str | None,
        tags: list[str],
        attempt: int,
        tokens_at: Callable[[int], int],
    ):
        self.run, self.attempt, self.tokens_at = run, attempt, tokens_at
        self.settings = {"project": project, "config": config, "notes": note, "tags": tags}
        self.messages: queue.Queue[Row | None] = queue.Queue()
        self.sender: threading.Thread | None = None
        self.run_id = ""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        try:
            import wandb  # here, not in the thread: it patches the output streams
        except Exception as error:
            print(f"W&B cannot be used ({error}); the run continues without it. {EVERY_NUMBER}.", flush=True)
            return
        redact_output()
        self.run_id = self.run.read_manifest().get("wandb_id") or uuid.uuid4().hex[:8]
        self.run.update_manifest(wandb_id=self.run_id)
        # A daemon: a server that it waits for must not hold the process.
        self.sender = threading.Thread(target=self._send, args=(wandb,), name="wandb", daemon=True)
        self.sender.start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and self.sender is not None:
            self._put(logs, state.global_step)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        if self.sender is not None:
            rows = [[step, prompt, text] for prompt, text in zip(prompts, texts, strict=True)]
            self._put({"samples": rows}, step)

    def _put(self, values: Row, step: int) -> None:
        self.messages.put({**values, "step": step, "attempt": self.attempt, "tokens": self.tokens_at(step)})

    def on_train_end(self, args, state, control, **kwargs):
        if self.sender is None:
            return
        self.messages.put(None)
        wait_s = FINISH_S if state.global_step >= state.max_steps else FINISH_AFTER_SIGNAL_S
        self.sender.join(wait_s)
        if self.sender.is_alive():
            print(f"W&B did not take everything within {wait_s:.0f} s. {self._later()}", flush=True)

    def _send(self, wandb: Any) -> None:
        try:
            run = self._start(wandb)
            while (message := self.messages.get()) is not None:
                if "samples" in message:
                    message["samples"] = wandb.Table(columns=["step", "prompt", "text"], data=message["samples"])
                run.log(message)
            run.finish()
        except Exception as error:  # wandb raises many kinds; none of them is worth a training run
            print_stopped("W&B", error, self._later())

    def _start(self, wandb: Any) -> Any:
        """Return the W&B run, offline when the server does not take it: its files can be sent later."""
        try:
            run = self._init(wandb, self.run_id, mode=None)
        except Exception as error:
            print(f"W&B could not start ({error}); the run is kept offline. {self._later()}", flush=True)
            # Another id: W&B's service still holds the first one, and asks the server before it gives it up.
            run = self._init(wandb, uuid.uuid4().hex[:8], mode="offline")
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, wandb: Any, run_id: str, *, mode: str | None) -> Any:
        return wandb.init(
            name=self.run.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(self.run.path),
            settings=wandb.Settings(init_timeout=INIT_S, login_timeout=INIT_S),
            **self.settings,
        )

    def _later(self) -> str:
        folder = Path(self.run.path) / "wandb"
        return f"{EVERY_NUMBER}; send W&B's later with: wandb sync --include-online --id {self.run_id} {folder}/*run-*"


class TrackioRun(LocalTracker):
    """Writes the run into trackio/, a Trackio database of its own, without a server and without the network.

    Each start writes the rows that count anew, under the run's name: those beyond the step that it continues from are
    gone. Trackio's storage is called and not `trackio.init`, which asks the Hub who is logged in and swallows errors.
    """

    name = "Trackio"
    then = f"{EVERY_NUMBER}; the next start writes them all."

    def __init__(
        self,
        run: RunDirectory,
        *,
        project: str,
        config: dict[str, Any],
        attempt: int,
        tokens_at: Callable[[int], int],
    ):
        self.run, self.project, self.config = run, project, config
        self.attempt, self.tokens_at = attempt, tokens_at
        self.rows: list[Row] = []  # that are not written yet
        self.flushed_at = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        with self.stop_at_an_error():
            for name in ("TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID"):  # from which it would fill the folder first
                os.environ.pop(name, None)
            os.environ["TRACKIO_DIR"] = str(self.run.trackio)  # read when it is imported
            from trackio.sqlite_storage import SQLiteStorage

            self.writer = SQLiteStorage
            self.writer.validate_project_name(self.project)
            self.writer.delete_run(self.project, self.run.name)
            self.rows = self._recorded()
            self._flush()

    def _recorded(self) -> list[Row]:
        """Return the rows of earlier attempts that count, the samples of a step as one table."""
        recorded = read_rows(self.run.metrics)
        attempts = [row for row in recorded if row.get("event") == "attempt"]
        rows = [row for row in recorded if "event" not in row and counts(row, attempts)]
        tables: dict[int, Row] = {}
        for row in read_rows(self.run.samples):
            if counts(row, attempts):
                table = tables.setdefault(row["step"], {"step": row["step"], "time": row["time"], "samples": []})
                table["samples"].append({"prompt": row["prompt"], "text": row["text"]})
        return rows + list(tables.values())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs:
            self._add(state.global_step, logs)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        table = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        self._add(step, {"samples": table})

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            with self.stop_at_an_error():
                self._flush()
            self.writer = None

    def _add(self, step: int, values: Row) -> None:
        if self.writer is None:
            return
        stamp = {"step": step, "attempt": self.attempt, "time": time.time(), "tokens": self.tokens_at(step)}
        self.rows.append(stamp | values)
        if time.monotonic() - self.flushed_at >= FLUSH_S:
            with self.stop_at_an_error():
                self._flush()

    def _flush(self) -> None:
        from trackio import Table

        for start in range(0, len(self.rows), BATCH_ROWS):
            batch = self.rows[start : start + BATCH_ROWS]
            values = []
            for row in batch:
                numbers = {name: value for name, value in row.items() if name not in ("step", "time")}
                if "samples" in row:
                    numbers["samples"] = {"_type": Table.TYPE, "_value": row["samples"]}
                values.append(numbers)
            self.writer.bulk_log(
                project=self.project,
                run=self.run.name,
                metrics_list=values,
                steps=[row["step"] for row in batch],
                timestamps=[datetime.fromtimestamp(row["time"], UTC).isoformat() for row in batch],
                config=self.config,
            )
        self.rows = []
        self.flushed_at = time.monotonic()


def trackers_of(
    monitor: Monitor,
    run: RunDirectory,
    *,
    config: dict[str, Any],
    note: str | None,
    tags: list[str],
    attempt: int,
    start_step: int,
    tokens_at: Callable[[int], int],
) -> list[TrainerCallback]:
    """Return the callbacks of monitor.trackers. config: the whole recipe; note, tags: of the run. One with add_samples
    gets the samples too."""
    made: list[TrainerCallback] = []
    shared: dict[str, Any] = {"project": monitor.project, "config": config, "attempt": attempt, "tokens_at": tokens_at}
    if "tensorboard" in monitor.trackers:
        made.append(TensorBoard(run.tensorboard, start_step=start_step))
    if "wandb" in monitor.trackers:
        made.append(WandbRun(run, note=note, tags=tags, **shared))
    if "trackio" in monitor.trackers:
        made.append(TrackioRun(run, **shared))
    return made


def tracker_findings(trackers: list[Any], *, where: str, has_trained: bool) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes) before step 1: a tracker whose package is missing, and W&B where nobody is logged in.

    where: of monitor.trackers, for messages. has_trained: then a missing package is a note, since the run may continue.
    """
    missing = []
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            package = PACKAGES.get(name, name)
            missing.append(
                f"{where}: {name} is not installed, so it would get no numbers. Install it (pip install '{package}'), "
                "or remove it from the list."
            )
    notes = []
    if "wandb" in trackers and not _wandb_can_log_in():
        notes.append(
            f"{where}: nobody is logged in to W&B, so it will get no numbers; metrics.jsonl has them all. Set "
            "WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline to upload them later."
        )
    if has_trained:
        return [], missing + notes
    return [InputMissingError(text) for text in missing], notes


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_MODE", "online").lower() != "online" or os.environ.get("WANDB_DISABLED"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        # Named, so that Python's parser does not refuse it for its permissions, which wandb does not look at.
        return netrc.netrc(os.environ.get("NETRC") or str(Path.home() / ".netrc")).authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (OSError, netrc.NetrcParseError):  # Python's parser refuses files that wandb reads
        return True
