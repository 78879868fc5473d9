"""The run directory: the only place that knows its file names. docs/manifest.md has every key of run_manifest.json."""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import filelock

from pipeline.process.errors import CannotWriteError, DamagedFileError
from pipeline.process.storage import (
    is_locked,
    keep_in_place,
    lock,
    move_folder,
    note_once,
    read_json,
    release_places,
    remove_file,
    write_json,
)
from pipeline.run_dir.checkpoints import (
    SEAL,
    by_step,
    clean,
    has_whole_model,
    problems,
    quarantined,
    read_seal,
    step_of,
    take_lock,
)
from pipeline.run_dir.rows import append_row, last_attempts, read_rows

SWEEP_TAG = "sweep:"  # begins the label (run.tags) of a sweep's runs, whose values were only tried


class RunDirectory:
    """Paths of one run, its manifest, and the lock that keeps a second process out."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.manifest = self.path / "run_manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.console = self.path / "console.log"
        self.failure = self.path / "failure.json"
        self.lock = self.path / ".lock"
        self.checkpoints = self.path / "checkpoints"
        self.quarantine = self.path / "quarantine"
        self.model = self.path / "model"
        self.report = self.path / "report"
        self.evals = self.report / "evals.json"
        self.contamination = self.report / "contamination.json"
        self.tensorboard = self.path / "tensorboard"
        self.trackio = self.path / "trackio"
        self.profile = self.path / "profile"
        self.hub_queue = self.path / "hub_queue"

    @classmethod
    def of(cls, run: Any) -> "RunDirectory":
        """Return the directory that the recipe's section `run` names, which need not be there."""
        return cls(Path(run.directory) / str(run.name))

    @property
    def name(self) -> str:
        return self.path.name

    def records(self) -> list[Path]:
        """Return what a run writes apart from its model; in a repository of the Hub these are at the root, under the same
        names."""
        report = [self.report / name for name in ("report.md", "report.html", "curves.png")]
        return [self.recipe, self.manifest, self.metrics, self.samples, self.evals, self.contamination, *report]

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"

    def gpu_samples(self, host: str) -> Path:
        return self.path / f"gpu-{host}.csv"

    def all_gpu_samples(self) -> list[Path]:
        return sorted(self.path.glob("gpu-*.csv"))

    def profile_trace(self, first: int, last: int) -> Path:
        return self.profile / f"steps-{first}-{last}.json"

    def has_trained(self) -> bool:
        """Return whether a step was made: else an earlier start failed before it, and nothing holds the run to its
        recipe yet."""
        if by_step(self.checkpoints):
            return True
        return any("event" not in row and row.get("step", 0) > 0 for row in read_rows(self.metrics))

    def has_saved(self) -> bool:
        """Return whether a checkpoint was once whole here, by what is in quarantine/ or by the metrics' rows of
        saves."""
        if by_step(self.quarantine):
            return True
        return any("ckpt/write_s" in row for row in last_attempts(read_rows(self.metrics)))

    def newest_whole_model(self) -> Path | None:
        """Return model/ or the newest checkpoint, of quarantine/ too, whose model is undamaged: it can start another
        run."""
        # A checkpoint with a damaged optimizer lies in quarantine and has a whole model.
        aside = [folder for folder in self.quarantine.glob("*") if (folder / SEAL).is_file()]
        folders = [self.model, *sorted([*by_step(self.checkpoints), *aside], key=_sealed_step, reverse=True)]
        return next((folder for folder in folders if has_whole_model(folder)), None)

    def start_anew(self) -> None:
        """Move what earlier attempts left in quarantine/ below another folder: none of it is progress any
        more."""
        left = [path for path in self.quarantine.glob("*") if not path.name.startswith("before-")]
        if left:
            number = len(list(self.quarantine.glob("before-*"))) + 1
            (self.quarantine / f"before-{number}").mkdir()
            for path in left:
                move_folder(path, self.quarantine / f"before-{number}" / path.name)

    def whole_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, for a reader: the run may be training, and it alone sets damaged ones
        aside."""
        return next((folder for folder in reversed(by_step(self.checkpoints)) if not problems(folder)), None)

    def set_aside_after(self, step: int) -> list[str]:
        """Move checkpoints and a model beyond a step to quarantine, and give a line for each: a run that continues from there
        makes others."""
        # Else a start that is killed before its first save would resume from what this one has left behind.
        later = [folder for folder in by_step(self.checkpoints) if (step_of(folder) or 0) > step]
        if (self.model / SEAL).is_file() and _sealed_step(self.model) > step:
            later.append(self.model)
        notes = []
        for folder in later:
            target = quarantined(folder, self.quarantine)
            notes.append(f"{folder}: is beyond step {step}, from which the run continues. Moved to {target}.")
        return notes

    def read_manifest(self) -> dict[str, Any]:
        """Return its keys; none where there is no manifest yet. Raises DataError for a file that is no JSON object."""
        try:
            return read_json(self.manifest)
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def update_manifest(self, **values: Any) -> dict[str, Any]:
        """Replace these keys and return the manifest."""
        manifest = {**self.read_manifest(), **values}
        write_json(self.manifest, manifest)
        return manifest

    def add_event(self, event: str, *, step: int, attempt: int, **facts: Any) -> None:
        """Write an event among the rows of metrics.jsonl. step: the steps made by then, as theirs."""
        append_row(self.metrics, {"event": event, "step": step, "attempt": attempt, "time": time.time(), **facts})

    def keep_in_place(self) -> None:
        """From now on this process writes nothing below the directory when it was renamed or removed; called with a
        manifest there."""
        keep_in_place(self.path, mark=self.manifest)

    def in_use(self) -> bool:
        """Return whether a living process holds the lock."""
        return self.lock.exists() and is_locked(self.lock)

    def hold(self) -> None:
        """Create the directory, take its lock for as long as this process lives, and clear away half-written folders.

        Raises CannotWriteError when another living process holds it or the folder cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            _take_lock(self.lock)
        except OSError as error:
            raise CannotWriteError(
                f"{self.path}: the run directory cannot be written ({error.strerror}). Set run.directory to a folder "
                "that can."
            ) from None
        self._wait_for_writer()
        clean(self.checkpoints)
        clean(self.path)  # model/
        for path in self.path.glob(".*"):
            if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name):  # what write_bytes was writing when it was killed
                remove_file(path)

    def _wait_for_writer(self) -> None:
        """A checkpoint that a killed attempt was writing is nearly there: it is this start's best one."""
        try:
            try:
                take_lock(self.checkpoints).release()
            except BlockingIOError:
                print(f"{self.path}: waiting for the checkpoint that the last attempt was writing", flush=True)
                take_lock(self.checkpoints, wait_s=WRITER_WAIT_S).release()
        except BlockingIOError:
            raise CannotWriteError(
                f"{self.path}: another process has been writing a checkpoint for {WRITER_WAIT_S:.0f} s, and two would "
                "damage the run. Look whether its disk still answers; end that process "
                "(pipeline/run_dir/checkpoints.py), then start again."
            ) from None


# Seconds that a start waits for the writer of a checkpoint that an earlier, killed attempt left behind.
WRITER_WAIT_S = 600.0

# The locks this process holds: closing one would release it.
_locks: list[filelock.BaseFileLock] = []


def _take_lock(path: Path) -> None:
    """Hold the lock of the run's .lock file for as long as this process lives; the file says who holds it."""
    held = lock(path, wait_s=0.5)  # a report may look for an instant whether it is held
    if held is None:
        owner = path.read_text(errors="replace").strip() or "another process"
        raise CannotWriteError(
            f"{path.parent}: the run is in use by {owner}, and two processes would damage it. Wait for it or stop it."
        )
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    _locks.append(held)


def release_runs() -> None:
    """Let go of the runs that this process holds, where it lives on after a training."""
    release_places()
    while _locks:
        _locks.pop().release()


def _sealed_step(folder: Path) -> int:
    try:
        return read_seal(folder)["step"]
    except (OSError, DamagedFileError, KeyError):
        return -1


def find_run(name: str, runs: str = "runs") -> RunDirectory | None:
    """Return the run of that path or name, or that `latest:<recipe>` means; None when there is no such run
    directory."""
    if name.startswith("latest:"):
        return latest_run(name.removeprefix("latest:"), runs)
    for path in (Path(name), Path(runs) / name):
        if (path / "run_manifest.json").exists():
            return RunDirectory(path)
    return None


def latest_run(name: str, runs: str = "runs") -> RunDirectory | None:
    """Return the finished run of a recipe, or of a stage (pretrain, sft), that ended last: what `latest:<name>` means.
    A sweep's runs are passed over, and so is a run whose manifest is damaged, which is named."""
    found = []
    for path in sorted(Path(runs).glob("*/run_manifest.json")):
        try:
            manifest = read_json(path)
        except (OSError, DamagedFileError) as error:
            note_once(f"{path}: cannot be read ({error}); latest:{name} ignores this run")
            continue
        is_tried = any(tag.startswith(SWEEP_TAG) for tag in manifest.get("tags", ()))
        if name in (manifest.get("recipe_name"), manifest.get("stage")) and "finished" in manifest and not is_tried:
            found.append((manifest["finished"], RunDirectory(path.parent)))
    return max(found, key=lambda pair: pair[0])[1] if found else None
