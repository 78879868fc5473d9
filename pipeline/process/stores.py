"""Object stores by address: s3:// and gs:// through pyarrow, hf:// through huggingface_hub, all behind fsspec's interface.

Each finds its credentials as its own tools do: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL and the like, Google's
application default credentials, HF_TOKEN.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

ADDRESS = re.compile(r"([a-z][a-z0-9+]*)://")
SCHEMES = ("s3", "gs", "hf")
BUCKET_FOLDER = re.compile(r"(s3|gs)://[^/\s]\S*")
HUB_DATASET = re.compile(
    r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.-]+)*)/?"
)  # repository, revision, folder
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
REFUSED = re.compile("NO_SUCH_BUCKET|ACCESS_DENIED|HTTP status 403")  # pyarrow has no class for them


def is_address(text: str) -> bool:
    """Return whether a text names a place on the network and no path here, whatever its scheme."""
    return ADDRESS.match(text) is not None


def is_supported(address: str) -> bool:
    found = ADDRESS.match(address)
    return found is not None and found[1] in SCHEMES


def takes_shards(address: str) -> bool:
    """Return whether prepared shards can lie there: a folder of a bucket, or a dataset of the Hub."""
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
    """Raise OSError for what the stores' clients raise that is none: ArrowInvalid is a ValueError, httpx's ConnectError neither."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not (is_network(error) or type(error).__module__.split(".")[0] == "pyarrow"):
            raise
        raise OSError(str(error).strip() or type(error).__name__) from error
