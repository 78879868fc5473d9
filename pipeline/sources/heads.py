"""Files of a Hub that are not here yet, by their first and last bytes: an error page among them is told before step 1.

What only the whole content shows (single rows, the hash) is looked at when the file is fetched.
"""

import io
from typing import Any

from pipeline.artifacts.errors import DataError
from pipeline.sources.files import Ends
from pipeline.sources.formats import Format
from pipeline.sources.raw_rows import (
    BOM,
    COMPRESSIONS,
    BrokenArrayError,
    RawRow,
    array_elements,
    begins_array,
    csv_header,
    kind_of,
    parse_json_line,
)
from pipeline.sources.signatures import wrong_beginning
from pipeline.sources.verify import HEAD_BYTES, NO_ROWS, NO_TEXT, Findings, array_problem, csv_problem, jsonl_problem

FILES_OF_A_SOURCE = 64  # Those that are read first: a large dataset has thousands, and a look costs two requests.
TIMEOUT_S = 10.0


def head_findings(name: str, ends: Ends, form: Format, *, column_key: str) -> Findings:
    """What a file's first and last bytes betray. name: repository and path, for the message."""
    head, tail = ends
    reason = wrong_beginning(name, head)
    if reason is None and kind_of(name) == "parquet" and tail is not None and tail[-4:] != b"PAR1":
        reason = "is truncated: a parquet file ends with its footer. Upload it again."
    if (
        reason is None
        and kind_of(name) == "arrow"
        and tail is not None
        and head.startswith(b"ARROW1")
        and tail[-6:] != b"ARROW1"
    ):
        reason = "is truncated: an Arrow file ends with its footer. Upload it again."
    if reason is None and not name.lower().endswith(COMPRESSIONS):
        try:
            reason = _text_problem(name, head, form, column_key)
        except DataError as error:
            return Findings(problems=[str(error)])
    return Findings(problems=[f"{name} {reason}"] if reason else [])


def _text_problem(name: str, head: bytes, form: Format, column_key: str) -> str | None:
    """Return what the first rows of a file of text lack. Raises DataError where it cannot be read on."""
    whole, text = len(head) < HEAD_BYTES, head.decode("utf-8-sig", "surrogateescape")
    if kind_of(name) == "csv":
        if "\0" in text:
            return NO_TEXT
        return csv_problem(csv_header(io.StringIO(text), name), form, column_key) if whole or "\n" in text else None
    if kind_of(name) != "jsonl":
        return None
    if begins_array(io.StringIO(text)):
        rows: list[RawRow] = []
        try:
            for row, value in enumerate(array_elements(io.StringIO(text))):
                rows.append((0, row, value))
        except BrokenArrayError as error:
            if whole or not error.cut_off:
                raise DataError(error.problem(name)) from error
        return array_problem(rows, form, column_key) if rows or not whole else NO_ROWS
    lines = head.removeprefix(BOM).splitlines(keepends=True)
    lines = lines if whole else lines[:-1]  # the last one goes on behind the head
    rows = [(0, n, parse_json_line(line)) for n, line in enumerate(lines) if line.strip()]
    return jsonl_problem(rows, form, column_key, start=head) if rows or whole else None


def both_ends(repo: str, revision: str, path: str) -> Ends | None:
    """(first, last) bytes of a dataset's file; last None where the server gives no ranges. None when it does not answer:
    then the file is looked at when it is fetched."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session

    url = hf_hub_url(repo, path, repo_type="dataset", revision=revision)

    def part(wanted: str) -> tuple[int, bytes]:
        headers = {**build_hf_headers(), "Range": f"bytes={wanted}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as answer:
            answer.raise_for_status()
            return answer.status_code, _first(answer, HEAD_BYTES)

    try:
        _, head = part(f"0-{HEAD_BYTES - 1}")
        status, tail = part("-8") if kind_of(path) in ("parquet", "arrow") else (0, b"")
    except (HTTPError, OSError):
        return None
    return head, tail if status == 206 else None


def _first(answer: Any, size: int) -> bytes:
    """As many bytes of the answer, whatever more the server would send."""
    found = b""
    for piece in answer.iter_bytes():
        found += piece
        if len(found) >= size:
            break
    return found[:size]
