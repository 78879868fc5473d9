"""The card's metadata, which the Hub indexes: YAML between two lines of three dashes."""

import re
from typing import Any

import yaml

from pipeline.hub.card.model_index import model_index
from pipeline.hub.card.published import Published


def front_matter(card: Published) -> str:
    text = yaml.dump(metadata(card), Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return f"---\n{text}---\n"


def metadata(card: Published) -> dict[str, Any]:
    """What is not known is left out: an empty list would be shown as one."""
    hub, base = card.recipe("hub"), card.parent.repo_id if card.parent else None
    results = model_index(card)
    fields = {
        "license": hub.get("license"),
        "language": hub.get("language"),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": _tags(card),
        "datasets": card.datasets,
        "base_model": base,
        "base_model_relation": "finetune" if base else None,
        "model-index": [{"name": card.name, "results": results}] if results else None,
    }
    return {name: value for name, value in fields.items() if value}


def _tags(card: Published) -> list[str]:
    own = card.recipe("run").get("tags") or []
    tags = ["tandem", *(["conversational"] if card.is_chat else []), *(["custom_code"] if card.own_code else []), *own]
    return list(dict.fromkeys(map(str, tags)))


class _Dumper(yaml.SafeDumper):
    """Quotes text that some reader of YAML might take for something else: 1e5 is text to PyYAML and a number to the Hub."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if re.fullmatch(r"[A-Za-z][A-Za-z0-9 _./-]*", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
