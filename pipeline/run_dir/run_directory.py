"""The run directory: the only place that knows its file names, and every key of its run_manifest.json."""

import os
import re
import socket
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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

# run_manifest.json: every key, its type and unit, when it is written and by whom; and the check of a manifest against
# it.
#
# docs/manifest.md prints this page's table (tests/artifacts/test_manifest.py holds them together).

# `type?` may be null. `any` is not looked into: its form belongs to the recipe or to who wrote it.
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "flag": (bool,),
    "object": (dict,),
    "list": (list,),
    "any": (object,),
}


class Key(NamedTuple):
    """A value of the manifest. name: dotted; <...> stands for any name, [] for each entry of a list. unit: "" when it
    has none."""

    name: str
    type: str
    unit: str
    written: str
    by: str
    meaning: str


# fmt: off
START, INPUTS, SHAPE, END = "every start", "first start, before step 1", "every start, before its first step", "the end"
PLANNED = "a start without steps, before step 1"
SWEEP_TAG = "sweep:"  # begins the label (run.tags) of a sweep's runs, whose values were only tried
OPENING, RECORD, CLOSING = "run/open_run.py", "run/settings.py", "run/finish.py"
KEYS = (
    Key("name", "text", "", START, OPENING, "the run's name, which is its folder's"),
    Key("recipe_name", "text", "", START, OPENING, "stem of the recipe's file, as latest:<recipe> finds it"),
    Key("stage", "text", "", START, OPENING, "pretrain or sft"),
    Key("note", "text?", "", START, OPENING, "run.note"),
    Key("tags", "list", "", START, OPENING, "run.tags"),
    Key("tags.[]", "text", "", START, OPENING, "one label"),
    Key("created", "text", "ISO 8601, UTC", "first start", OPENING, "when the run was begun"),
    Key("must_match", "object", "", "starts before the first step", OPENING, "the keys of the recipe that a continuation may not change"),
    Key("must_match.<key>", "any", "as the recipe", "starts before the first step", OPENING, "its value"),
    Key("attempts", "integer", "starts", START, OPENING, "how often the run was started"),
    Key("status", "text", "", "every start, the end", f"{OPENING}, {CLOSING}", "running or finished; of a crash failure.json tells"),
    Key("command", "list", "", START, OPENING, "the command line, secrets blacked out"),
    Key("command.[]", "text", "", START, OPENING, "one argument"),
    Key("versions", "object", "", START, OPENING, "what the run is computed with"),
    Key("versions.<package>", "text", "", START, OPENING, "installed version"),
    Key("git", "object?", "", START, OPENING, "state of the clone; null outside one"),
    Key("git.commit", "text", "", START, OPENING, "commit"),
    Key("git.changed_files", "integer", "files", START, OPENING, "files that differ from it"),
    Key("host", "object", "", START, OPENING, "the first process's machine"),
    Key("host.system", "text", "", START, OPENING, "operating system"),
    Key("host.cpus", "integer?", "cores", START, OPENING, "of the machine; a container may use fewer"),
    Key("world_size", "integer", "processes", START, OPENING, "processes of this start"),
    Key("forked_from", "object", "", "starts of a fork", OPENING, "run.fork_from, resolved"),
    Key("forked_from.run", "text", "", "starts of a fork", OPENING, "the parent"),
    Key("forked_from.step", "integer", "optimizer steps", "starts of a fork", OPENING, "of its checkpoint"),
    Key("forked_from.differences", "list", "", "starts of a fork", OPENING, "keys that differ from the parent's"),
    Key("forked_from.differences.[]", "text", "", "starts of a fork", OPENING, "`key: parent's -> this run's`"),
    Key("inputs", "object", "", INPUTS, "run/inputs.py", "what the run was fed; a later start compares"),
    Key("inputs.tokenizer", "object", "", INPUTS, "run/inputs.py", "the tokenizer"),
    Key("inputs.tokenizer.identity", "text", "sha256", INPUTS, "run/inputs.py", "of ids, merges, normalization and template"),
    Key("inputs.tokenizer.size", "integer", "ids", INPUTS, "run/inputs.py", "special ones included"),
    Key("inputs.document_end", "integer", "id", INPUTS, "run/inputs.py", "behind each document; absent where the beginning of the next one ends a text"),
    Key("inputs.sources", "list", "", INPUTS, "run/inputs.py", "what is trained on"),
    Key("inputs.sources.[]", "object", "", INPUTS, "run/inputs.py", "name, id, revision, format, fingerprint, files (label, sha256, bytes)"),
    Key("inputs.sources.[].<fact>", "any", "", INPUTS, "run/inputs.py", "as sources/ describes it"),
    Key("inputs.validation", "list", "", INPUTS, "run/inputs.py", "what is held out, described alike"),
    Key("inputs.validation.[]", "object", "", INPUTS, "run/inputs.py", "as above"),
    Key("inputs.validation.[].<fact>", "any", "", INPUTS, "run/inputs.py", "as above"),
    Key("inputs.validation_bytes", "object", "", INPUTS, "run/inputs.py", "how much text each validation number is over; absent where ids of conversations have no fixed bytes"),
    Key("inputs.validation_bytes.<metric>", "integer", "bytes", INPUTS, "run/inputs.py", "of text that it scores"),
    Key("inputs.overlap", "object", "", INPUTS, "run/inputs.py", "validation documents that are trained on, too; absent where none is held out"),
    Key("inputs.overlap.documents", "integer", "documents", INPUTS, "run/inputs.py", "looked for: the first ones of each validation source"),
    Key("inputs.overlap.found", "integer", "documents", INPUTS, "run/inputs.py", "of these, equal but for white space around them to one that is trained on"),
    Key("inputs.overlap.place", "text", "", INPUTS, "run/inputs.py", "file:row of one that was found"),
    Key("inputs.overlap.whole", "flag", "", INPUTS, "run/inputs.py", "all training text was looked through; else found is at least so many"),
    Key("inputs.protocols", "object", "", INPUTS, "run/inputs.py", "under which protocol validation is scored"),
    Key("inputs.protocols.<metric>", "text?", "", INPUTS, "run/inputs.py", "the hash of its parts: two figures compare only when it is equal; null where there are no bits per byte"),
    Key("inputs.protocol_parts", "object", "", INPUTS, "run/inputs.py", "what the protocols are made of (metrics.py); in SFT val/bpb stands for sft/assistant_bpb"),
    Key("inputs.protocol_parts.<metric>", "object", "", INPUTS, "run/inputs.py", "texts, bytes, window, stride, bos, dtype, coverage, rule; of rows also packing and tokenizer"),
    Key("inputs.protocol_parts.<metric>.<part>", "any", "", INPUTS, "run/inputs.py", "its value"),
    Key("inputs.batch_tokens", "integer?", "row positions", INPUTS, "run/inputs.py", "of an optimizer step over all processes"),
    Key("inputs.batch_warmup", "object", "", INPUTS, "run/inputs.py", "smaller batches at the beginning (optimizer.schedule)"),
    Key("inputs.batch_warmup.warmup_steps", "integer", "optimizer steps", INPUTS, "run/inputs.py", "that have them"),
    Key("inputs.batch_warmup.halvings", "integer", "halvings", INPUTS, "run/inputs.py", "of the first step's batch"),
    Key("inputs.max_steps", "integer", "optimizer steps", INPUTS, "run/inputs.py", "of the whole run"),
    Key("inputs.one_text_rows", "flag", "", INPUTS, "run/inputs.py", "rows hold one conversation or document each, as the model does not keep several apart; else absent"),
    Key("inputs.start_from", "object?", "", INPUTS, "run/inputs.py", "model.start_from, resolved"),
    Key("inputs.start_from.<file>", "text", "sha256", INPUTS, "run/inputs.py", "of each file of weights; `from`: the folder, or a Hub id, and then its `commit` instead"),
    Key("code", "object", "", "every start, before step 1", "run/inputs.py", "the user's code that this start runs (process/user_code.py)"),
    Key("code.trusted", "flag", "", "every start, before step 1", "run/inputs.py", "run.trust_code: installed modules and a model's code files were allowed"),
    Key("code.ran", "list", "", "every start, before step 1", "run/inputs.py", "what was run"),
    Key("code.ran.[]", "object", "", "every start, before step 1", "run/inputs.py", "one module:attr, or the classes of a model"),
    Key("code.ran.[].name", "text", "", "every start, before step 1", "run/inputs.py", "as the recipe names it"),
    Key("code.ran.[].file", "text", "", "every start, before step 1", "run/inputs.py", "its file or folder"),
    Key("code.ran.[].sha256", "text?", "sha256", "every start, before step 1", "run/inputs.py", "of that file; null for several or none"),
    Key("shares", "object", "", "before step 1 and the end", f"run/inputs.py, {CLOSING}", "each source's part of the rows"),
    Key("shares.<source>", "object", "", "before step 1 and the end", f"run/inputs.py, {CLOSING}", "key, rows, tokens, share, targets_per_row, epochs, lost (shares padded, cropped, split, cut, too long, no target, empty, bad); of conversations `conversations`: read, too_long, cut, no_target, tokens_lost (share), row_tokens_99 (rows that hold 99 % of them), sampled (conversations that these two were estimated from, where not counted), untrained (share of the answers' characters, by a sample)"),
    Key("shares.<source>.<fact>", "any", "", "before step 1 and the end", f"run/inputs.py, {CLOSING}", "as data/rows.py counts it"),
    Key("shape", "object", "", SHAPE, "run/settings.py", "what the last bits depend on"),
    Key("shape.device", "text", "", SHAPE, "run/settings.py", "name of one device"),
    Key("shape.processes", "integer", "processes", SHAPE, "run/settings.py", "one a device"),
    Key("shape.micro_batch", "integer", "rows", SHAPE, "run/settings.py", "of one forward pass"),
    Key("shape.micro_steps", "integer", "forward passes", SHAPE, "run/settings.py", "of an optimizer step, of each process"),
    Key("shape.sharded", "flag", "", SHAPE, "run/settings.py", "FSDP2 or tensor parallel: each process holds a part of the model"),
    Key("shape.replicas", "integer", "copies", SHAPE, "run/settings.py", "of the sharded model: more than 1 under HSDP"),
    Key("shape.tensor_parallel", "integer", "processes", SHAPE, "run/settings.py", "that compute each layer together, on the same rows; 1 without"),
    Key("shape.threads", "integer", "threads", SHAPE, "run/settings.py", "torch's, on the CPU"),
    Key("shape.dtype", "text", "", SHAPE, "run/settings.py", "format of the matrix products"),
    Key("shape.compiled", "flag", "", SHAPE, "run/settings.py", "torch.compile"),
    Key("shape.attention", "text?", "", SHAPE, "run/settings.py", "transformers' name of the attention"),
    Key("plan", "object", "", PLANNED, RECORD, "what the recipe promised; a number that was not known is absent"),
    Key("plan.device", "text", "", PLANNED, RECORD, "name of one device"),
    Key("plan.processes", "integer", "processes", PLANNED, RECORD, "one a device"),
    Key("plan.parameters", "integer", "parameters", PLANNED, RECORD, "all of them"),
    Key("plan.scaling_parameters", "integer", "parameters", PLANNED, RECORD, "matrices of the blocks and head"),
    Key("plan.steps", "integer", "optimizer steps", PLANNED, RECORD, "of the whole run"),
    Key("plan.tokens", "integer", "row positions", PLANNED, RECORD, "of the whole run"),
    Key("plan.flops", "number", "FLOPs", PLANNED, RECORD, "of the whole run, nanochat's formula"),
    Key("plan.memory_bytes", "object", "", PLANNED, RECORD, "of one process, by arithmetic; of an accelerator's, the framework is not in it"),
    Key("plan.memory_bytes.<part>", "integer", "bytes", PLANNED, RECORD, "weights, gradients, optimizer, activations, total; on a CPU process (Python and libraries) and saved (the copy of a checkpoint being written) too"),
    Key("plan.process_bytes", "integer", "bytes", "no longer", RECORD, "the most memory of one process, as probed; on a CPU with a checkpoint's copy"),
    Key("plan.checkpoint_bytes", "integer", "bytes", PLANNED, RECORD, "weights and optimizer of one checkpoint"),
    Key("plan.run_disk_bytes", "integer", "bytes", PLANNED, RECORD, "checkpoints and model at the fullest moment"),
    Key("plan.assumed_mfu", "number", "share of the peak", PLANNED, RECORD, "what training_s is counted with"),
    Key("plan.training_s", "number", "seconds", PLANNED, RECORD, "in steps, without compilation, evaluations and saves"),
    Key("plan.duration_s", "object", "", PLANNED, RECORD, "of the whole run without preparing its data and benchmarks (plan/plan.py)"),
    Key("plan.duration_s.<part>", "object", "", PLANNED, RECORD, "total, start (and end), steps, evaluations, saves"),
    Key("plan.duration_s.<part>.<end>", "number", "seconds", PLANNED, RECORD, "value: expected; earlier versions low and high too"),
    Key("plan.duration_source", "text", "", PLANNED, RECORD, "how it was counted, with the assumed MFU"),
    Key("plan.cost", "number", "as run.gpu_hour_cost", PLANNED, RECORD, "of the expected duration on all devices"),
    Key("plan.energy_kwh", "number", "kWh", PLANNED, RECORD, "of the expected duration at the devices' rated power"),
    Key("plan.probe", "object", "", "no longer", RECORD, "the steps that training_s was measured with (plan/plan.py)"),
    Key("plan.probe.step_s", "number", "seconds", "no longer", RECORD, "median of the measured steps"),
    Key("plan.probe.low_s", "number", "seconds", "no longer", RECORD, "the quickest of them"),
    Key("plan.probe.high_s", "number", "seconds", "no longer", RECORD, "the slowest of them"),
    Key("plan.probe.steps", "integer", "optimizer steps", "no longer", RECORD, "how many were measured"),
    Key("plan.probe.first_step_s", "number", "seconds", "no longer", RECORD, "the first step, which compiles"),
    Key("plan.probe.peak_bytes", "integer", "bytes", "no longer", RECORD, "most that the process took of the device; on a CPU its resident memory"),
    Key("plan.probe.time", "number", "seconds since 1970", "no longer", RECORD, "when it was measured"),
    Key("model", "object", "", SHAPE, RECORD, "the model as it was built"),
    Key("model.class", "text", "", SHAPE, RECORD, "its Python class"),
    Key("model.parameters", "integer", "parameters", SHAPE, RECORD, "counted, shared ones once"),
    Key("model.flops_per_token", "number", "FLOPs", SHAPE, RECORD, "a row position, forward and backward, nanochat's formula, by its config"),
    Key("wandb_id", "text", "", "the first start with W&B", "callbacks/trackers.py", "id of the W&B run, which a restart continues"),
    Key("ended", "number", "seconds since 1970", END, CLOSING, "when the training was over"),
    Key("results", "object", "", END, CLOSING, "last numbers; <name>/first the first one"),
    Key("results.<metric>", "number", "as docs/metrics.md", END, CLOSING, "its value"),
    Key("peak_memory_bytes", "object", "", END, CLOSING, "most that the first process of the last start took"),
    Key("peak_memory_bytes.host", "integer", "bytes", END, CLOSING, "resident memory"),
    Key("peak_memory_bytes.device", "integer", "bytes", END, CLOSING, "allocated on the CUDA device"),
    Key("hub", "object", "", "each publication", "hub/", "the last commit that was pushed"),
    Key("hub.id", "text", "", "each publication", "hub/", "repository"),
    Key("hub.commit", "text?", "", "each publication", "hub/", "commit"),
    Key("hub.time", "number", "seconds since 1970", "each publication", "hub/", "when"),
    Key("finished", "number", "seconds since 1970", END, CLOSING, "written last: the run is done and its results stay"),
    Key("pulled_from", "object", "", "python -m pipeline.hub pull, a start that took its checkpoint from the Hub", "hub/", "where the run was restored from"),
    Key("pulled_from.id", "text", "", "python -m pipeline.hub pull", "hub/pull.py", "repository"),
    Key("pulled_from.commit", "text", "", "python -m pipeline.hub pull", "hub/pull.py", "commit"),
)
# fmt: on


def manifest_problems(manifest: Any) -> list[str]:
    """Return what a manifest, or a part of one, holds in another type than documented; keys that are not documented
    are in `unknown_keys`."""
    return [what for what, known in _findings(manifest) if known]


def unknown_keys(manifest: Any) -> list[str]:
    """Dotted names that are not documented: of a newer or an older version, or a mistake of ours."""
    return [what for what, known in _findings(manifest) if not known]


def _tree() -> dict[str, Any]:
    """Return the keys by the parts of their names; "" holds the key itself, "<>" stands for any name."""
    tree: dict[str, Any] = {}
    for key in KEYS:
        node = tree
        for part in key.name.split("."):
            node = node.setdefault("<>" if part.startswith("<") else part, {})
        node[""] = key
    return tree


_TREE = _tree()


def _findings(manifest: Any) -> list[tuple[str, bool]]:
    """(what, whether the key is known) of everything that is not as documented."""
    if not isinstance(manifest, dict):
        return [("it is no object of keys", True)]
    found: list[tuple[str, bool]] = []
    _walk(manifest, _TREE, "", found)
    return found


def _walk(value: Any, node: dict[str, Any], name: str, found: list[tuple[str, bool]]) -> Any:
    """Return the value without what is of another type than documented, and add to `found` as _findings gives it."""
    if not isinstance(value, dict | list) or ("" in node and node[""].type == "any"):
        return value
    is_list, kept = isinstance(value, list), dict[Any, Any]()
    parts: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else value.items()
    for part, child in parts:
        place: str = f"{name}[{part}]" if is_list else f"{name}.{part}" if name else part
        below = node["[]"] if is_list else node.get(part) or node.get("<>")
        if below is None:
            kept[part] = child
            found.append((place, False))
        elif problem := _type_problem(child, below, place):
            found.append((problem, True))
        else:
            kept[part] = _walk(child, below, place, found)
    return list(kept.values()) if is_list else kept


def _type_problem(value: Any, node: dict[str, Any], name: str) -> str:
    """Return what is wrong with a value's own type, or ""."""
    key: Key | None = node.get("")
    if key is None or (value is None and key.type.endswith("?")):
        return ""
    kind = key.type.removesuffix("?")
    # To Python True is a number; here a number is no flag.
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind not in ("flag", "any")):
        return f"{name} is {_short(value)}, not of type {kind}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
    def of(cls, recipe: Any) -> "RunDirectory":
        """Return the directory that the recipe names, which need not be there."""
        return cls(Path(recipe.run.directory) / str(recipe.run.name))

    @property
    def name(self) -> str:
        return self.path.name

    def records(self) -> list[Path]:
        """Return what a run writes beside its model; in a repository of the Hub they lie at the root, under the same
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
        """Return whether a checkpoint was once whole here, by what lies in quarantine/ or by the metrics' rows of
        saves."""
        if by_step(self.quarantine):
            return True
        return any("ckpt/write_s" in row for row in last_attempts(read_rows(self.metrics)))

    def newest_whole_model(self) -> Path | None:
        """Return model/ or the newest checkpoint, of quarantine/ too, whose model is undamaged: it can start another
        run."""
        aside = [folder for folder in self.quarantine.glob("*") if (folder / SEAL).is_file()]
        folders = [self.model, *sorted([*by_step(self.checkpoints), *aside], key=_sealed_step, reverse=True)]
        return next((folder for folder in folders if has_whole_model(folder)), None)

    def start_anew(self) -> None:
        """Move what earlier attempts left in quarantine/ below a folder of its own: none of it is progress any
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
        """Move checkpoints and a model beyond a step to quarantine, and give a line for each: who goes on from there
        makes others."""
        later = [folder for folder in by_step(self.checkpoints) if (step_of(folder) or 0) > step]
        if (self.model / SEAL).is_file() and _sealed_step(self.model) > step:
            later.append(self.model)
        return [
            (
                f"{folder}: lies beyond step {step}, where the run goes on. Moved to "
                f"{quarantined(folder, self.quarantine)}."
            )
            for folder in later
        ]

    def read_manifest(self) -> dict[str, Any]:
        """Return its keys (run_dir/run_directory.py); none where there is no manifest yet. Raises DataError when it is
        not what is written there."""
        if not self.manifest.exists():
            return {}
        manifest, found = read_manifest(self.manifest)
        if found:
            lines = "\n  ".join(found)
            raise DataError(
                f"{self.manifest}: is not what a run writes, so nothing that it says of the run can be trusted:\n  "
                f"{lines}\n"
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

    def add_event(self, event: str, *, step: int, attempt: int, **facts: Any) -> None:
        """Write an event among the rows of metrics.jsonl. step: the steps made by then, as theirs."""
        append_row(self.metrics, {"event": event, "step": step, "attempt": attempt, "time": time.time(), **facts})

    def keep_in_place(self) -> None:
        """From now on this process writes nothing below the directory when it was renamed or removed; called with a
        manifest there."""
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
        """Raise CannotWriteError where one of the paths, by default anything in the directory, is a link that leads
        out of it."""
        root = Path(os.path.realpath(self.path))
        for path in paths or (sorted(self.path.iterdir()) if self.path.is_dir() else ()):
            target = os.path.realpath(path)
            if path.is_symlink() and (os.path.islink(target) or not Path(target).is_relative_to(root)):
                raise CannotWriteError(
                    f"{path}: is a link to {os.readlink(path)}, which is not in the run directory, and nothing is "
                    "written through it. Put what it names in its place; for a run on another disk move all of it "
                    "there and set run.directory."
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
                take_lock(self.checkpoints).close()
            except BlockingIOError:
                print(f"{self.path}: waiting for the checkpoint that the last attempt was writing", flush=True)
                take_lock(self.checkpoints, wait_s=WRITER_WAIT_S).close()
        except BlockingIOError:
            raise CannotWriteError(
                f"{self.path}: another process has been writing a checkpoint for {WRITER_WAIT_S:.0f} s, and two would "
                "damage the run. Look whether its disk still answers; end that process "
                "(pipeline/run_dir/checkpoints.py), then start again."
            ) from None


# Seconds that a start waits for the writer of a checkpoint that an earlier, killed attempt left behind.
WRITER_WAIT_S = 600.0

# The locks this process holds: closing one would release it.
_locks: list[Held] = []


def _take_lock(path: Path) -> None:
    """Hold the lock of the run's .lock file for as long as this process lives; the file says who holds it."""
    held = lock(path)
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
            manifest, wrong = read_manifest(path)
        except OSError as error:
            manifest, wrong = {}, [str(error.strerror)]
        if wrong:
            note_once(f"{path}: is not what a run writes ({wrong[0]}); latest:{name} passes over this run")
        elif any(tag.startswith(SWEEP_TAG) for tag in manifest.get("tags", ())):
            continue
        elif name in (manifest.get("recipe_name"), manifest.get("stage")) and "finished" in manifest:
            found.append((manifest["finished"], RunDirectory(path.parent)))
    return max(found, key=lambda pair: pair[0])[1] if found else None
