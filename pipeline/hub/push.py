"""Publish a model of a run, and look afterwards whether what is on the Hub is what was sent."""

import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

from pipeline.evals.core_bundle import git_blob
from pipeline.hub.card import model_card
from pipeline.hub.pull import STATE, bound_waits, retried
from pipeline.process.commands import end_with, yield_to_training
from pipeline.process.errors import (
    CannotWriteError,
    DataError,
    InputMissingError,
    RecipeError,
    ServiceError,
    TandemError,
)
from pipeline.process.secrets import kinds_in, known_secrets, redacted
from pipeline.process.storage import read_json, sha256_file, write_text
from pipeline.process.user_code import CodeFolder
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.checkpoints import SEAL, problems, read_seal, sealed_files
from pipeline.run_dir.hub_queue import MODEL, HubQueue, Item
from pipeline.run_dir.run_directory import RunDirectory

# Verification that the Hub has what was sent: by the hashes that it states, or downloaded, loaded and run without this
# package.

# Of logits in fp32 between the class of this program and the published code.
CLOSE = 1e-4
NAMING_CLASSES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")


def verify(
    sums: dict[str, str], *, model: Path, repo_id: str, commit: str, within: Path, trust_code: bool = False
) -> str:
    """Download every file of the commit into an empty folder and compare it; then a process without this package loads
    the model from there, and its ids and logits must be ours. Returns what was done. ServiceError says what differs.

    A model with code files that are not this program's is compared and not loaded, unless they are trusted: that would
    run them.

    model: the local folder of the model. within: where the download is kept meanwhile; in the queue, what a killed
    process leaves behind is cleared away.
    """
    wrong = []
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=within) as folder:
        for name, expected in sums.items():
            download = partial(hf_hub_download, repo_id, name, revision=commit, local_dir=folder)
            path = Path(retried(download, what=f"downloading {name}"))
            if sha256_file(path) != expected:
                wrong.append(name)
            if not (model / name).exists():
                path.unlink()  # of large ones only those that are loaded stay
        _refuse(wrong, repo_id, commit)
        if not trust_code and (unknown := unknown_code(model)):
            return f"downloaded again and equal; not loaded, since {', '.join(unknown)} is not this program's code"
        _load_in_isolation(Path(folder), model=model, published=f"{repo_id}@{commit}")
    return "downloaded again, equal and loaded"


def unknown_code(model: Path) -> list[str]:
    """Return the names of the Python files of a model folder that are not those which this program writes, and of the
    classes that its JSON files take from another repository."""
    from pipeline.model.saved import CODE_FILES

    ours = {file.name: sha256_file(file) for file in CODE_FILES}
    files = {str(file.relative_to(model)): file for file in sorted(model.rglob("*.py"))}
    elsewhere = [line for name in NAMING_CLASSES for line in _classes_elsewhere(model / name)]
    return [name for name, file in files.items() if ours.get(name) != sha256_file(file)] + elsewhere


def _classes_elsewhere(file: Path) -> list[str]:
    """Return what the file's auto_map takes from another repository, as `owner/name--module.Class`."""
    found = read_json(file).get("auto_map") if file.is_file() else None
    values = list(found.values()) if isinstance(found, dict) else [found]
    named = [str(name) for value in values for name in (value if isinstance(value, list) else [value])]
    return [f"{name} of {file.name}" for name in named if "--" in name]


def compare_sums(files: dict[str, Path], *, repo_id: str, commit: str) -> None:
    """Compare as verify does, by the hashes that the Hub states: a checkpoint is too large to fetch again at every
    save."""
    wrong = []
    for name, path in files.items():
        url = hf_hub_url(repo_id, name, revision=commit)
        stated = retried(partial(get_hf_file_metadata, url), what=f"reading the hash of {name}").etag
        # Large files are stated by their sha256, small ones as git does.
        if stated != (sha256_file(path) if len(stated or "") == 64 else git_blob(path.read_bytes())):
            wrong.append(name)
    _refuse(wrong, repo_id, commit)


def _refuse(wrong: list[str], repo_id: str, commit: str) -> None:
    if wrong:
        raise ServiceError(
            f"{repo_id}@{commit}: the Hub gives back other bytes than were sent for {', '.join(wrong)}. Push again; "
            "do not use this commit."
        )


def _load_in_isolation(folder: Path, *, model: Path, published: str) -> None:
    """Load it in a process without this package. The files are ours by their hashes: no code is run but what was
    sent."""
    import torch
    from safetensors.torch import load_file

    from pipeline.evals.subject import open_model
    from pipeline.hub import isolated_load_test
    from pipeline.tokenizer.load import open_tokenizer

    output = folder / ".isolated.safetensors"
    # -P: the script's folder, which is in this package, is not searched for imports.
    command = [sys.executable, "-P", str(isolated_load_test.__file__), str(folder), str(output)]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ServiceError(
            f"{published}: arrived whole, and a program without this package cannot load it ({reason}). Do not use "
            "this commit; please report it."
        )
    theirs = load_file(output)
    ids_T = torch.tensor(
        open_tokenizer(str(model), revision=None, beside=None, where=str(model))(isolated_load_test.TEXT).input_ids
    )
    ids_T = ids_T[: len(theirs["ids"])]
    ours = open_model(str(model), code=CodeFolder(None), dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV = ours(ids_T[None]).logits[0].float()
    same = torch.equal(ids_T, theirs["ids"]) and torch.allclose(logits_TV, theirs["logits"], rtol=0, atol=CLOSE)
    if not same:
        raise ServiceError(
            f"{published}: arrived whole, and a program without this package computes other ids or logits than this "
            "one. Do not use this commit; please report it."
        )


# What a repository holds: the model at its root, what tells how it came to be, and what going on takes.

CARD = "README.md"


def collect(
    data: RunData, *, model: Path, step: int, repo_id: str, folder: Path, state: Path | None = None
) -> dict[str, Path]:
    """Return what is published, name in the repository -> file: the model, the records of the run, the card made in
    `folder`, and of `state`, a whole checkpoint, every file under last-checkpoint/."""
    for whole in (model, *([state] if state else [])):
        if found := problems(whole):
            raise DataError(
                f"{whole}: is damaged ({'; '.join(found)}) and is not pushed. Remove the folder and run the training "
                "command again: it writes it anew."
            )
    files = dict(sorted(sealed_files(model).items()))
    if state:
        files |= {f"{STATE}/{name}": path for name, path in sorted(sealed_files(state).items())}
    for path in data.run.records():
        if path.exists():
            # A copy: a row or a report written meanwhile must not change what was hashed.
            files[path.name] = Path(shutil.copy2(path, folder / path.name))
    return files | {CARD: write_card(data, model=model, step=step, repo_id=repo_id, folder=folder)}


def write_card(data: RunData, *, model: Path, step: int, repo_id: str, folder: Path) -> Path:
    """Write README.md into the folder and return it."""
    write_text(folder / CARD, model_card(data, model=model, step=step, repo_id=repo_id))
    return folder / CARD


def is_of_a_run(name: str) -> bool:
    """Return whether a file of the repository tells of one run only: the next push there removes it, or replaces
    it."""
    return name in {CARD, *(path.name for path in RunDirectory("").records())} or name.startswith(f"{STATE}/")


# Nothing secret and nothing executable by loading it leaves this machine: every byte is looked at before an upload.

_CHUNK, _OVERLAP = 16 * 2**20, 4096
_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy"}


def secrets_in(path: Path, known: dict[str, bytes]) -> list[str]:
    """Return one line for each kind of secret in a file; the secret itself is never repeated."""
    found: set[str] = set()
    for block in _blocks(path):
        found |= kinds_in(block)
        found |= {f"the value of {name}" for name, value in known.items() if value in block}
    return sorted(found)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in overlapping blocks: no secret of up to 4 KiB falls between two."""
    with open(path, "rb") as file:
        kept = b""
        while data := file.read(_CHUNK):
            yield kept + data
            kept = data[-_OVERLAP:]


def is_pickle(path: Path) -> bool:
    """Return whether loading the file could run code in it: by suffix, by pickle's first bytes, by torch's zip
    layout."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    with open(path, "rb") as file:
        head = file.read(4)
    if len(head) > 1 and head[0] == 0x80 and head[1] in (2, 3, 4, 5):
        return True
    if head == b"PK\x03\x04" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return False


def refusals(files: dict[str, Path]) -> list[str]:
    """Return why these files (name in the repository -> path) must not be uploaded; empty when all may."""
    known = known_secrets()
    lines = []
    for name, path in files.items():
        if is_pickle(path):
            lines.append(f"{name}: is a pickle, which runs code when it is loaded")
        lines += [f"{name}: contains {kind}" for kind in secrets_in(path, known)]
    return lines


# One branch of a repository on the Hub that takes commits.


class Upload:
    """A branch of a repository that takes commits. Every request is asked again while the Hub is away."""

    def __init__(self, repo_id: str, *, branch: str, private: bool):
        self.api, self.repo_id, self.branch, self.private = HfApi(), repo_id, branch, private

    def open(self) -> None:
        """Create the repository and the branch where they are missing; ServiceError when it is public and must not
        be."""
        api = self.api
        create = lambda: api.create_repo(self.repo_id, private=self.private, exist_ok=True)  # noqa: E731
        self.repo_id = retried(create, what=f"creating {self.repo_id}").repo_id
        info = retried(lambda: api.model_info(self.repo_id), what=f"reading {self.repo_id}")
        if self.private and not info.private:
            raise ServiceError(
                f"{self.repo_id}: the repository exists and is public, and the recipe asks for a private one "
                "(hub.private), so nothing was uploaded. Make it private on the Hub, name another repository, or push "
                "with --public."
            )

        def head() -> tuple[Any, bool]:
            try:
                return api.model_info(self.repo_id, revision=self.branch), False
            except RevisionNotFoundError:
                api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)
                return api.model_info(self.repo_id, revision=self.branch), True

        new = False
        self.head: Any = info
        if self.branch != "main":
            self.head, new = retried(head, what=f"reading {self.branch}")
        # A new branch begins with what main holds, which is another run's.
        self.ours = (lambda name: name != ".gitattributes") if new else is_of_a_run

    def commit(
        self, files: dict[str, Path], *, queue: HubQueue, item: Item, message: str, replaces: list[str]
    ) -> tuple[str, bool]:
        """Return one commit with these files, without those of an earlier push that are not among them.

        Gives the commit, and whether it was found there: the answer to an earlier attempt may have been lost.
        """
        there = {sibling.rfilename for sibling in self.head.siblings or []}
        left = {name for name in there - set(files) if name in replaces or self.ours(name)}
        before = item.before

        def commit() -> tuple[str, bool]:
            nonlocal before
            if before is not None and (there := self._made_since(before, files[SEAL])):
                return there, True
            if before is None:
                before = self.head.sha
                queue.note(item, before=before)
            # Made anew for each attempt: an operation remembers what it has uploaded.
            add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
            remove = [CommitOperationDelete(path_in_repo=name) for name in sorted(left)]
            try:
                made = self.api.create_commit(
                    self.repo_id, operations=[*add, *remove], commit_message=message, revision=self.branch
                )
            except ValueError as error:  # the client asks the Hub about the card's metadata before it sends anything
                if not isinstance(error.__cause__, BadRequestError):
                    raise ConnectionError(f"an answer that cannot be read: {error}") from None
                raise DataError(
                    f"{self.repo_id}: the Hub does not take the card ({' '.join(str(error).split())}). Correct "
                    "hub.license, hub.language or run.tags."
                ) from None
            return made.oid, False

        return retried(commit, what=f"uploading to {self.repo_id}")

    def _made_since(self, before: str, seal: Path) -> str | None:
        """Return the newest commit when it is not `before` and holds the model that `seal` seals."""
        newest = self.api.model_info(self.repo_id, revision=self.branch).sha
        if newest is None or newest == before:
            return None
        with tempfile.TemporaryDirectory(prefix="tandem-push-") as folder:
            try:
                theirs = hf_hub_download(self.repo_id, SEAL, revision=newest, local_dir=folder)
            except RemoteEntryNotFoundError:  # not its base, which is also a Hub that was not reached
                return None
            return newest if Path(theirs).read_bytes() == seal.read_bytes() else None

    def tag(self, step: int, commit: str) -> None:
        """Tag the commit step-<n>, which from_pretrained takes as a revision; on another branch than main
        <branch>-step-<n>. A later one replaces it."""
        name = f"step-{step}" if self.branch == "main" else f"{self.branch}-step-{step}"

        def tag() -> None:
            try:
                self.api.create_tag(self.repo_id, tag=name, revision=commit)
            except HfHubHTTPError as error:
                if getattr(error.response, "status_code", None) != 409:
                    raise
                self.api.delete_tag(self.repo_id, tag=name)
                self.api.create_tag(self.repo_id, tag=name, revision=commit)

        retried(tag, what=f"tagging {name}")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A verified upload. files: name in the repository -> sha256."""

    repo_id: str
    commit: str
    url: str
    files: dict[str, str]


def push(
    run: RunDirectory,
    *,
    repo_id: str | None = None,
    private: bool | None = None,
    with_state: bool = False,
    trust_code: bool = False,
) -> Pushed:
    """Publish the finished model and what waits before it, or, before the end, the checkpoints that wait.

    repo_id, private: default the recipe's hub.id and hub.private. with_state: also the newest checkpoint, for going on
    from, as under hub.strategy checkpoint. trust_code: load the published model also with code that is not this
    program's. Raises RecipeError when no repository is named, InputMissingError without a model, CannotWriteError
    while the run publishes by itself, DataError when the model is damaged or a byte must not leave this machine,
    ServiceError when the Hub refuses, stays away, or gives back other bytes than it was sent.
    """
    data = read_run(str(run.path))
    hub = data.recipe.get("hub") or {}
    repo_id = repo_id or hub.get("id")
    if not repo_id:
        raise RecipeError(
            f"{run.recipe}: hub.id names no repository, so there is nowhere to push. Give --id NAMESPACE/NAME."
        )
    bound_waits()
    queue = HubQueue(run, strategy="checkpoint" if with_state else hub.get("strategy", "end"))
    with queue.hold(wait_s=2.0) as held:
        if not held:
            raise CannotWriteError(
                f"{queue.path}: the run publishes by itself, and two uploads would mix. Wait until it has ended."
            )
        if with_state and run.whole_checkpoint() is None:
            raise InputMissingError(
                f"{run.checkpoints}: there is no whole checkpoint, so there is no state to push. Push without "
                "--with-state."
            )
        if (run.model / SEAL).exists():
            queue.add_model(repo_id, again=True)  # with the report and the scores as they are now
        if not queue.items():
            raise InputMissingError(
                f"{run.model}: there is no finished model, so there is nothing to push. Let the run end: start its "
                "command again."
            )
        while item := queue.next():
            pushed = publish(queue, item, data=data, repo_id=repo_id, private=private, trust_code=trust_code)
    if (run.model / SEAL).exists():
        run.update_manifest(hub={"id": pushed.repo_id, "commit": pushed.commit, "time": time.time()})
    return pushed


def publish(
    queue: HubQueue,
    item: Item,
    *,
    data: RunData,
    repo_id: str,
    private: bool | None = None,
    trust_code: bool = False,
) -> Pushed:
    """Publish one item in one commit, verify it and write it down.

    An upload that an earlier process had finished, and did not live to write down, is not repeated.
    """
    model = queue.folder(item)
    hub = data.recipe.get("hub") or {}
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=queue.path) as folder:
        files = collect(
            data, model=model, step=item.step, repo_id=repo_id, folder=Path(folder), state=queue.state(item)
        )
        if lines := refusals(files):
            raise DataError(
                f"{data.run.path}: nothing was uploaded, because it would leave this machine:\n  "
                + "\n  ".join(lines)
                + "\nRemove it, then push again."
            )
        sums = {name: sha256_file(path) for name, path in files.items()}
        upload = Upload(
            repo_id,
            branch=(hub.get("revision") or "main").replace("{run}", data.name),
            private=hub.get("private", True) if private is None else private,
        )
        upload.open()
        if upload.repo_id != repo_id:  # the Hub has put the namespace before it, which the card must name
            write_card(data, model=model, step=item.step, repo_id=upload.repo_id, folder=Path(folder))
            sums[CARD] = sha256_file(files[CARD])
        replaces = (queue.last_published(repo_id) or {}).get("files", [])
        message = f"Upload run {data.name}" + ("" if item.name == MODEL else f" at step {item.step}")
        commit, found = upload.commit(files, queue=queue, item=item, message=message, replaces=replaces)
        if found:  # with the card and the manifest of that time
            sealed = read_seal(model)["files"]
            sums = {name: value for name, value in sums.items() if name in sealed or name.startswith(f"{STATE}/")}
        how = "the Hub's sums are equal"
        stated = {name for name in sums if item.name != MODEL or name.startswith(f"{STATE}/")}
        compare_sums({name: files[name] for name in stated}, repo_id=upload.repo_id, commit=commit)
        if item.name == MODEL:
            fetched = {name: value for name, value in sums.items() if name not in stated}
            how = verify(
                fetched, model=model, repo_id=upload.repo_id, commit=commit, within=queue.path, trust_code=trust_code
            )
    if queue.all and item.name != MODEL:
        upload.tag(item.step, commit)
    url = f"{constants.ENDPOINT}/{upload.repo_id}"
    print(f"{url}: {item.name} of step {item.step}, {len(sums)} files, {how}", flush=True)
    queue.done(item, repo_id=repo_id, revision=upload.branch, commit=commit, url=url, files=sorted(files))
    return Pushed(repo_id=upload.repo_id, commit=commit, url=url, files=sums)


# The process that publishes beside a run: what the queue holds, for as long as the run lives.

LOOK_EVERY_S = 1.0
# Between two rounds of attempts while the Hub is away; it doubles up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


def publish_while_training(run: RunDirectory, *, trainer: int) -> None:
    """Publish until the finished model is published or has failed once, or until the process `trainer` is gone.

    Nothing that happens here reaches the run: an item that fails stays in the queue with its reason.
    """
    end_with(trainer)  # in the middle of an upload too: the queue keeps the item
    # Linux gives each thread a priority of its own: what is sent while the run trains yields to it, what its end waits
    # for does not.
    yielding = ThreadPoolExecutor(1, initializer=yield_to_training)
    bound_waits()
    hub = read_run(str(run.path)).recipe["hub"]
    queue = HubQueue(run, strategy=hub["strategy"])
    # The publisher of a start that was killed may still be leaving.
    with queue.hold(wait_s=60.0) as held:
        if not held:
            print(f"{queue.path}: another process publishes", flush=True)
            return
        pause, next_round, next_look, at_end = FIRST_PAUSE_S, 0.0, 0.0, False
        while True:
            at_end = at_end or any(item.name == MODEL for item in queue.items())  # then the look misses no checkpoint
            if hub["strategy"] != "end" and time.monotonic() >= next_look and not _look(queue, hub["id"]):
                next_look = time.monotonic() + FIRST_PAUSE_S
            item = queue.next()
            if at_end and (item is None or item.not_before > time.time() + hub["wait_at_end_s"]):
                return  # nothing is left, or the Hub asked for more time than the run's end has
            due = at_end or (item and item.name != MODEL and time.monotonic() >= next_round)
            if item and due and item.not_before <= time.time():
                attempt = partial(_try, queue, item, run=run, repo_id=hub["id"])
                published = attempt() if at_end else yielding.submit(attempt).result()
                if published and item.name == MODEL:
                    return
                if at_end and not published and all(left.not_before <= time.time() for left in queue.items()[-1:]):
                    return
                pause = FIRST_PAUSE_S if published else min(pause * 2, LONGEST_PAUSE_S)
                next_round = 0.0 if published else time.monotonic() + pause
            time.sleep(LOOK_EVERY_S)


def _look(queue: HubQueue, repo_id: str) -> bool:
    """Return whether what was saved could be queued; one that could not must not end the publishing of what comes
    later."""
    try:
        queue.add_checkpoints(repo_id)
        return True
    except Exception as error:  # the disk is full, a seal is damaged
        print(f"a checkpoint was not queued: {type(error).__name__}: {error}", flush=True)
        return False


def _try(queue: HubQueue, item: Item, *, run: RunDirectory, repo_id: str) -> bool:
    """Return whether it was published; if not, the queue holds why."""
    try:
        publish(queue, item, data=read_run(str(run.path)), repo_id=repo_id)
        return True
    except TandemError as error:
        reason, wait_s = str(error), error.wait_s if isinstance(error, ServiceError) else 0.0
    except Exception as error:  # an answer that nobody foresaw must not end the publishing of what comes later
        traceback.print_exc()
        reason, wait_s = f"{type(error).__name__}: {error}", 0.0
    reason = redacted(reason)  # the Hub's answer may repeat the request, token and all
    print(f"{item.name} of step {item.step} was not published: {reason}", flush=True)
    try:
        queue.note(item, error=reason, not_before=time.time() + wait_s if wait_s else item.not_before)
    except OSError as error:
        print(f"{queue.path}: the reason was not written down: {error}", flush=True)
    return False
