"""Nothing secret and nothing executable by loading it leaves this machine: every byte is looked at before an upload."""

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

# What access tokens look like, by who gives them out. A 40-digit hex key (older W&B) looks like a git commit: those are
# found by their value, taken from the environment and the login files.
PATTERNS = {
    "Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "Hugging Face organization token": rb"\bapi_org_[A-Za-z0-9]{30,}",
    "W&B key": rb"\bwandb_v1_[A-Za-z0-9_]{30,}",
    "GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "Google API key": rb"\bAIza[0-9A-Za-z_\-]{35}\b",
    "OpenAI-style key": rb"\bsk-[A-Za-z0-9_\-]{32,}",
    "Slack token": rb"\bxox[abprs]-[A-Za-z0-9\-]{20,}",
    "private key": rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----",
    "password in a URL": rb"[a-z][a-z0-9+.\-]*://[^\s/:@\"']{1,64}:[^\s/@\"']{3,128}@[a-zA-Z0-9]",
}
_PATTERN = re.compile(b"|".join(b"(?P<k%d>%s)" % (i, p) for i, p in enumerate(PATTERNS.values())))
_NAMES = list(PATTERNS)
_CHUNK, _OVERLAP = 16 * 2**20, 4096

_ENVIRONMENT = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD)$")
_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy"}


def known_secrets() -> dict[str, bytes]:
    """Secrets this machine holds, by where they stand: environment variables and the Hugging Face login."""
    found = {f"${k}": v.encode() for k, v in os.environ.items() if _ENVIRONMENT.search(k.upper()) and len(v) >= 8}
    from huggingface_hub import get_token

    token = get_token()
    if token:
        found["the Hugging Face login"] = token.encode()
    return found


def secrets_in(path: Path, known: dict[str, bytes]) -> list[str]:
    """One line for each kind of secret in a file; the secret itself is never repeated."""
    found = set()
    for block in _blocks(path):
        found |= {_NAMES[int((m.lastgroup or "k0")[1:])] for m in _PATTERN.finditer(block)}
        found |= {f"the value of {name}" for name, value in known.items() if value in block}
    return sorted(found)


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in overlapping blocks: no secret of up to 4 KiB falls between two."""
    with open(path, "rb") as file:
        kept = b""
        while data := file.read(_CHUNK):
            yield kept + data
            kept = data[-_OVERLAP:]


def is_pickle(path: Path) -> bool:
    """Whether loading the file could run code in it: by suffix, by pickle's first bytes, by torch's zip layout."""
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
    """Why these files (name in the repository -> path) must not be uploaded; empty when all may."""
    known = known_secrets()
    lines = []
    for name, path in files.items():
        if is_pickle(path):
            lines.append(f"{name}: is a pickle, which runs code when it is loaded")
        lines += [f"{name}: contains {kind}" for kind in secrets_in(path, known)]
    return lines
