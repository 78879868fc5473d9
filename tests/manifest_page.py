"""The keys of run_manifest.json as docs/manifest.md has them."""

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[1] / "docs" / "manifest.md").read_text()
KEYS = dict(re.findall(r"^\| `([^`]+)` \| ([a-z]+\??) \|", PAGE, re.MULTILINE))


def unknown_keys(value: Any, name: str = "", node: str = "") -> list[str]:
    """Return dotted names of the manifest that the page does not have."""
    found = []
    children = enumerate(value) if isinstance(value, list) else value.items()
    for part, child in children:
        place = f"{name}.{part}".removeprefix(".")
        known = [
            f"{node}.{part}".removeprefix("."),
            *(k for k in KEYS if re.fullmatch(rf"{re.escape(node)}\.?(<[^.]+>|\[\])", k)),
        ]
        key = next((k for k in known if k in KEYS), None)
        if key is None:
            found.append(place)
        elif isinstance(child, dict | list) and KEYS[key] != "any":
            found += unknown_keys(child, place, key)
    return found
