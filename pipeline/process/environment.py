"""Numbers that are set in the environment of a command: NPROC, NNODES, MAX_RESTARTS."""

from collections.abc import Mapping

from pipeline.process.errors import RecipeError


def whole_number(environ: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    """Return a whole number of the environment."""
    text = environ.get(name, str(default))
    if not (text.isdecimal() and int(text) >= least):
        raise RecipeError(
            f"{name} is {text!r}; it must be a whole number, {least} or more. Unset it or write a number."
        )
    return int(text)
