"""Files of a Hub dataset: the commit and list are resolved once, the content is fetched when it is reached."""

import functools
import hashlib
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import read_sealed_json, write_sealed_json
from pipeline.artifacts.errors import InputMissingError, RecipeError, ServiceError
from pipeline.artifacts.retries import note_retry
from pipeline.artifacts.secrets import redacted
from pipeline.sources.files import READABLE, SourceFile
from pipeline.sources.heads import both_ends
from pipeline.sources.hub_client import limit_silence
from pipeline.sources.hub_splits import chosen_paths
from pipeline.sources.raw_rows import kind_of

LOG = logging.getLogger(__name__)
ATTEMPTS = 5
FIRST_WAIT_S = 1.0  # Doubled after each attempt.
PATHS_A_REQUEST = 500
ANSWER_S = 10.0  # for the list of files, which a start waits for


@dataclass
class RemoteFile:
    """path: in the repository. content: sha256 for files in large-file storage, else the git object's id."""

    path: str
    bytes: int
    content: str


def hub_files(spec: Any, *, where: str, cache: Path) -> tuple[str, list[SourceFile]]:
    """(commit, files sorted by path) of the dataset's split. Files that an earlier run fetched have their place already.

    Without the Hub the list of an earlier start is used, which is said. Raises ServiceError when there is none,
    InputMissingError for a dataset, revision or file that does not exist for this user, RecipeError for a wrong choice.
    """

    def place(revision: str | None) -> Path:
        key = repr((spec.id, revision, spec.config, spec.split, spec.files))
        return cache / "hub" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    try:
        revision, remote = _resolve(spec, where)
        for asked in {spec.revision, revision}:  # a run that goes on asks for the commit
            write_sealed_json(
                place(asked), {"id": spec.id, "revision": revision, "files": [asdict(file) for file in remote]}
            )
    except ServiceError as error:
        try:
            kept = read_sealed_json(place(spec.revision))
        except (OSError, ValueError):
            raise error from None
        revision, remote = kept["revision"], [RemoteFile(**file) for file in kept["files"]]
        LOG.warning(
            "%s: the Hub is away (%s); going on with commit %s as an earlier start resolved it",
            where,
            error.__cause__ or error,
            revision,
        )
    return revision, [
        _source_file(spec.id, revision, file, where) for file in sorted(remote, key=lambda file: file.path)
    ]


def _resolve(spec: Any, where: str) -> tuple[str, list[RemoteFile]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi()
    try:
        info = retried(
            lambda: api.dataset_info(spec.id, revision=spec.revision, timeout=ANSWER_S), what=spec.id, where=where
        )
    except RevisionNotFoundError as error:
        raise InputMissingError(
            f"{where}.revision: {spec.id} has no revision {spec.revision!r}. Write a branch, tag or commit that it has."
        ) from error
    card = info.card_data.to_dict() if info.card_data else {}
    paths = chosen_paths(
        [sibling.rfilename for sibling in info.siblings or []], card.get("configs"), spec=spec, where=where
    )
    unreadable = [path for path in paths if kind_of(path) is None]
    if unreadable:
        raise RecipeError(
            f"{where}: {spec.id} has files of no readable kind: {', '.join(unreadable[:5])}. Readable are {READABLE}. Many datasets have a branch of parquet files: revision: refs/convert/parquet."
        )
    found: list[RemoteFile] = []
    for start in range(0, len(paths), PATHS_A_REQUEST):
        some = paths[start : start + PATHS_A_REQUEST]
        listed = retried(
            lambda some=some: api.get_paths_info(spec.id, some, repo_type="dataset", revision=info.sha),
            what=spec.id,
            where=where,
        )
        found += [
            RemoteFile(file.path, file.size, file.lfs.sha256 if file.lfs else f"git:{file.blob_id}") for file in listed
        ]
    empty = [file.path for file in found if not file.bytes]
    if empty:
        raise InputMissingError(
            f"{where}: {spec.id} has empty files (0 bytes): {', '.join(empty[:5])}. Choose others with `files`."
        )
    return info.sha, found


def _source_file(repo: str, revision: str, remote: RemoteFile, where: str) -> SourceFile:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, remote.path, revision=revision, repo_type="dataset")
    fetch = functools.partial(_fetch, repo, revision, remote.path, where)
    return SourceFile(
        label=remote.path,
        sha256=remote.content,
        bytes=remote.bytes,
        path=Path(cached) if isinstance(cached, str) else None,
        fetch=fetch,
        peek=functools.partial(both_ends, repo, revision, remote.path),
    )


def _fetch(repo: str, revision: str, path: str, where: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(
        retried(
            lambda: hf_hub_download(repo, path, repo_type="dataset", revision=revision),
            what=f"{repo}/{path}",
            where=where,
        )
    )


def retried(call, *, what: str, where: str):
    """The call's result, tried again while the Hub is away or overloaded.

    Raises InputMissingError when the Hub says no, ServiceError when it does not answer in ATTEMPTS attempts. A missing
    revision passes through: who asked knows its name.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    limit_silence()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except RevisionNotFoundError:
            raise
        except GatedRepoError as error:
            raise InputMissingError(
                f"{where}: {what} is gated, and this user may not read it. Accept its terms on the Hub, then set HF_TOKEN or run `hf auth login`."
            ) from error
        except RepositoryNotFoundError as error:
            raise InputMissingError(
                f"{where}: {what} does not exist on the Hub, or is private to others. Correct the id, or set HF_TOKEN or run `hf auth login`."
            ) from error
        except OfflineModeIsEnabled as error:
            raise ServiceError(
                f"{where}: {what} is not in the local cache and HF_HUB_OFFLINE forbids to ask the Hub. Unset it for the first start."
            ) from error
        except (
            LocalEntryNotFoundError
        ) as error:  # Also an EntryNotFoundError, but it means that the Hub was not reached.
            cause: Exception = error
        except EntryNotFoundError as error:
            raise InputMissingError(
                f"{where}: {what} is not in the dataset's commit any more. Check `files` and `revision`."
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                raise InputMissingError(
                    f"{where}: the Hub refuses {what} (status {status}). Set HF_TOKEN to a token that may read it, or run `hf auth login`."
                ) from error
            cause = error
        except OSError as error:
            cause = error
        except Exception as error:
            if not _is_network(error):
                raise
            cause = error
        if attempt < ATTEMPTS:
            wait_s = FIRST_WAIT_S * 2 ** (attempt - 1)
            LOG.warning(
                "%s: attempt %d of %d failed (%s: %s), again in %.0f s",
                what,
                attempt,
                ATTEMPTS,
                type(cause).__name__,
                _first_line(cause),
                wait_s,
            )
            note_retry()
            time.sleep(wait_s)
    raise ServiceError(
        f"{where}: the Hub does not give {what} ({type(cause).__name__}: {_first_line(cause)}), and it is not in the local cache. Check the network and run the same command again."
    ) from cause


def _is_network(error: Exception) -> bool:
    """Whether the HTTP client raised it; which client that is differs between versions of huggingface_hub."""
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def _first_line(error: Exception) -> str:
    return redacted((str(error).strip() or type(error).__name__).splitlines()[0])[:200]
