"""What a secret looks like, which ones this machine holds, and text without them."""

import errno
import netrc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

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
    "private key": rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----(?s:.*?-----END (?:[A-Z]+ )?PRIVATE KEY-----)?",
    "password in a URL": rb"[a-z][a-z0-9+.\-]*://[^\s/:@\"']{1,64}:[^\s/@\"']{3,128}@(?=[a-zA-Z0-9])",
}
ANY_PATTERN = re.compile(b"|".join(b"(?P<k%d>%s)" % (i, p) for i, p in enumerate(PATTERNS.values())))
REDACTED = "[secret]"

_ENVIRONMENT = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD)$")


def kind_of(match: re.Match[bytes]) -> str:
    """Whose token a match of ANY_PATTERN is."""
    return list(PATTERNS)[int((match.lastgroup or "k0")[1:])]


@cache
def known_secrets() -> dict[str, bytes]:
    """Secrets this machine holds, by where they stand: environment, the Hugging Face login, ~/.netrc (W&B's login)."""
    found = {f"${k}": v for k, v in os.environ.items() if _ENVIRONMENT.search(k.upper())}
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    with suppress(OSError, ValueError):  # no login, no secret; the same below
        found["the Hugging Face login"] = Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text()
    with suppress(OSError, netrc.NetrcParseError):
        logins = netrc.netrc(os.environ.get("NETRC"))
        found |= {f"the login of {host} in .netrc": login[2] for host, login in logins.hosts.items() if login[2]}
    # A short value is a word, which stands in texts for other reasons.
    return {where: value.strip().encode() for where, value in found.items() if len(value.strip()) >= 8}


@cache
def _secret_text() -> re.Pattern[str]:
    values = sorted({re.escape(value.decode()) for value in known_secrets().values()}, key=len, reverse=True)
    return re.compile("|".join([*values, *(f"(?:{pattern.decode()})" for pattern in PATTERNS.values())]))


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
