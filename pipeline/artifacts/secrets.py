"""What a secret looks like, which ones this machine holds, and text without them."""

import errno
import netrc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

# What access tokens look like, by who gives them out: what each begins with, and the whole. A 40-digit hex key (older W&B)
# looks like a git commit: those are found by their value, taken from the environment and the login files.
PATTERNS: dict[str, tuple[tuple[bytes, ...], bytes]] = {
    "Hugging Face token": ((b"hf_",), rb"\bhf_[A-Za-z0-9]{30,}"),
    "Hugging Face organization token": ((b"api_org_",), rb"\bapi_org_[A-Za-z0-9]{30,}"),
    "W&B key": ((b"wandb_v1_",), rb"\bwandb_v1_[A-Za-z0-9_]{30,}"),
    "GitHub token": (
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    ),
    "AWS access key": ((b"AKIA", b"ASIA"), rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "Google API key": ((b"AIza",), rb"\bAIza[0-9A-Za-z_\-]{35}\b"),
    "OpenAI-style key": ((b"sk-",), rb"\bsk-[A-Za-z0-9_\-]{32,}"),
    "Slack token": ((b"xoxa-", b"xoxb-", b"xoxp-", b"xoxr-", b"xoxs-"), rb"\bxox[abprs]-[A-Za-z0-9\-]{20,}"),
    "private key": (
        (b"-----BEGIN ",),
        rb"-----BEGIN (?:[A-Z]{1,20} )?PRIVATE KEY-----(?s:.{0,16384}?-----END (?:[A-Z]{1,20} )?PRIVATE KEY-----)?",
    ),
    "password in a URL": ((b"://",), rb"://[^\s/:@\"']{1,64}:[^\s/@\"']{3,128}@(?=[a-zA-Z0-9])"),
}
_COMPILED = {kind: (begins, re.compile(pattern)) for kind, (begins, pattern) in PATTERNS.items()}
REDACTED = "[secret]"

_ENVIRONMENT = re.compile(r"(TOKEN|(API|ACCESS)_?KEY|SECRET|PASSWORD|PASSWD)$")


def kinds_in(block: bytes) -> set[str]:
    """Whose tokens stand in these bytes."""
    return {kind for kind, (begins, pattern) in _COMPILED.items() if any(_holds(block, b, pattern) for b in begins)}


def _holds(block: bytes, begin: bytes, pattern: re.Pattern[bytes]) -> bool:
    # A search for all patterns at once takes minutes for a model of 2 GB; one for a few fixed bytes, seconds.
    at = block.find(begin)
    while at >= 0:
        if pattern.match(block, at):
            return True
        at = block.find(begin, at + 1)
    return False


@cache
def known_secrets() -> dict[str, bytes]:
    """Secrets this machine holds, by where they stand: environment, the Hugging Face login, ~/.netrc (W&B's login)."""
    found = {f"${k}": v for k, v in os.environ.items() if _ENVIRONMENT.search(k.upper())}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    token = Path(os.environ.get("HF_TOKEN_PATH") or Path(os.environ.get("HF_HOME") or cache / "huggingface") / "token")
    with suppress(OSError, ValueError, RuntimeError):  # no login or no home, no secret
        found["the Hugging Face login"] = token.expanduser().read_text()
    for file in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        found |= _netrc_logins(file)
    # A short value is a word, which stands in texts for other reasons.
    return {where: value.strip().encode() for where, value in found.items() if len(value.strip()) >= 8}


def _netrc_logins(file: str) -> dict[str, str]:
    """Passwords of a netrc file by where they stand; also of one that the parser refuses, since W&B reads it."""
    try:
        path = Path(file).expanduser()
        hosts = netrc.netrc(str(path)).hosts  # named, else one that others may read is refused
    except netrc.NetrcParseError:
        words = path.read_text(errors="replace").split()
        return {f"login {i} in {path.name}": b for i, (a, b) in enumerate(pairwise(words)) if a == "password"}
    except (OSError, ValueError, RuntimeError):  # not there, no text, no home
        return {}
    return {f"the login of {host} in {path.name}": login[2] for host, login in hosts.items() if login[2]}


@cache
def _secret_text() -> re.Pattern[str]:
    values = sorted({re.escape(value.decode()) for value in known_secrets().values()}, key=len, reverse=True)
    return re.compile("|".join([*values, *(f"(?:{pattern.decode()})" for _, pattern in PATTERNS.values())]))


def redacted(text: str) -> str:
    """The text with every secret replaced: the values this machine holds, and whatever looks like an access token."""
    return _secret_text().sub(REDACTED, text)


def redact_output() -> None:
    """From now on nothing that this process prints, anybody's traceback included, holds a secret.

    Again after something has replaced the streams' `write` to see what is printed: it then sees redacted text only.
    """
    streams: list[Any] = [sys.stdout, sys.stderr]
    sys.stdout, sys.stderr = (stream and _RedactedStream(stream) for stream in streams)


class _RedactedStream:
    """A text stream that writes redacted(text); everything else is the stream's own.

    Nobody may be there to read: a terminal that was closed or a `tee` that was interrupted is the run's reason to save and
    leave, and must not keep it from that.
    """

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        with _without_reader():
            self._stream.write(redacted(text))
        return len(text)

    def flush(self) -> None:
        with _without_reader():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _without_reader() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
