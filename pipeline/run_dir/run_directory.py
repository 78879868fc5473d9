"""The run directory: the only place that knows its file names."""

import os
import re
import socket
import warnings
from pathlib import Path
from typing import Any

from pipeline.process.errors import CannotWriteError, DamagedFileError, DataError
from pipeline.process.storage import (
    Held,
    keep_in_place,
    lock,
    move_folder,
    note_once,
    parse_json,
    read_bounded,
    remove_file,
    write_json,
)
from pipeline.run_dir.checkpoint_writer import take_lock
from pipeline.run_dir.checkpoints import (
    SEAL,
    by_step,
    clean,
    has_whole_model,
    newest_whole,
    problems,
    quarantined,
    read_seal,
    step_of,
)
from pipeline.run_dir.manifest import manifest_problems, unknown_keys
from pipeline.run_dir.rows import last_attempts, read_rows


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

    @property
    def name(self) -> str:
        return self.path.name

    def records(self) -> list[Path]:
        """Return what a run writes beside its model; in a repository of the Hub they lie at the root, under the same names."""
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
        """Return whether a step was made: else an earlier start failed before it, and nothing holds the run to its recipe yet."""
        if by_step(self.checkpoints):
            return True
        return any("event" not in row and row.get("step", 0) > 0 for row in read_rows(self.metrics))

    def has_saved(self) -> bool:
        """Return whether a checkpoint was once whole here, by what lies in quarantine/ or by the metrics' rows of saves."""
        if by_step(self.quarantine):
            return True
        return any("ckpt/write_s" in row for row in last_attempts(read_rows(self.metrics)))

    def newest_whole_model(self) -> Path | None:
        """Return model/ or the newest checkpoint, of quarantine/ too, whose model is undamaged: it can start another run."""
        aside = [folder for folder in self.quarantine.glob("*") if (folder / SEAL).is_file()]
        folders = [self.model, *sorted([*by_step(self.checkpoints), *aside], key=_sealed_step, reverse=True)]
        return next((folder for folder in folders if has_whole_model(folder)), None)

    def start_anew(self) -> None:
        """Move what earlier attempts left in quarantine/ below a folder of its own: none of it is progress any more."""
        left = [path for path in self.quarantine.glob("*") if not path.name.startswith("before-")]
        if left:
            number = len(list(self.quarantine.glob("before-*"))) + 1
            (self.quarantine / f"before-{number}").mkdir()
            for path in left:
                move_folder(path, self.quarantine / f"before-{number}" / path.name)

    def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """Return the newest whole checkpoint, and a line for each damaged one that was moved to quarantine."""
        return newest_whole(self.checkpoints, self.quarantine)

    def whole_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, for a reader: the run may be training, and it alone sets damaged ones aside."""
        return next((folder for folder in reversed(by_step(self.checkpoints)) if not problems(folder)), None)

    def set_aside_after(self, step: int) -> list[str]:
        """Move checkpoints and a model beyond a step to quarantine, and give a line for each: who goes on from there makes others."""
        later = [folder for folder in by_step(self.checkpoints) if (step_of(folder) or 0) > step]
        if (self.model / SEAL).is_file() and _sealed_step(self.model) > step:
            later.append(self.model)
        return [
            f"{folder}: lies beyond step {step}, where the run goes on. Moved to {quarantined(folder, self.quarantine)}."
            for folder in later
        ]

    def read_manifest(self) -> dict[str, Any]:
        """Return its keys (run_dir/manifest.py); none where there is no manifest yet. Raises DataError when it is not what is written there."""
        if not self.manifest.exists():
            return {}
        manifest, found = read_manifest(self.manifest)
        if found:
            lines = "\n  ".join(found)
            raise DataError(
                f"{self.manifest}: is not what a run writes, so nothing that it says of the run can be trusted:\n  {lines}\n"
                "Put the file back as it was, or give this run another run.name."
            )
        return manifest

    def update_manifest(self, **values: Any) -> dict[str, Any]:
        """Replace these keys. One that is not as documented is written too, with a warning: the run matters more."""
        if found := [*manifest_problems(values), *unknown_keys(values)]:
            warnings.warn(f"run_manifest.json: not as documented: {', '.join(found)}", stacklevel=2)
        manifest = {**self.read_manifest(), **values}
        write_json(self.manifest, manifest)
        return manifest

    def keep_in_place(self) -> None:
        """From now on this process writes nothing below the directory when it was renamed or removed; called with a manifest there."""
        keep_in_place(self.path, mark=self.manifest)

    def in_use(self) -> bool:
        """Return whether a living process holds the lock."""
        try:
            held = lock(self.lock, shared=True)
        except FileNotFoundError:
            return False
        if held is not None:
            held.close()
        return held is None

    def refuse_links(self, *paths: Path) -> None:
        """Raise CannotWriteError where one of the paths, by default anything in the directory, is a link that leads out of it."""
        root = Path(os.path.realpath(self.path))
        for path in paths or (sorted(self.path.iterdir()) if self.path.is_dir() else ()):
            target = os.path.realpath(path)
            if path.is_symlink() and (os.path.islink(target) or not Path(target).is_relative_to(root)):
                raise CannotWriteError(
                    f"{path}: is a link to {os.readlink(path)}, which is not in the run directory, and nothing is written through it. Remove "
                    "it; for a run on another disk set run.directory."
                )

    def hold(self) -> None:
        """Create the directory, take its lock for as long as this process lives, and clear away half-written folders.

        Raises CannotWriteError when another living process holds it or the folder cannot be written.
        """
        self.refuse_links()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            _take_lock(self.lock)
        except OSError as error:
            raise CannotWriteError(
                f"{self.path}: the run directory cannot be written ({error.strerror}). Set run.directory to a folder that can."
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
                take_lock(self.checkpoints).close()
            except BlockingIOError:
                print(f"{self.path}: waiting for the checkpoint that the last attempt was writing", flush=True)
                take_lock(self.checkpoints, wait_s=WRITER_WAIT_S).close()
        except BlockingIOError:
            raise CannotWriteError(
                f"{self.path}: another process has been writing a checkpoint for {WRITER_WAIT_S:.0f} s, and two would damage the run. "
                "Look whether its disk still answers; end that process (pipeline/run_dir/checkpoint_writer.py), then start again."
            ) from None


# Seconds that a start waits for the writer of a checkpoint that an earlier, killed attempt left behind.
WRITER_WAIT_S = 600.0

# The locks this process holds: closing one would release it.
_locks: list[Held] = []


def _take_lock(path: Path) -> None:
    """Hold the lock of the run's .lock file for as long as this process lives; the file says who holds it."""
    held = lock(path, lease=True)
    if held is None:
        owner = path.read_text(errors="replace").strip() or "another process"
        raise CannotWriteError(
            f"{path.parent}: the run is in use by {owner}, and two processes would damage it. Wait for it or stop it."
        )
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    _locks.append(held)


def _sealed_step(folder: Path) -> int:
    try:
        return read_seal(folder)["step"]
    except (OSError, DamagedFileError, KeyError):
        return -1


def read_manifest(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a run's manifest and what in it is not as documented; ({}, reasons) of a file that is none at all."""
    try:
        manifest = parse_json(read_bounded(path))
    except ValueError as error:
        return {}, [f"it is no JSON as it was written ({error})"]
    return manifest, manifest_problems(manifest)


def fit_file(runs: Path, family: str) -> Path:
    """Return what the runs of a family in that folder were fitted to (report/fit.py)."""
    return runs / f"fit-{family}.json"


def find_run(name: str, runs: str = "runs") -> RunDirectory | None:
    """Return the run of that path or name, or that `latest:<recipe>` means; None when there is no such run directory."""
    if name.startswith("latest:"):
        return latest_run(name.removeprefix("latest:"), runs)
    for path in (Path(name), Path(runs) / name):
        if (path / "run_manifest.json").exists():
            return RunDirectory(path)
    return None


def latest_run(name: str, runs: str = "runs") -> RunDirectory | None:
    """Return the finished run of a recipe, or of a stage (pretrain, sft), that ended last: what `latest:<name>` means. A run whose
    manifest is damaged is named and passed over."""
    found = []
    for path in sorted(Path(runs).glob("*/run_manifest.json")):
        run = RunDirectory(path.parent)
        try:
            manifest, wrong = read_manifest(path)
        except OSError as error:
            manifest, wrong = {}, [str(error.strerror)]
        if wrong:
            note_once(f"{path}: is not what a run writes ({wrong[0]}); latest:{name} passes over this run")
            continue
        if name in (manifest.get("recipe_name"), manifest.get("stage")) and "finished" in manifest:
            found.append((manifest["finished"], run))
    return max(found, key=lambda pair: pair[0])[1] if found else None


# The runs that a run comes from: the one whose weights it began with, and the one that it forks.


def name_of_model(folder: Path) -> str:
    """Return the run's name for <run>/model and <run>/checkpoints/checkpoint-<step>, for another folder its own."""
    steps = 2 if folder.parent.name == "checkpoints" else 1 if folder.name == "model" else 0
    return folder.parts[-1 - steps] if len(folder.parts) > steps else str(folder)


def base_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run whose model this one began with, where it still lies and its model has the recorded hash."""
    begun_with = _start_of(manifest)
    weights = _hashes(begun_with)
    if not weights:
        return None
    model = Path(begun_with["from"])
    here = run.resolve().parent
    # As it was named, or beside this run: of runs/<name>/model or runs/<name>/checkpoints/checkpoint-<step> the run.
    for candidate in (model, here / Path(*model.parts[-2:]), here / Path(*model.parts[-3:])):
        base = RunDirectory(candidate.parent.parent if candidate.parent.name == "checkpoints" else candidate.parent)
        if _has_weights(candidate, weights) and base.manifest.exists():
            return base
    return None


def forked_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run that this one forks (run.fork_from), where it still lies: as it was named, or beside this run."""
    if not (name := (manifest.get("forked_from") or {}).get("run")):
        return None
    paths = (Path(name), run.resolve().parent / Path(name).name)
    return next((RunDirectory(path) for path in paths if RunDirectory(path).manifest.exists()), None)


def parents_of(run: RunDirectory) -> tuple[list[RunDirectory], list[str]]:
    """(runs, names): those it comes from directly that lie here, and the names of the runs and models that do not."""
    manifest = run.read_manifest()
    begun_with, fork = _start_of(manifest), (manifest.get("forked_from") or {}).get("run")
    found, absent = [], []
    if start := begun_with.get("from"):
        base = base_run(run.path, manifest)
        found += [base] if base else []
        # Of a folder the weights' hashes are recorded, of a Hub id the commit.
        absent += [] if base else [name_of_model(Path(start)) if _hashes(begun_with) else start]
    if fork:
        parent = forked_run(run.path, manifest)
        found += [parent] if parent else []
        absent += [] if parent else [Path(fork).name]
    return found, absent


def _start_of(manifest: dict[str, Any]) -> dict[str, str]:
    return (manifest.get("inputs") or {}).get("start_from") or {}


def _hashes(begun_with: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in begun_with.items() if name.endswith(".safetensors")}


def _has_weights(model: Path, hashes: dict[str, str]) -> bool:
    try:
        files = read_seal(model)["files"]
    except (OSError, ValueError):  # damaged, or a path that no file system has
        return False
    return all((files.get(name) or {}).get("sha256") == digest for name, digest in hashes.items())
