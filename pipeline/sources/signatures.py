"""Things that lie where data should be: pointers, error pages, archives, binary files, recognised by their first bytes."""

import re
from pathlib import PurePath

MAGIC = {
    b"PAR1": "a parquet file",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstandard data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"BZh": "bzip2 data",
    b"ARROW1": "an Arrow file",
    b"%PDF": "a PDF",
}
CURES = {
    "UTF-16 text": "Convert it: iconv -f UTF-16 -t UTF-8.",
    "gzip data": "Give it the ending .gz.",
    "zstandard data": "Give it the ending .zst.",
    "a parquet file": "Give it the ending .parquet.",
    "an Arrow file": "Give it the ending .arrow.",
    "a zip archive": "Unpack it.",
    "bzip2 data": "Unpack it.",
}


ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # an IPC file, an IPC stream
BEGINNINGS = {
    ".parquet": (b"PAR1",), ".gz": (b"\x1f\x8b",), ".zst": (b"\x28\xb5\x2f\xfd",),
    ".arrow": ARROW, ".feather": ARROW, ".ipc": ARROW,
}  # fmt: skip


def wrong_beginning(name: str, head: bytes) -> str | None:
    """Return why a file of that name cannot begin like this, with a cure; None when it may be what its ending says."""
    suffix = PurePath(name).suffix.lower()
    magic = BEGINNINGS.get(suffix, ())
    reason = impostor(head, expected=magic)
    if reason is None and magic and not head.startswith(magic):
        return f"ends in {suffix} and is no such file (it begins with {head[:8]!r}). Download it again or correct its ending."
    return reason


def impostor(head: bytes, *, expected: tuple[bytes, ...] = ()) -> str | None:
    """Return what the first bytes betray, with a cure, as `is ... . Do ...`; None when they look like what they should be.

    expected: the magic bytes, one of which the file's own ending promises.
    """
    if not head.strip(b"\0"):
        return "holds zero bytes where its content should be, as an unfinished copy or a crash leaves it. Download or write it again."
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a git-lfs pointer, not the file itself. Run `git lfs pull` in its repository, or download it again."
    if start[:5].lower() == b"<?xml" or (start.startswith(b"<") and b"<Error>" in start[:512]):
        code = re.search(rb"<(?:Code|code|title|Message)>\s*([^<]{1,80})", start)
        return f"looks like an XML error page{_shown(code)}, saved by a failed download. Download it again."
    if re.match(rb"<(!doctype html|html|head|body)\b", start[:64].lower()):
        title = re.search(rb"<title[^>]*>\s*([^<]{1,80})", start, re.IGNORECASE)
        return f"looks like an HTML page{_shown(title)}, saved by a failed download. Download it again."
    for magic, name in MAGIC.items():
        if head.startswith(magic) and magic not in expected:
            return (
                f"is {name}, whatever its ending says. {CURES.get(name, 'Convert it to parquet, jsonl, csv or txt.')}"
            )
    return None


def _shown(match: re.Match[bytes] | None) -> str:
    return f" ({match.group(1).decode('utf-8', 'replace').strip()})" if match else ""
