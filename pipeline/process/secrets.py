"""Patterns of secrets, those that this machine holds, and text without them."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from pipeline.process.errors import UNREADABLE, readable

# What access tokens look like, by who gives them out: what each begins with, and the whole. A 40-digit hex key (older
# W&B) looks like a git commit: those are found by their value, taken from the environment and the login files.
PATTERNS: dict[str, tuple[tuple[bytes, ...], bytes]] = {
    "Hugging Face token": ((b"hf_",), rb"\bhf_[A-Za-z0-9]{20,}"),
    "Hugging Face organization token": ((b"api_org_",), rb"\bapi_org_[A-Za-z0-9]{30,}"),
    "W&B key": (
        (b"wandb_", b"WANDB_"),
        rb"\b(?:wandb_v[0-9]_[A-Za-z0-9_]{20,}|(?i:wandb_(?:api_)?key[\"']?\s?[:=]\s?[\"']?[0-9a-f]{40}\b))",
    ),
    "GitHub token": (
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        rb"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    ),
    "AWS access key": ((b"AKIA", b"ASIA"), rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "Google API key": ((b"AIza",), rb"\bAIza[0-9A-Za-z_\-]{35}\b"),
    "OpenAI-style key": ((b"sk-",), rb"\bsk-(?:[A-Za-z0-9]{20,}|[A-Za-z0-9_\-]{32,})"),
    "Slack token": ((b"xox", b"xapp-"), rb"\b(?:xox[a-z](?:\.xox[a-z])?|xapp-[0-9])-[A-Za-z0-9\-]{20,}"),
    "GitLab token": ((b"glpat-", b"gldt-", b"glrt-"), rb"\bgl(?:pat|dt|rt)-[A-Za-z0-9_\-]{20,}"),
    "Docker token": ((b"dckr_pat_", b"dckr_oat_"), rb"\bdckr_[po]at_[A-Za-z0-9_\-]{20,}"),
    "PyPI token": ((b"pypi-AgE",), rb"\bpypi-AgE[A-Za-z0-9_\-]{32,}"),
    "npm token": ((b"npm_",), rb"\bnpm_[A-Za-z0-9]{36}\b"),
    "NVIDIA key": ((b"nvapi-",), rb"\bnvapi-[A-Za-z0-9_\-]{32,}"),
    "private key": (
        (b"-----BEGIN ",),
        rb"-----BEGIN (?:[A-Z]{1,20} )?PRIVATE KEY-----(?s:.{0,16384}?-----END (?:[A-Z]{1,20} )?PRIVATE KEY-----)?",
    ),
    "password in a URL": ((b"://",), rb"://[^\s/:@\"']{0,64}:[^\s/@\"']{1,256}@(?=[a-zA-Z0-9\[])"),
    # Alone before the @: longer than a user's name, or letters and digits mixed.
    "token in a URL": (
        (b"://",),
        rb"(?:(?<=http)|(?<=https))://(?:[^\s/:@\"'?#]{20,256}|(?=[A-Za-z_\-]*[0-9])[A-Za-z0-9_]{16,})@(?=[a-zA-Z0-9\[])",
    ),
    "signature in a URL": (
        (
            b"sig=",
            b"signature=",
            b"Signature=",
            b"token=",
            b"Token=",
            b"AccessKeyId=",
            b"api_key=",
            b"apikey=",
            b"password=",
        ),
        rb"(?:(?<=[?&;])|(?<=[?&;]AWS)|(?<=[?&;]access_)|(?<=[?&;]private_)|(?<=[?&;]X-Amz-)|(?<=[?&;]X-Amz-Security-)|(?<=[?&;]X-Goog-))"
        rb"(?:sig|[sS]ignature|[tT]oken|AccessKeyId|api_?key|password)=(?=[^\s&]*[0-9])[^\s&\"'#<>{}$]{8,}",
    ),
}
_COMPILED = {kind: (begins, re.compile(pattern)) for kind, (begins, pattern) in PATTERNS.items()}
REDACTED = "[secret]"

# Names of variables that hold a secret; not $PWD and $OLDPWD, which are folders.
_ENVIRONMENT = re.compile(
    r"(TOKEN|SECRET|PASS(WORD|WD|PHRASE|CODE)?|(API|ACCESS)KEY|_KEY|_PWD|CREDENTIALS?|CONN(ECTION)?_?STR(ING)?|_SAS|_DSN|COOKIE"
    r"|WEBHOOK(_URL)?)(_?[0-9]+)?$"
)
# The secret inside of a longer value, which a program may print alone: of an address, of a connection string.
_INSIDE = (
    re.compile(r"://[^\s/:@]*:([^\s/@]+)@"),
    re.compile(r"(?:^|;)\s*(?:AccountKey|Shared\w+|Password|Pwd)\s*=\s*([^;]+)", re.IGNORECASE),
)


def kinds_in(block: bytes) -> set[str]:
    """Return whose tokens are in these bytes."""
    return {kind for kind, (begins, pattern) in _COMPILED.items() if any(_holds(block, b, pattern) for b in begins)}


def looks_secret(text: str) -> bool:
    """Return whether something in the text looks like an access token or holds a password, whosever it is."""
    return bool(kinds_in(text.encode(errors="replace")))


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
    """Return secrets this machine holds, by where they are: environment, the Hugging Face login, ~/.netrc (W&B's
    login)."""
    found = {}
    for name, value in os.environ.items():
        if _ENVIRONMENT.search(name.upper()) and not _is_path(value):
            found[f"${name}"] = value
        inside = chain.from_iterable(pattern.findall(value) for pattern in _INSIDE)
        found |= {f"password {number} in ${name}": secret for number, secret in enumerate(inside, 1)}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    token = Path(os.environ.get("HF_TOKEN_PATH") or Path(os.environ.get("HF_HOME") or cache / "huggingface") / "token")
    with suppress(OSError, ValueError, RuntimeError):  # no login or no home, no secret
        found["the Hugging Face login"] = token.expanduser().read_text()
    netrc = os.environ.get("NETRC")
    for file in [netrc] if netrc else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, ValueError, RuntimeError):
            # Read by words: Python's parser refuses files that W&B's client reads.
            words = Path(file).expanduser().read_text(errors="replace").split()
            logins = [value for name, value in pairwise(words) if name == "password"]
            found |= {f"login {number} in {Path(file).name}": login for number, login in enumerate(logins, 1)}
    # A short value is a word, which texts hold for other reasons.
    values = {where: value.strip() for where, value in found.items()}
    return {where: os.fsencode(value) for where, value in values.items() if len(value) >= 8}


def _is_path(value: str) -> bool:
    """Return whether it names a file, as $GOOGLE_APPLICATION_CREDENTIALS does; what is in it is no part of the
    environment."""
    with suppress(OSError, ValueError):
        return os.path.isabs(value) and os.path.exists(value)
    return False


@cache
def _values() -> tuple[str, ...]:
    """Return the known secrets as texts may hold them, the longest first."""
    values = {os.fsdecode(value) for value in known_secrets().values()}
    values |= {ascii(value)[1:-1] for value in values}  # as a repr or a log line shows it
    return tuple(sorted(values, key=len, reverse=True))


@cache
def _secret_text() -> re.Pattern[str]:
    patterns = [f"(?:{pattern.decode()})" for _, pattern in PATTERNS.values()]
    return re.compile("|".join([*map(re.escape, _values()), *patterns]))


def redacted(text: str) -> str:
    """Return the text with every secret replaced: the values this machine holds, and whatever looks like an access
    token."""
    return _secret_text().sub(REDACTED, text)


# What this program and the progress bars of libraries write themselves: colours, a line up, the rest of the line, its
# beginning.
_OWN_CONTROL = re.compile("(\\x1b\\[[0-9;]{0,8}m|\\x1b\\[[AK]|\\r)")


def printed_text(text: str) -> str:
    """Return what this process prints, of which a part may be others' text: control characters escaped, but for
    colours and progress bars."""
    if not UNREADABLE.search(text):
        return text
    # The pattern's group makes every second part one of our own controls.
    parts = _OWN_CONTROL.split(text)
    parts[::2] = [readable(part, most=len(part)) for part in parts[::2]]
    return "".join(parts)


def redact_output() -> None:
    """From now on nothing that this process prints, anybody's traceback included, holds a secret or steers the
    terminal.

    Again after something has replaced the streams' `write` to see what is printed: it then sees redacted text only.
    """
    streams: list[Any] = [sys.stdout, sys.stderr]
    sys.stdout, sys.stderr = (stream and _RedactedStream(stream) for stream in streams)


class _RedactedStream:
    """A text stream that writes printed_text(redacted(text)); everything else is the stream's own.

    Nobody may be there to read: a terminal that was closed or a `tee` that was interrupted is the run's reason to save
    and leave, and must not keep it from that.
    """

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        with _without_reader():
            self._stream.write(printed_text(redacted(text)))
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
