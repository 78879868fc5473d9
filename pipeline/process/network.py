"""The network: object stores by address, the HTTP client of the Hub with an end to every wait, and this machine's own
names."""

import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from pipeline.process.errors import DataError

# Object stores: s3:// and gs:// through pyarrow, hf:// through huggingface_hub, all behind fsspec's interface. Each
# finds its credentials as its own tools do: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL and the like, Google's
# application default credentials, HF_TOKEN.

ADDRESS = re.compile(r"([a-z][a-z0-9+]*)://")
SCHEMES = ("s3", "gs", "hf")
BUCKET_FOLDER = re.compile(r"(s3|gs)://[^/\s]+(/[^/\s]+)*/?")
# Repository, revision, folder.
HUB_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.-]+)*)/?")
SHARDS_FORMS = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or hf://datasets/NAMESPACE/NAME"
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
# Pyarrow has no class for them; what it says of a name that it does not know begins with HTTP's status
REFUSED = re.compile(
    "NO_SUCH_BUCKET|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN|"
    "SIGNATURE_DOES_NOT_MATCH|INVALID_SIGNATURE|INCOMPLETE_SIGNATURE|OPT_IN_REQUIRED|REQUEST_EXPIRED|REQUEST_TIME_TOO_SKEWED|"
    "HTTP status "
    "(301|308|401|403)|AuthorizationHeaderMalformed|IllegalLocationConstraint|InvalidRegion|InvalidBucketName|InvalidToken|ExpiredToken"
)


def is_address(text: str) -> bool:
    """Return whether a text names a place on the network and no path here, whatever its scheme."""
    return ADDRESS.match(text) is not None


def is_supported(address: str) -> bool:
    found = ADDRESS.match(address)
    return found is not None and found[1] in SCHEMES


def takes_shards(address: str) -> bool:
    """Return whether prepared shards can lie there (SHARDS_FORMS)."""
    return BUCKET_FOLDER.fullmatch(address) is not None or HUB_DATASET.fullmatch(address) is not None


@cache
def file_system(scheme: str) -> Any:
    """Return fsspec's view of a store; the paths in it are addresses without their scheme."""
    if scheme == "hf":
        from huggingface_hub import HfFileSystem

        return HfFileSystem()
    import pyarrow.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    if scheme == "gs":
        return ArrowFSWrapper(pyarrow.fs.GcsFileSystem())
    # Which pyarrow, unlike Amazon's own tools, does not read: every other store than Amazon's is named there.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return ArrowFSWrapper(pyarrow.fs.S3FileSystem(endpoint_override=endpoint))


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it."""
    scheme, _, path = address.partition("://")
    return file_system(scheme), path.rstrip("/")


def is_network(error: Exception) -> bool:
    """Return whether an HTTP client raised it; which client that is differs between versions of huggingface_hub."""
    return type(error).__module__.split(".")[0] in HTTP_CLIENTS


def is_refused(error: OSError) -> bool:
    """Return whether a store says for good that there is no such place, or that this user may not go there."""
    return isinstance(error, PermissionError | FileNotFoundError) or REFUSED.search(str(error)) is not None


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise OSError for what the stores' clients raise that is none: ArrowInvalid is a ValueError, httpx's
    ConnectError neither."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not (is_network(error) or type(error).__module__.split(".")[0] == "pyarrow"):
            raise
        raise OSError(str(error).strip() or type(error).__name__) from error


def is_hub_away() -> bool:
    """Return whether this machine finds no address of the Hub: it has no network. Behind a proxy nobody knows."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return True
    if getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


# Seconds without a byte, not for a whole transfer: one of hours continues as long as it moves.
CONNECT_S, SILENCE_S = 10.0, 60.0


def client_with_timeouts() -> Any:
    """Return a client whose requests end after that silence, those included that the library sends with
    timeout=None."""
    from huggingface_hub.utils._http import default_client_factory

    made = default_client_factory()
    limits = {"connect": CONNECT_S, "read": SILENCE_S, "write": SILENCE_S, "pool": SILENCE_S}

    def limit(request: Any) -> None:
        # model_info and its like pass None, which overrides the client's own timeout.
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = limits | {name: s for name, s in given.items() if s is not None}

    made.event_hooks["request"] = [*made.event_hooks["request"], limit]
    return made


@cache
def set_http_timeouts() -> None:
    """From now on no request of this process waits for a silent Hub for ever."""
    from huggingface_hub import set_client_factory

    set_client_factory(client_with_timeouts)


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def host_of(value: str) -> str | None:
    """Return the name in a Host or Origin header, without scheme and port; None where it is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None


# Reading again after an error that may pass, and a count of these retries.
#
# An error of a disk or a network file system is one of these; a Hub that is away counts too (sources/hub_files.py).
# What is read through a memory map has no errors to try again: there the kernel ends the process (SIGBUS).

LOG = logging.getLogger(__name__)
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
ATTEMPTS = 4
FIRST_WAIT_S = 0.5  # doubled after each attempt
T = TypeVar("T")

_made = 0
_kept_in: Path | None = None


def note_retry() -> None:
    """Count that something is about to be read again."""
    global _made
    _made += 1
    if _kept_in is not None:
        with open(_kept_in, "ab") as file:
            file.write(b"\n")


def retries() -> int:
    """Return how often this process has read something again."""
    return _made


def keep_retries_in(path: Path, *, anew: bool = True) -> None:
    """Write each later retry as a line of that file too, by which another process counts them (`retries_in`). anew:
    from 0."""
    global _kept_in
    if anew:
        path.unlink(missing_ok=True)
    _kept_in = path


def retries_in(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


def wait_or_raise(error: OSError, *, attempt: int, path: Path) -> None:
    """Wait before another attempt at reading. Raises the error when it stays, DataError after so many attempts."""
    if not may_pass(error):
        raise error
    if attempt >= ATTEMPTS:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}) in {attempt} attempts, so its rows are missing. Look at the "
            "disk or the network that it lies on, or copy it to another one; then run the same command again."
        ) from error
    wait_s = FIRST_WAIT_S * 2 ** (attempt - 1)
    LOG.warning("%s: %s, reading it again in %.1f s (%d of %d)", path, error.strerror, wait_s, attempt + 1, ATTEMPTS)
    note_retry()
    time.sleep(wait_s)


def read_again(read: Callable[[], T], *, path: Path) -> T:
    """Return what `read` gives, tried again after errors that may pass."""
    attempt = 1
    while True:
        try:
            return read()
        except OSError as error:
            wait_or_raise(error, attempt=attempt, path=path)
            attempt += 1
