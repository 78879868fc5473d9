"""The hostile things by kind; in each module THINGS: name -> Thing."""

import importlib

from tests.hostile.trial import Thing

KINDS = ("repositories", "runs", "recipes", "models", "rows")
# One or two of each kind, and what once did harm: a normal test makes them.
FAST = (
    "repositories: a seal that names a file above",
    "repositories: a listing with names above",
    "runs: markup and control characters",
    "recipes: a file without end",
    "models: weights that are a pickle",
    "models: a template that walks to os",
    "rows: a format that is a program, columns its words",
    "rows: a zst bomb",
)


def all_things() -> dict[str, Thing]:
    """Return every thing by `kind: name`."""
    modules = {kind: importlib.import_module(f"{__name__}.{kind}") for kind in KINDS}
    return {f"{kind}: {name}": thing for kind, module in modules.items() for name, thing in module.THINGS.items()}
