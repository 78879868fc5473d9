"""Addresses of this machine, by which the pages that it serves to itself know their own visitors."""

from urllib.parse import urlsplit

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def host_of(value: str) -> str | None:
    """Return the name in a Host or Origin header, without scheme and port; None where it is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None
