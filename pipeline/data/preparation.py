"""Plan of a run's data, and the shards that are prepared by it ahead of the training that reads them.

One sequence of shards per source and use, each under its cache key. A plan is JSON, so that one process makes it and
hands it to the other ranks and to the preparing child.
"""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.data.stream import FORMAT, Mixture, Part, Sequence, Stream, damaged_seals, is_damaged
from pipeline.metrics import digest
from pipeline.monitor.heartbeat import beat
from pipeline.process import commands, errors
from pipeline.process.errors import DataError, HangError, Preempted, RecipeError
from pipeline.process.network import retries_in
from pipeline.process.progress import short_count, waiting
from pipeline.process.storage import (
    cache_dir,
    file_lock,
    lock,
    machine,
    read_json,
    remove_file,
    require_writable,
)
from pipeline.recipe.resolve import (
    StepRows,
    horizon_steps,
    isolates_documents,
    start_folder,
    step_rows,
    with_batch_tokens,
)
from pipeline.run_dir.run_directory import RunDirectory, find_run
from pipeline.tokenizer import identity
from pipeline.tokenizer.chat import RENDERING_VERSION, own_template
from pipeline.tokenizer.encode import document_end, document_start, is_byte_level

VALIDATION_BUFFER = 1000  # documents; part of the protocol, so no key of the recipe
# Validation first: it is small, and the first thing that a run does is to score it.
ROLES = ("validation", "documents", "train")
ONE_TEXT = "one_text"  # packing of rows that hold one document or conversation each, padded
KEY_LENGTH = 32  # hex digits of a cache key


def make_plan(recipe: Any, tokenizer: Any, *, sources: tuple[list, list], watchlist: str | Path | None = None) -> dict:
    """Return the plan of a recipe's training and validation rows.

    sources: as open_sources gives them. watchlist: a saved Watchlist for which the training text is searched.
    """
    train, validation = sources
    chat = recipe.stage == "sft"
    batch_tokens = with_batch_tokens(recipe, 1)  # given, or set by the entry, which knows the number of processes
    rows_per_step, rest = divmod(int(batch_tokens), recipe.data.row_tokens)
    if rest:
        raise RecipeError(
            f"{recipe.path or 'recipe'}: data.batch_tokens is {batch_tokens}, which is not a whole number of rows of "
            f"{recipe.data.row_tokens} tokens. Write {max(1, rows_per_step) * recipe.data.row_tokens}."
        )
    bos, pad = special_ids(tokenizer)
    end = document_end_of(recipe, tokenizer)
    ending = {} if end is None else {"end": end}
    common = {
        "format": FORMAT,
        "kind": "chat" if chat else "text",
        "tokenizer": identity(tokenizer),
        "bos": bos,
        "pad": pad,
        "dtype": "uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32",
        "row_tokens": recipe.data.row_tokens,
        "packing_documents": recipe.data.packing_documents,
        "shard_rows": recipe.data.shard_rows,
        **ending,
    }
    if chat and own_template(tokenizer):
        common["rendering"] = RENDERING_VERSION
    train_packing = {"max_row_overflow": recipe.data.max_row_overflow} if chat else {"packing": recipe.data.packing}
    one_text = {"packing": ONE_TEXT} if recipe.data.one_text_rows else {}
    alone = one_text if chat or recipe.data.isolate_documents else {}
    steps = horizon_steps(recipe, int(batch_tokens))
    rows = step_rows(recipe, int(batch_tokens))
    horizon = (
        {"total_rows": rows.before(steps), "epochs": None}
        if steps and steps > 0
        else {"total_rows": None, "epochs": float(recipe.train.get("num_train_epochs") or 1.0)}
    )
    bpb = recipe.evals.bpb
    plan = {
        "cache_dir": str(cache_dir(recipe.data.cache_dir)),
        "kind": common["kind"],
        "row_tokens": recipe.data.row_tokens,
        "rows_per_step": rows_per_step,
        **batch_warmup(rows),
        "isolated": isolates_documents(recipe),
        "bos": bos,
        "pad": pad,
        **ending,
        "seed": int(recipe.train.get("seed", 42)),
        "max_bad_rows": recipe.data.max_bad_rows,
        "num_proc": recipe.data.num_proc,
        "engine": recipe.data.engine,
        "shards_from": recipe.data.shards_from,
        "watchlist": str(watchlist) if watchlist else None,
        "train": {
            **horizon,
            "sequences": [sequence_plan(source, {**common, **train_packing, **alone}) for source in train],
            "parts": [part_of(source.spec, counted=horizon["epochs"] is not None) for source in train],
        },
    }
    rows = max(1, int(bpb.tokens) // recipe.data.row_tokens)
    # Ids of some tokenizers have no fixed bytes: then the rows carry them.
    scored = {} if chat or is_byte_level(tokenizer) else {"target_bytes": True}
    held_out = {**common, "packing_documents": VALIDATION_BUFFER, **scored}
    packing = {"max_row_overflow": "cut"} if chat else {"packing": "best_fit_crop"}
    plan["validation"] = {
        "total_rows": rows,
        "epochs": None,
        "sequences": [sequence_plan(source, {**held_out, **packing, **alone}) for source in validation],
        "parts": [{"weight": source.spec.weight or 1.0, "epochs": None, "at_end": "drop"} for source in validation],
    }
    plan["documents"] = None
    if not chat and bpb.document_bytes > 0 and validation:
        share = -(-int(bpb.document_bytes) // len(validation))
        settings = {**held_out, "packing": "cut_and_fit", "limit_bytes": share, **one_text}
        plan["documents"] = {
            "total_rows": None,
            "epochs": 1.0,
            "sequences": [sequence_plan(source, settings) for source in validation],
            "parts": [{"weight": None, "epochs": 1.0, "at_end": "drop"} for _ in validation],
        }
    return plan


def sequence_plan(source: Any, settings: dict) -> dict:
    """Return a sequence's cache key and everything that the key stands for, but for the files themselves."""
    settings = {
        **settings,
        "source": source.fingerprint,
        "files": [file.sha256 or file.label for file in source.files],
    }
    key = digest(settings, KEY_LENGTH)
    passes = {"passes": source.passes, "files_in_a_pass": len(source.once.files)} if source.passes > 1 else {}
    return {"name": source.name, "key": key, "settings": {k: v for k, v in settings.items() if k != "files"}, **passes}


def part_of(spec: Any, *, counted: bool) -> dict:
    """Return a source's weight or epochs. counted: the horizon is in epochs, so a source without either is seen once
    in each."""
    if spec.epochs is not None:
        return {"weight": None, "epochs": spec.epochs, "at_end": spec.at_end}
    if spec.weight is None and counted:
        return {"weight": None, "epochs": 1.0, "at_end": spec.at_end}
    return {"weight": 1.0 if spec.weight is None else spec.weight, "epochs": None, "at_end": spec.at_end}


def batch_warmup(rows: StepRows) -> dict[str, dict[str, int]]:
    """Return what a plan or a manifest holds of smaller first steps; nothing where there are none."""
    return (
        {"batch_warmup": {"warmup_steps": rows.warmup_steps, "halvings": rows.halvings}} if rows.warmup_steps else {}
    )


def step_rows_of(plan: dict) -> StepRows:
    """Return the rows of the plan's steps."""
    return StepRows(plan["rows_per_step"], **plan.get("batch_warmup", {}))


def special_ids(tokenizer: Any) -> tuple[int, int]:
    """(BOS, padding) ids; a tokenizer without one of them lends the token between its texts. Padding is never a
    target."""
    bos = document_start(tokenizer)
    if bos is None:
        raise RecipeError(
            "tokenizer: it has neither a bos nor an eos token, so rows cannot say where a document begins. Choose "
            "another one."
        )
    return int(bos), int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else bos)


def document_end_of(recipe: Any, tokenizer: Any) -> int | None:
    """Return the id that each document ends with, where training goes on from a model that ends its texts with one.

    None where the next document's beginning ends a text, as in all of ours: also in a run that was begun so, and from
    a model whose generation ends there.
    """
    if recipe.stage != "pretrain" or recipe.model.start_from is None:
        return None
    fork = find_run(recipe.run.fork_from.partition("@")[0], recipe.run.directory) if recipe.run.fork_from else None
    own = RunDirectory(Path(recipe.run.directory) / recipe.run.name) if recipe.run.name else None
    for run in (own, fork):
        if run is not None and run.has_trained():
            return run.read_manifest().get("inputs", {}).get("document_end")
    folder = start_folder(recipe)
    if folder is not None and (folder / "generation_config.json").exists():
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        if document_start(tokenizer) in (ends if isinstance(ends, list) else [ends]):
            return None
    return document_end(tokenizer)


def sequence_folder(plan: dict, sequence: dict) -> Path:
    return Path(plan["cache_dir"]) / "shards" / sequence["key"]


def folders_of(plan: dict) -> list[Path]:
    """Return the folders of all sequences of a plan, each once and always in the same order."""
    return sorted({sequence_folder(plan, s) for role in ROLES if plan[role] for s in plan[role]["sequences"]})


def open_stream(plan: dict, role: str) -> Stream:
    """Return the stream train | validation | documents of a plan that has it, as far as it is sealed."""
    about = plan[role]
    sequences = [
        Sequence(sequence_folder(plan, s), shard_rows=s["settings"]["shard_rows"]) for s in about["sequences"]
    ]
    mixture = Mixture(
        [Part(**part) for part in about["parts"]], total_rows=about["total_rows"], epochs=about["epochs"]
    )
    keys = [s["key"] for s in about["sequences"]]
    return Stream(sequences, mixture, keys=keys, seed=plan["seed"] if role == "train" else None)


# The order in which shards are made: what the run reads first is made first.


def streams_of(plan: dict) -> dict[str, Stream]:
    return {role: open_stream(plan, role) for role in ROLES if plan[role] is not None}


def next_shard(streams: dict[str, Stream]) -> tuple[str, int] | None:
    """(role, source) of the shard to make next; None when all that the run needs is sealed."""
    for role, stream in streams.items():
        source = stream.missing()
        if source is not None:
            return role, source
    return None


def damaged_shards(plan: dict, streams: dict[str, Stream], *, verify: bool) -> list[tuple[str, int, int]]:
    """Return (role, source, shard) of the sealed shards that the run needs and that are not as they were sealed."""
    return [
        (role, source, number)
        for role, stream in streams.items()
        for source, sequence in enumerate(stream.sequences)
        for number in range(stream.shards_needed(source))
        if is_damaged(sequence.folder, number, verify=verify)
    ]


USERS = "users"  # a file beside the shards: the runs that read them


def note_user(plan: dict, run: Path | None) -> None:
    """Say that a run directory reads the shards of a plan; None: they were prepared for none yet."""
    line = "" if run is None else json.dumps(str(run.absolute())) + "\n"
    for folder in folders_of(plan):
        with suppress(OSError):  # a cache that this user may only read is pruned by another one
            folder.mkdir(parents=True, exist_ok=True)
            users = folder / USERS
            if not users.exists() and any(folder.glob("shard-*.json")):
                (folder / ".lock").touch()  # by an earlier version: its time tells that they are used
                continue
            with open(users, "a+", encoding="utf-8") as file:
                file.seek(0)
                if line not in file.read():
                    file.write(line)


def discard_damaged(plan: dict) -> None:
    """Delete damaged seals of the plan's shards, said in a line each, so that these shards are made again."""
    for folder in folders_of(plan):
        if not damaged_seals(folder):
            continue  # without the lock: another run may be at work there for hours
        with file_lock(folder / ".lock"):
            for path in damaged_seals(folder):
                remove_file(path)
                print(
                    f"data: {path}: is not as it was written; made again from the source", file=sys.stderr, flush=True
                )


@contextmanager
def locks(plan: dict) -> Iterator[None]:
    """Hold the locks of all sequences of a plan, always taken in the same order."""
    with ExitStack() as stack:
        for folder in folders_of(plan):
            stack.enter_context(file_lock(folder / ".lock"))
        yield


# The process that prepares shards ahead of the training that reads them, and how the ranks wait for it.

RETRIES = "retries"  # a file of the preparation's folder
POLL_S = 0.05
START_GRACE_S = 120.0  # in which a rank that attached believes that the preparing process is being started, also again


def start_preparation(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    watchlist: str | Path | None = None,
    run: Path | None = None,
) -> "Preparation":
    """Prepare the recipe's rows in a child process, unless they all are there; returns at once, or when damaged shards
    are made again.

    sources: (train, validation) as open_sources gives them. run: the directory for which `--prune` keeps the shards.
    watchlist: a saved Watchlist for which the training text is searched on the way; shards that are sealed already are
    not read again for it (`prepare_now` does that). Raises what make_plan raises.
    """
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, run)
    discard_damaged(plan)
    damaged = damaged_shards(plan, streams_of(plan), verify=False)
    preparation = Preparation(plan)
    if damaged or next_shard(streams_of(plan)) is not None:
        preparation.start({"plan": plan, "recipe": recipe, "tokenizer": tokenizer})
    if damaged:
        print(f"data: {len(damaged)} prepared shards are damaged and made again first", file=sys.stderr, flush=True)
        preparation.wait_until(
            lambda: not damaged_shards(plan, streams_of(plan), verify=False), what="what is made again"
        )
    return preparation


class Preparation:
    """A plan, and the process that carries it out. waited_s: seconds this rank has waited for shards."""

    def __init__(self, plan: dict):
        self.plan, self.waited_s = plan, 0.0
        self.folder = Path(plan["cache_dir"]) / "preparations" / digest(plan, KEY_LENGTH)
        self.child: subprocess.Popen | None = None
        self.task: dict | None = None
        self.seen = time.monotonic()  # when the process that prepares was last seen to run
        self.killed = False  # whether it was killed before, and started again
        self.elsewhere = False  # whether the process that prepares is one of another machine

    def description(self) -> dict:
        """Return what another rank needs to attach; JSON."""
        return {"plan": self.plan, "machine": machine(self.plan["cache_dir"])}

    @classmethod
    def attach(cls, description: dict) -> "Preparation":
        attached = cls(description["plan"])
        attached.elsewhere = machine(attached.plan["cache_dir"]) != description["machine"]
        return attached

    def start(self, task: dict) -> None:
        """Start the child with its task; if another one works on this very plan, it is left to it."""
        self.task = task
        require_writable(self.folder, lacks="some rows of this recipe are")
        self.folder.mkdir(parents=True, exist_ok=True)
        # Waiting ranks hold it for an instant to probe it: hence the second.
        held = lock(self.folder / ".lock", wait_s=1.0)
        if held is None:
            return
        try:
            remove_file(self.folder / "failure.json")
            remove_file(self.folder / RETRIES)
            with open(self.folder / "log.txt", "wb") as log:
                self.child = commands.start(
                    "-m",
                    "pipeline.data",
                    "--ahead",
                    self.folder,
                    log=log,
                    stdin=subprocess.PIPE,
                    env=commands.environment(TOKENIZERS_PARALLELISM="true"),
                )
            assert self.child.stdin is not None
            with self.child.stdin as pipe:  # by pipe: the child runs this very recipe, not one read from a file again
                pickle.dump(task, pipe)
        finally:
            held.release()  # the child takes it

    def is_running(self) -> bool:
        """Return whether some process is preparing this plan."""
        if self.child is not None:
            return self.child.poll() is None
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder / ".lock")
        if held is None:
            return True
        held.release()
        # That no lock is seen here says nothing of a process on another machine; its run ends with it.
        unseen = self.elsewhere and self.task is None
        return unseen and not (self.folder / "failure.json").exists()

    def wait_until(self, there: Callable[[], bool], *, what: str) -> None:
        """Wait until `there()` is true. Raises what the preparing process failed with; HangError when it was killed
        twice."""
        if there():
            return
        started = time.monotonic()
        with waiting(f"data: preparing {what}", detail=self.progress, after_s=1.0):
            while not there():
                time.sleep(POLL_S)
                if self.is_running():
                    self.seen = time.monotonic()
                    beat()  # it may fetch a large file for long; this rank does not hang
                elif not there():
                    self._go_on_or_raise(what)
        self.waited_s += time.monotonic() - started

    def num_retries(self) -> int:
        """Return how often the preparing process has read something again since it was started."""
        return retries_in(self.folder / RETRIES)

    def progress(self) -> str:
        """Return how far each training source is."""
        stream = streams_of(self.plan)["train"]
        return ", ".join(
            f"{about['name']}: {short_count(sequence.rows * self.plan['row_tokens'])} tokens are ready"
            for about, sequence in zip(self.plan["train"]["sequences"], stream.sequences, strict=True)
        )

    def _go_on_or_raise(self, what: str) -> None:
        path = self.folder / "failure.json"
        if path.exists():
            failure = read_json(path)
            raise getattr(errors, failure["class"], DataError)(failure["message"])
        if self.child is None and self.task is not None:
            self.start(self.task)  # It was another run's child, and ended with that run.
            return
        if self.child is None and time.monotonic() - self.seen < START_GRACE_S:
            return
        status = self.child.returncode if self.child is not None else 0
        ended_by_itself = status > 0 and status != Preempted.status  # 0 and 75: by SIGTERM
        if self.child is not None and not ended_by_itself and not self.killed:
            print(
                f"data: the process that prepares the data was killed (status {status}), often for memory; it is "
                "started again",
                file=sys.stderr,
                flush=True,
            )
            self.child, self.killed = None, True
            return
        kind = DataError if ended_by_itself else HangError
        raise kind(
            f"{self.folder}: the process that prepares the data ended before it had made {what}; its last words are "
            "in log.txt there. Run the same command again: preparation goes on where it stopped."
        )

    def close(self) -> None:
        """End the child, if there is one; what is sealed stays."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
