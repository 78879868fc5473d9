"""Restore a published run: what was pushed of it in a run directory, verified, whole or not at all. And the Hub as
both ways meet it: requests that end, questions asked again, and whether a repository may be written."""

import errno
import os
import re
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pipeline.process.commands import command
from pipeline.process.errors import (
    CannotWriteError,
    DamagedFileError,
    DataError,
    InputMissingError,
    ServiceError,
    TandemError,
)
from pipeline.process.network import client_that_gives_up
from pipeline.process.secrets import redacted
from pipeline.process.storage import new_folder, remove_file
from pipeline.recipe import Recipe
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, read_seal, sealed_files
from pipeline.run_dir.run_directory import RunDirectory, read_manifest

# Asking the Hub again when it is away, and not when it refuses.

ATTEMPTS = 5
FIRST_WAIT_S = 2.0
# A Hub that asks for more is not waited for here: who called decides, with ServiceError.wait_s.
LONGEST_WAIT_S = 60.0
# What the Hub called a file cannot be one here
NAMES = (errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR)
T = TypeVar("T")


def retried(action: Callable[[], T], *, what: str) -> T:
    """Return the action's value; a Hub that is away is asked again with growing waits, one that refuses is not."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    wait = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except HFValidationError as error:
            raise InputMissingError(f"{what}: {error} Give the repository as NAMESPACE/NAME.") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if isinstance(error, TandemError) or not _is_of_library(error):
                raise
            raise _odd_answer(what, error) from None
        except (RuntimeError, OSError, HTTPError) as error:
            answer = _answer_of(error)
            if answer is None and getattr(error, "errno", None) in NAMES and _is_of_library(error):
                raise _odd_answer(what, error) from None
            if answer is None:
                raise  # the disk or our mistake, not the Hub
            status, text = answer
            if status is not None and status < 500 and status not in (408, 429):
                raise ServiceError(f"{what}: the Hub refuses ({status}: {text}). {_cure(status)}") from None
            asked = _asked_to_wait(error)
            if attempt == ATTEMPTS or asked > LONGEST_WAIT_S:
                attempts = f"in {attempt} attempts" if asked <= LONGEST_WAIT_S else f"and asks to wait {asked:.0f} s"
                away = ServiceError(
                    f"{what}: the Hub did not answer well {attempts} ({text}). Nothing is lost: run the same command "
                    "later."
                )
                away.wait_s = asked
                raise away from None
            pause = max(wait, asked)
            print(f"{what}: {text}; trying again in {pause:.0f} s", flush=True)
            time.sleep(pause)
            wait *= 2
    raise AssertionError("unreachable")


def _odd_answer(what: str, error: BaseException) -> ServiceError:
    text = " ".join(redacted(str(error)).split())[:200]
    return ServiceError(
        f"{what}: the Hub answered what no Hub does ({type(error).__name__}: {text}), so nothing of it was used. "
        "Look at the repository's files, at HF_ENDPOINT and at the proxies between."
    )


def _is_of_library(error: BaseException) -> bool:
    """Return whether it was raised below a call of huggingface_hub: by its reading of an answer."""
    is_below = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        # BoundedAnswer (process/network.py) is called by the library.
        if module.startswith("pipeline.") and "BoundedAnswer" not in frame.f_code.co_qualname:
            is_below = False
        elif module.startswith("huggingface_hub."):
            is_below = True
    return is_below


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what is behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _answer_of(failed: BaseException) -> tuple[int | None, str] | None:
    """Return status (None when nobody answered) and text of the failed request, also when it is behind a RuntimeError.

    None for an error that is none of the Hub's.
    """
    # The HTTP client of huggingface_hub changes its name between versions; its errors share this base.
    from huggingface_hub.errors import HTTPError

    for error in _causes(failed):
        if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
            whole = redacted(" ".join(str(error).split()))  # before it is cut: a secret cut short is not known
            text = whole[:200] or type(error).__name__
            return getattr(getattr(error, "response", None), "status_code", None), text
    return None


def _asked_to_wait(failed: BaseException) -> float:
    """Return seconds of the answer's Retry-After; 0 where there is none, or a date."""
    for error in _causes(failed):
        value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
        if value.strip().isdigit():
            return float(value)
    return 0.0


def _cure(status: int) -> str:
    if status in (401, 403):
        return "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there."
    return "Look whether the name is right and the token may see it (`hf auth whoami`)."


def bound_waits() -> None:
    """Bound every request of this process from now on: it ends when the Hub is silent, asks to wait, or is not the Hub
    at all."""
    from huggingface_hub import set_client_factory

    def client() -> Any:
        made = client_that_gives_up()
        made.event_hooks["response"] = [*made.event_hooks["response"], _look_at]
        return made

    set_client_factory(client)


def _look_at(response: Any) -> None:
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import hf_raise_for_status

    kind = response.headers.get("Content-Type", "")
    if response.status_code == 200 and kind.startswith("text/html"):
        raise HTTPError(
            f"{response.url}: a web page came instead of an answer; a proxy or a login page stands between"
        )
    if response.status_code in (429, 503) and "Retry-After" in response.headers:
        response.read()
        hf_raise_for_status(response)  # else the library sleeps for as long as the answer asks for


MOST_FILES = 10_000  # of a repository; a run of some hundred shards has as many

STATE = "last-checkpoint"  # as transformers' hub_strategy="checkpoint" names it


def pull(repo_id: str, *, runs: str = "runs", revision: str | None = None) -> RunDirectory:
    """Download a repository into runs/<name of the run>: its model under model/ and, where it was pushed, its newest
    checkpoint, from which the run goes on; both verified.

    Raises CannotWriteError when a run of that name exists, DataError when the repository is no pushed run or its files
    are not those that were sealed, ServiceError when the Hub refuses or stays away.
    """
    from huggingface_hub import HfApi

    bound_waits()
    found = retried(lambda: HfApi().model_info(repo_id, revision=revision), what=f"reading {repo_id}")
    commit, files = found.sha, found.siblings or []
    if len(files) > MOST_FILES:
        raise DataError(
            f"{repo_id}: has {len(files):,} files, so it is no run that was pushed with this program. Do not use it."
        )
    with beside(Path(runs)) as snapshot:
        download(repo_id, commit, snapshot)
        target = Path(runs) / run_name(snapshot, repo_id, needs=("config.json", SEAL))
        if target.exists():
            raise CannotWriteError(
                f"{target}: the run exists, and pulling would mix two. Rename or remove it, or pull into another "
                "folder with --runs."
            )
        with new_folder(target) as restored:
            run = RunDirectory(restored)
            place_records(snapshot, run)
            run.model.mkdir()
            _move_sealed_files(snapshot, run.model, repo_id)
            _refuse_damaged(run.model, repo_id)
            place_state(snapshot, run, repo_id)
            facts: dict[str, Any] = {"pulled_from": {"id": repo_id, "commit": commit}}
            manifest = run.read_manifest()
            if manifest.get("status") == "finished":  # the run itself notes the time when the push is over
                facts["finished"] = manifest.get("finished", manifest.get("ended", time.time()))
            run.update_manifest(**facts)
    return RunDirectory(target)


@contextmanager
def beside(runs: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of the run directories, removed afterwards: a checkpoint is renamed, not
    copied."""
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-pull-", dir=runs) as folder:
        snapshot = Path(folder) / "snapshot"  # a level below where runs are looked for
        snapshot.mkdir()
        yield snapshot


def download(repo_id: str, commit: str | None, folder: Path, *, only: list[str] | None = None) -> None:
    """Download the files of a commit, or those that match, into the folder."""
    from huggingface_hub import snapshot_download

    get = lambda: snapshot_download(repo_id, revision=commit, local_dir=folder, allow_patterns=only)  # noqa: E731
    retried(get, what=f"downloading {repo_id}")


def run_name(snapshot: Path, repo_id: str, *, needs: tuple[str, ...] = ()) -> str:
    """Return the name of the run that was pushed. Raises DataError when it was none of ours, or cannot be a folder's
    name here."""
    missing = [name for name in ("run_manifest.json", "recipe.yaml", *needs) if not (snapshot / name).exists()]
    if missing:
        raise DataError(
            f"{repo_id}: {', '.join(missing)} missing, so it is no run that was pushed with this program. "
            "A model alone needs no pull: name it where a model is asked for."
        )
    manifest, wrong = read_manifest(snapshot / "run_manifest.json")
    if wrong:
        raise DataError(
            f"{repo_id}: its run_manifest.json is not what a run writes ({'; '.join(wrong)}), so it is no run of this "
            "program. Do not use it."
        )
    name = str(manifest.get("name"))
    # It becomes a folder's name here, and anybody may have written it.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise DataError(
            f"{repo_id}: its manifest names the run {name!r}, which cannot be a folder. Take its files from the Hub "
            "by hand."
        )
    return name


def place_records(snapshot: Path, run: RunDirectory) -> None:
    """Move what the run wrote beside its model to where a run keeps it."""
    for target in run.records():
        if (snapshot / target.name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(snapshot / target.name, target)


def _move_sealed_files(source: Path, target: Path, repo_id: str) -> None:
    """Move what the seal names; the card, and what others put there, stays behind."""
    for name, path in files_of(source, repo_id).items():
        if not (target / name).resolve().is_relative_to(target.resolve()):
            raise DataError(f"{repo_id}: its seal names a file outside the model ({name}). Do not use it.")
        if path.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / name)


def files_of(folder: Path, repo_id: str) -> dict[str, Path]:
    """Return the same as sealed_files; raise DataError when somebody else wrote the seal."""
    try:
        return sealed_files(folder)
    except DamagedFileError as error:
        raise DataError(f"{repo_id}: {SEAL}{str(error).removeprefix(str(folder / SEAL))}") from None


def place_state(snapshot: Path, run: RunDirectory, repo_id: str) -> Path | None:
    """Move the checkpoint that was pushed to the run's checkpoints; None when none was."""
    state = snapshot / STATE
    if not (state / SEAL).exists():
        return None
    _refuse_damaged(state, repo_id)
    target = run.checkpoint(read_seal(state).get("step", 0))
    with new_folder(target) as folder:
        _move_sealed_files(state, folder, repo_id)
    return target


def _refuse_damaged(folder: Path, repo_id: str) -> None:
    if found := problems(folder):
        raise ServiceError(
            f"{repo_id}: the files are not those that were sealed ({'; '.join(found)}). Pull again; if it stays so, "
            "the upload was damaged."
        )


def what_it_can(run: RunDirectory) -> str:
    """Return what a pulled run is good for, and what is missing."""
    path = run.path
    lines = [f"{path}: restored. Talk to it: {command('chat', path)}"]
    checkpoint = run.whole_checkpoint()
    manifest: dict[str, Any] = run.read_manifest()
    if checkpoint is None:
        lines.append(
            "It has no checkpoint to go on training from: none was pushed (hub.strategy: checkpoint, or hub push "
            "--with-state). It can be evaluated, exported, and start another run (model.start_from)."
        )
    elif "finished" not in manifest:
        entry = f"pipeline/{'sft' if manifest.get('stage') == 'sft' else 'pretrain'}.py"
        lines.append(
            f"Go on from {checkpoint.name}: accelerate launch {entry} {run.recipe} run.directory={path.parent}"
        )
    return "\n".join(lines)


# A run goes on where it has no checkpoint: the newest whole one that it pushed is fetched before anything else is
# done.

# A state that arrived damaged is one commit; beyond some, something else is wrong.
COMMITS = 10


def restore_from_hub(recipe: Recipe, run: RunDirectory) -> None:
    """Fetch the pushed checkpoint of a run that has none here, under hub.strategy checkpoint and run.resume auto.

    What is there afterwards is what a start on the old machine would find; a run that has finished is pulled whole. A
    state that does not verify is named, and the commit before it is tried. Raises ServiceError when the Hub does not
    say what it has: to begin anew would repeat the run and write over its state.
    """
    hub = recipe.hub
    if hub.id is None or hub.strategy != "checkpoint" or recipe.run.resume != "auto":
        return
    if by_step(run.checkpoints) or "finished" in run.read_manifest():
        return
    branch = (hub.revision or "main").replace("{run}", run.name)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        print(f"HF_HUB_OFFLINE is set, so {hub.id} was not asked for a checkpoint of this run.", flush=True)
        return
    bound_waits()
    for commit in _commits_with_state(hub.id, branch):
        with beside(run.path.parent) as snapshot:
            download(hub.id, commit, snapshot, only=[f"{STATE}/*", *(path.name for path in run.records())])
            theirs = run_name(snapshot, hub.id)
            if theirs != run.name:
                print(
                    f"{hub.id}: holds a checkpoint of the run {theirs}, and this run is {run.name}, which begins "
                    "anew and will replace it.",
                    flush=True,
                )
                return
            if read_manifest(snapshot / "run_manifest.json")[0].get("status") == "finished" and not run.path.exists():
                pull(hub.id, runs=str(run.path.parent), revision=commit)
                print(f"{run.path}: the finished run was restored from {hub.id}@{commit[:7]}", flush=True)
                return
            try:
                _place(snapshot, run, hub.id)
            except ServiceError as error:
                print(f"{hub.id}@{commit[:7]}: {error} The commit before it is tried.", flush=True)
                continue
        step = by_step(run.checkpoints)[-1].name
        run.update_manifest(pulled_from={"id": hub.id, "commit": commit})
        print(f"{run.path}: {step} was restored from {hub.id}@{commit[:7]}", flush=True)
        return


def _commits_with_state(repo_id: str, branch: str) -> list[str]:
    """Return the newest first; none when there is no such repository or branch, or no state in it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()

    def ask() -> list[str]:
        try:
            info = api.model_info(repo_id, revision=branch)
            if f"{STATE}/{SEAL}" not in {sibling.rfilename for sibling in info.siblings or []}:
                return []
            return [commit.commit_id for commit in api.list_repo_commits(repo_id, revision=branch)][:COMMITS]
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return []

    try:
        return retried(ask, what=f"asking {repo_id} for a checkpoint of this run")
    except ServiceError as error:
        raise ServiceError(
            f"{error} The run has no checkpoint here; to begin anew in any case, whatever the Hub has: "
            "run.resume=never."
        ) from None


def _place(snapshot: Path, run: RunDirectory, repo_id: str) -> None:
    trained_here = run.has_trained()  # its own records go further than those that were pushed with a checkpoint
    place_state(snapshot, run, repo_id)
    if not trained_here:
        for path in run.records():
            remove_file(path)
        place_records(snapshot, run)


# Before step 1: whether the Hub will take the model.

PATIENCE_S = 10.0
LOGIN = "Run `hf auth login`, or set HF_TOKEN to a token that may write there; or remove hub.id."


def write_findings(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes): whether hub.id may be written, asked before step 1."""
    where = recipe.where("hub.id")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [], [f"{where}: HF_HUB_OFFLINE is set, so write access to {recipe.hub.id} was not checked."]
    outcome = _within(
        PATIENCE_S,
        lambda: _refusal(recipe.hub.id or "", private=recipe.hub.private) or _unknown_license(recipe.hub.license),
    )
    if isinstance(outcome, BaseException):
        reason = " ".join(str(outcome).split())[:160] or type(outcome).__name__
        return [], [f"{where}: the Hub did not say whether {recipe.hub.id} may be written ({reason})."]
    if not outcome:
        return [], []
    run = RunDirectory.of(recipe)
    if run.has_trained():
        return [], [
            (
                f"{where}: {outcome} The run has trained and goes on; what is not published is listed at its end, for "
                f"`{command('hub', 'push', run.path)}`."
            )
        ]
    return [ServiceError(f"{where}: {outcome}")], []


def _refusal(repo_id: str, *, private: bool) -> str | None:
    """Return why a push to the repository would be refused; None when it would not. Raises when the Hub does not
    answer."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if get_token() is None:
        return f"the model is to be pushed to {repo_id}, and there is no token of the Hub here. {LOGIN}"
    api = HfApi()
    try:
        validate_repo_id(repo_id)
        user = api.whoami()
        owner = repo_id.split("/")[0] if "/" in repo_id else user["name"]
        full = repo_id if "/" in repo_id else f"{owner}/{repo_id}"
        try:
            api.auth_check(full, write=True)
            public = api.model_info(full).private is False
        except RepositoryNotFoundError:
            return _cannot_create(user, owner, full)
    except HFValidationError as error:
        return f"{error} Write NAMESPACE/NAME."
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status not in (401, 403):
            raise
        return f"the Hub refuses to let this token write to {repo_id} (status {status}). {LOGIN}"
    if private and public:
        return (
            f"{full} exists and is public, and hub.private is true. Make it private on the Hub, name another one, or "
            "write hub.private: false."
        )
    return None


def _unknown_license(license: str | None) -> str | None:
    """Return the Hub refuses a whole upload whose card names a license that it does not know; which it knows, it alone
    can say."""
    from huggingface_hub import ModelCard

    if license is None:
        return None
    try:
        ModelCard(f'---\nlicense: "{license}"\n---\n').validate()
    except ValueError:
        return (
            f"the Hub knows no license {license!r} (hub.license), and would take no model under it. Write one of "
            "huggingface.co/docs/hub/repositories-licenses, or leave it out."
        )
    return None


def _cannot_create(user: dict[str, Any], owner: str, repo_id: str) -> str | None:
    """Return why this user could not create the repository, as far as the token says."""
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs") or []} | {user["name"]: "admin"}
    token = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if owner not in roles:
        return (
            f"{repo_id} does not exist, and {user['name']} cannot create it: it is no member of {owner}. Name one of "
            f"{', '.join(sorted(name for name, role in roles.items() if role != 'read'))}, or log in as somebody else."
        )
    if roles[owner] == "read" or token == "read":
        return f"{repo_id} does not exist, and this token may only read. {LOGIN}"
    return None


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return what `ask` gives, or the exception that kept it from giving anything in that time."""
    answer: list[Any] = [TimeoutError(f"no answer in {seconds:.0f} s")]

    def run() -> None:
        try:
            answer[0] = ask()
        except Exception as error:  # the client raises many kinds; whichever it is, the service is away
            answer[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]
