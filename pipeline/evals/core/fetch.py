"""Fetches the published files of the CORE tasks from the first mirror that gives the right bytes."""

import hashlib
import http.client
import io
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

from pipeline.artifacts.atomic import write_bytes
from pipeline.artifacts.errors import ServiceError
from pipeline.artifacts.locks import file_lock
from pipeline.evals.core.tasks import FOUNDRY
from pipeline.sources.signatures import impostor

SILENCE_S = 60.0
# Where the files lie, {file} their name under eval_data/; one without it is a zip of all. What they give is believed by its
# hash alone, so that a mirror can neither change a score nor put an error page into the cache.
MIRRORS = (
    f"https://raw.githubusercontent.com/mosaicml/llm-foundry/{FOUNDRY}/scripts/eval/local_data/{{file}}",
    "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
    "https://raw.githubusercontent.com/Milpo1/nanochat-pl/e4b75d6eb1de434d3a61c5bf968472b6c93bae8e/eval_bundle/eval_data/{file}",
)
# What a mirror's answer can fail with; urllib's own errors are OSErrors, an address of another kind is a ValueError.
UNUSABLE = (OSError, http.client.HTTPException, ValueError, zipfile.BadZipFile, zlib.error, KeyError)


def fetch_file(file: str, blob: str, *, folder: Path) -> bytes:
    """The content whose git hash is `blob`, kept in the folder under that hash.

    $TANDEM_CORE_MIRRORS, addresses with blanks between, comes before the built-in mirrors. Raises ServiceError naming
    what each mirror gave.
    """
    from pipeline.evals.core.bundle import git_blob

    place = folder / blob
    with file_lock(folder / f".{blob}.lock"):
        if place.exists() and git_blob(content := place.read_bytes()) == blob:
            return content
        reasons = []
        for mirror in [*os.environ.get("TANDEM_CORE_MIRRORS", "").split(), *MIRRORS]:
            address = mirror.replace("{file}", file)
            try:
                content = _from_mirror(mirror, file, folder)
            except UNUSABLE as error:
                reasons.append(f"{address}: {error}")
                continue
            if git_blob(content) == blob:
                write_bytes(place, content)
                return content
            reason = impostor(content[:4096]) or "gave another content than the published file."
            reasons.append(f"{address} {reason}")
        raise ServiceError(
            f"CORE bundle: no mirror gives {file}, so nothing was scored:\n  "
            + "\n  ".join(reasons)
            + "\nDownload the eval_bundle yourself and name its folder or zip (--bundle, evals.core.bundle), or a mirror in TANDEM_CORE_MIRRORS."
        )


def _from_mirror(mirror: str, file: str, folder: Path) -> bytes:
    if "{file}" in mirror:
        return _get(mirror.replace("{file}", file))
    kept = folder / f"{hashlib.sha256(mirror.encode()).hexdigest()[:16]}.zip"  # one download for all files
    content = kept.read_bytes() if kept.exists() else _get(mirror)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if not kept.exists():
            write_bytes(kept, content)
        names = [name for name in archive.namelist() if name.endswith(f"eval_data/{file}")]
        if not names:
            raise KeyError(f"no {file} in it")
        return archive.read(names[0])


def _get(address: str) -> bytes:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise urllib.error.URLError("HF_HUB_OFFLINE is set")
    with urllib.request.urlopen(address, timeout=SILENCE_S) as answer:
        return answer.read()
