"""Datasets of the Hub: the commit and list of files are resolved once, each file is fetched when it is reached."""

import functools
import glob
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.process.errors import (
    InputMissingError,
    RecipeError,
    ServiceError,
    first_line,
)
from pipeline.process.network import is_hub_away, is_network, note_retry, set_http_timeouts
from pipeline.process.progress import count_text, on_terminal, waiting
from pipeline.process.secrets import redacted
from pipeline.process.storage import read_sealed_json, write_sealed_json
from pipeline.sources.files import SourceFile, is_saved, refuse_unreadable, shown
from pipeline.sources.patterns import bases_of, labelled, looked_in
from pipeline.sources.raw_rows import check_magic_bytes
from pipeline.sources.splits import refuse_tables, saved_files, split_files
from pipeline.sources.verify import HEAD_BYTES

LOG = logging.getLogger(__name__)
ATTEMPTS = 5
FIRST_WAIT_S = 1.0  # Doubled after each attempt.
PATHS_A_REQUEST = 500
ANSWER_S = 10.0  # for the list of files, which a start waits for
IGNORED_CARDS = (".huggingface.yaml", "dataset_infos.json")  # of datasets 1, and a card beside the card
FOOTERS = (b"PAR1", b"ARROW1")  # at both ends of such files
EMPTY_ZIP = b"PK\x05\x06" + bytes(18)


def dataset_files(
    spec: Any, *, where: str, cache: Path, folder: str | None = None
) -> tuple[str | None, list[SourceFile]]:
    """Return (commit, files sorted by label) of the dataset `spec.id`: a folder on this machine where there is one,
    without a commit, else a repository of the Hub. Raises as local_dataset and hub_files do."""
    local = local_dataset(spec, where=where, folder=folder)
    if local is not None:
        return None, local
    _refuse_no_id(spec.id, where, bases_of(folder))
    return hub_files(spec, where=where, cache=cache)


def _refuse_no_id(name: str, where: str, bases: list[Path]) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    # A file, said before the Hub is asked for a dataset of that name.
    for base in bases:
        if (base / name).is_file():
            raise RecipeError(f"{where}.id: {name!r} is a file, and id names a dataset. Write files: {name}.")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise InputMissingError(
            f"{where}.id: {name!r} is neither a folder here nor a dataset's id, so there is nothing to read. "
            f"{looked_in(bases)} Write OWNER/NAME of the Hub, or a folder that is there."
        ) from None


def hub_files(spec: Any, *, where: str, cache: Path) -> tuple[str, list[SourceFile]]:
    """Return (commit, files sorted by path) of the dataset's split. Files that an earlier run fetched have their place
    already.

    Without the Hub the list of an earlier start is used, with a warning. Raises ServiceError when there is none,
    InputMissingError for a dataset, revision or file that does not exist for this user, RecipeError for a wrong
    choice.
    """

    def place(revision: str | None) -> Path:
        key = repr((spec.id, revision, spec.config, spec.split, spec.files))
        return cache / "hub" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    # Another version of the library may find other files in the same commit.
    decided_by = f"datasets {version('datasets')}"
    try:
        info = _asked(spec, where)
        kept = _kept(place(info.sha))
        if kept is None or kept.get("decided_by") != decided_by:
            files = _remote_files(spec, info, where)
            kept = {"id": spec.id, "revision": info.sha, "decided_by": decided_by, "files": files}
        for asked in {spec.revision, info.sha}:  # a run that goes on asks for the commit
            write_sealed_json(place(asked), kept)
    except ServiceError as error:
        kept = _kept(place(spec.revision))
        if kept is None:
            raise
        text = "%s: the Hub is away (%s); going on with commit %s as an earlier start resolved it"
        LOG.warning(text, where, error.__cause__ or error, kept["revision"])
    remote = sorted(kept["files"], key=lambda file: file["path"])
    failures: list[str] = []
    return kept["revision"], [_source_file(spec.id, kept["revision"], where, failures, **file) for file in remote]


def _kept(place: Path) -> dict[str, Any] | None:
    try:
        return read_sealed_json(place)
    except (OSError, ValueError):  # none, or damaged: asked for again
        return None


def _asked(spec: Any, where: str) -> Any:
    """Return what the Hub says of the dataset: commit, card and the names of its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return retried(
            lambda: HfApi().dataset_info(spec.id, revision=spec.revision, timeout=ANSWER_S),
            what=spec.id,
            where=where,
            at_start=True,
        )
    except RevisionNotFoundError as error:
        raise InputMissingError(
            f"{where}.revision: {spec.id} has no revision {spec.revision!r}. Write a branch, tag or commit that it "
            "has."
        ) from error


def _remote_files(spec: Any, info: Any, where: str) -> list[dict[str, Any]]:
    """Return {path, bytes, content} of each; content: sha256 for files in large-file storage, else the git object's
    id."""
    from huggingface_hub import HfApi

    paths = _chosen_paths(spec, info, where)
    cure = " Many datasets have a branch of parquet files: revision: refs/convert/parquet."
    refuse_unreadable(paths, of=f"{spec.id} has ", where=where, cure=cure)
    # Sizes and hashes, many at a time: a repository may have thousands of files.
    found: list[dict[str, Any]] = []
    for start in range(0, len(paths), PATHS_A_REQUEST):
        some = paths[start : start + PATHS_A_REQUEST]
        ask = functools.partial(HfApi().get_paths_info, spec.id, some, repo_type="dataset", revision=info.sha)
        for file in retried(ask, what=spec.id, where=where):
            content = file.lfs.sha256 if file.lfs else f"git:{file.blob_id}"
            found.append({"path": file.path, "bytes": file.size, "content": content})
    empty = [file["path"] for file in found if not file["bytes"]]
    if empty:
        raise InputMissingError(
            f"{where}: {spec.id} has empty files (0 bytes): {', '.join(empty[:5])}. Choose others with `files`."
        )
    return found


def _chosen_paths(spec: Any, info: Any, where: str) -> list[str]:
    """Return the repository's files that the source means.

    `datasets` decides on a folder with the repository's names and card, without content: it finds what it would find
    on the Hub, and its own requests are not made, which would wait for a silent Hub, count a download and read
    archives.
    """
    names = [sibling.rfilename for sibling in info.siblings or []]
    card = info.card_data.to_dict() if info.card_data else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / PurePosixPath(spec.id).name  # a loading script has the dataset's name
        _lay_names(root, names)
        root.joinpath("README.md").write_text(f"---\n{json.dumps(_configs(card, spec, where))}\n---\n")  # JSON is YAML
        if spec.files:
            files = named_files(root, spec.files, name=spec.id, where=where)
        else:
            files = split_files(root, config=spec.config, split=spec.split, name=spec.id, where=where)
        return [file.relative_to(root).as_posix() for file in files]


def named_files(root: Path, patterns: str | list[str], *, name: str, where: str) -> list[Path]:
    """Return the files below the folder that the patterns name; a folder's name stands for all in it.

    Raises InputMissingError for a pattern without a file, RecipeError for one that leads out of the folder.
    """
    from datasets.data_files import resolve_pattern

    root = root.resolve()
    found: dict[Path, None] = {}
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if leads_outside(pattern):
            raise RecipeError(f"{where}.files: {pattern!r} leads out of {name}. Write a path or glob below it.")
        inside = pattern
        if (root / pattern).exists():  # a name, which may have brackets
            inside = glob.escape(pattern.rstrip("/"))
            if (root / pattern).is_dir():
                inside += "/**"
        try:
            found.update((Path(path), None) for path in resolve_pattern(inside, str(root)))
        except FileNotFoundError as error:
            raise InputMissingError(
                f"{where}.files: {pattern!r} matches no file of {name}, so there is nothing to read. It has "
                f"{shown(root)}."
            ) from error
    return list(found)


def leads_outside(pattern: str) -> bool:
    """Return whether a pattern of a repository would be looked for elsewhere: `datasets` takes addresses and absolute
    paths too."""
    return "://" in pattern or "::" in pattern or os.path.isabs(pattern) or ".." in Path(pattern).parts


def _lay_names(root: Path, names: list[str]) -> None:
    """Make the folder of a repository's names. An archive is an empty one, since `datasets` looks into it."""
    root.mkdir()
    for name in names:
        path = root / name
        if leads_outside(name) or path.name in IGNORED_CARDS:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = EMPTY_ZIP if path.suffix == ".zip" else b""
        path.write_bytes(content)


def _configs(card: dict[str, Any], spec: Any, where: str) -> dict[str, Any]:
    """Return the part of the card that `datasets` needs to find the files, without what would lead it to this
    machine's."""
    configs = card.get("configs") or []
    named = configs if isinstance(configs, list) else []
    for config in named:
        if not isinstance(config, dict):
            continue
        for text in _texts([config.get("data_files"), config.get("data_dir")]):
            if leads_outside(text):
                raise RecipeError(
                    f"{where}: the card of {spec.id} names files outside the dataset ({text}), which are not read. "
                    "Choose files with `files`."
                )
    # Of several configurations, one that alone has its facts here is the default.
    infos = card.get("dataset_info") or []
    if not isinstance(infos, list):
        infos = [infos]
    found = {}
    if configs:
        found["configs"] = configs
    if infos:
        found["dataset_info"] = [{"config_name": info.get("config_name", "default")} for info in infos]
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _source_file(
    repo: str, revision: str, where: str, failures: list[str], *, path: str, bytes: int, content: str
) -> SourceFile:
    from huggingface_hub import try_to_load_from_cache

    # A path, None, or an object of the library that says that the Hub has no such file.
    cached = try_to_load_from_cache(repo, path, revision=revision, repo_type="dataset")
    return SourceFile(
        label=path,
        sha256=content,
        bytes=bytes,
        path=Path(cached) if isinstance(cached, str) else None,
        fetch=functools.partial(_fetch, repo, revision, path, where, size=bytes),
        check_ends=functools.partial(check_ends, repo, revision, path, failures),
    )


def check_ends(repo: str, revision: str, path: str, failures: list[str]) -> str | None:
    """Return why a file that is not fetched yet cannot be what its name says, by its first and last bytes.

    None also when the server does not answer or gives no parts of files: the file is checked when it is fetched.
    failures: files of the dataset that were not answered; after one no more are looked at: each would wait as long.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session

    def read_range(wanted: str) -> bytes:
        url = hf_hub_url(repo, path, repo_type="dataset", revision=revision)
        headers = {**build_hf_headers(), "Range": f"bytes={wanted}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=ANSWER_S, follow_redirects=True) as answer:
            answer.raise_for_status()
            return next(answer.iter_bytes(HEAD_BYTES), b"")  # a server without ranges would send the whole file

    if failures:
        return None
    try:
        head = read_range(f"0-{HEAD_BYTES - 1}")
        reason = check_magic_bytes(path, head)
        if reason is None and head.startswith(FOOTERS):
            tail = read_range("-8")  # more than 8 bytes come from a server that ignores ranges
            if len(tail) <= 8 and not tail.endswith(FOOTERS):
                reason = "is truncated: it does not end with its footer. Upload it again, or name others in `files`."
    except (HTTPError, OSError):  # which says nothing of the file
        failures.append(path)
        return None
    return reason and f"{repo}/{path} {reason}"


def _fetch(repo: str, revision: str, path: str, where: str, size: int | None = None) -> Path:
    from huggingface_hub import hf_hub_download

    # On a terminal the library has a bar of its own.
    about = f" ({count_text(size)}B)" if size else ""
    with nullcontext() if on_terminal() else waiting(f"fetching {repo}/{path}{about}"):
        download = functools.partial(hf_hub_download, repo, path, repo_type="dataset", revision=revision)
        return Path(retried(download, what=f"{repo}/{path}", where=where))


def retried(call, *, what: str, where: str, at_start: bool = False):
    """Return the call's result, tried again while the Hub is away or overloaded.

    Raises InputMissingError when the Hub says no, ServiceError when it does not answer in ATTEMPTS attempts, at_start
    in one where there is no network. A missing revision passes through: the caller knows its name.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    set_http_timeouts()
    attempts = ATTEMPTS
    if at_start and is_hub_away():  # no wait brings a network
        attempts = 1
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except RevisionNotFoundError:
            raise
        except OfflineModeIsEnabled as error:
            raise ServiceError(
                f"{where}: {what} is not in the local cache and HF_HUB_OFFLINE is set. Unset it for the first start."
            ) from error
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
                raise InputMissingError(
                    f"{where}: {what} does not exist on the Hub, is gated, or is private to others. Correct the id, "
                    "accept its terms on the Hub, and set HF_TOKEN or run `hf auth login`."
                ) from error
            # A LocalEntryNotFoundError is one too, and means that the Hub was not reached.
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                raise InputMissingError(
                    f"{where}: {what} is not in the dataset's commit any more. Check `files` and `revision`."
                ) from error
            if not isinstance(error, HfHubHTTPError | OSError) and not is_network(error):
                raise
            cause = error
        if attempt < attempts:
            wait_s = FIRST_WAIT_S * 2 ** (attempt - 1)
            reason = f"{type(cause).__name__}: {_first_line(cause)}"
            LOG.warning("%s: attempt %d of %d failed (%s), again in %.0f s", what, attempt, ATTEMPTS, reason, wait_s)
            note_retry()
            time.sleep(wait_s)
    raise ServiceError(
        f"{where}: the Hub does not give {what} ({type(cause).__name__}: {_first_line(cause)}), and it is not in the "
        "local cache. Check the network and run the same command again."
    ) from cause


def _first_line(error: Exception) -> str:
    return redacted(first_line(error))[:200]


def local_dataset(spec: Any, *, where: str, folder: str | None) -> list[SourceFile] | None:
    """Return the files of the dataset's split where `spec.id` is a folder on this machine, sorted by label; else None.

    Configuration, split and files are those that `datasets` finds in the folder, or `save_to_disk` listed.
    """
    expanded = os.path.expanduser(spec.id)
    for base in bases_of(folder):
        root = base / expanded
        if root.is_dir():
            break
    else:
        return None
    if spec.revision:
        raise RecipeError(f"{where}.revision is {spec.revision!r}, and {root} is a folder here. Leave revision out.")
    if spec.files:
        paths = named_files(root, spec.files, name=spec.id, where=where)
    elif is_saved(root):
        paths = saved_files(root, split=spec.split, where=where)
    else:
        paths = split_files(root, config=spec.config, split=spec.split, name=spec.id, where=where)
    refuse_unreadable([str(path) for path in paths], of=f"{spec.id} has ", where=where)
    refuse_tables([path.resolve() for path in paths], where=where)
    return labelled(paths)
