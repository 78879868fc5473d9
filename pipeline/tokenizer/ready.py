"""Ready tokenizers, from a folder or the Hub, made fit for both stages."""

from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import InputMissingError, RecipeError, ServiceError
from pipeline.tokenizer.chat import built_in_template, template_problems
from pipeline.tokenizer.specials import BOS, END, PAD, TEMPLATE_MARKS, control_strings


def load_ready(recipe) -> Any:
    """The tokenizer that `tokenizer.path` names, complete: bos, pad, a chat template and the control tokens it writes.

    What is missing is added behind the last id, and each addition is printed: the model needs rows for it. Its own chat
    template stays when it marks what the assistant writes; `tokenizer.chat_template` goes before either.
    """
    settings = recipe.tokenizer
    tokenizer = open_tokenizer(settings.path, revision=settings.revision, beside=recipe.path, where="tokenizer.path")
    ids_before, own_template = len(tokenizer), tokenizer.chat_template
    added = _add_missing(tokenizer, [BOS] if tokenizer.bos_token is None else [])
    if added:
        tokenizer.bos_token = BOS
    if own_template and not settings.chat_template:
        problems = template_problems(tokenizer)
        if not problems:
            added += _add_pad(tokenizer)
            _say(settings.path, added, ids_before, tokenizer)
            return tokenizer
        print(
            f"tokenizer: the chat template of {settings.path} {'; it '.join(problems)}. The built-in one replaces it."
        )
    added += _add_missing(tokenizer, TEMPLATE_MARKS)
    if tokenizer.eos_token != END:
        print(
            f"tokenizer: eos_token of {settings.path} was {tokenizer.eos_token!r} and is now {END!r}, the end of a turn"
        )
        tokenizer.eos_token = END
    added += _add_pad(tokenizer)
    tokenizer.chat_template = chosen_template(recipe, control_strings(tokenizer))
    problems = template_problems(tokenizer)
    if problems:
        what = settings.chat_template or f"the built-in chat template with {settings.path}"
        raise RecipeError(
            f"tokenizer: {what} {'; it '.join(problems)}. Correct tokenizer.chat_template or take another tokenizer."
        )
    _say(settings.path, added, ids_before, tokenizer)
    return tokenizer


def open_tokenizer(path: str, *, revision: str | None, beside: str | None, where: str) -> Any:
    """A fast tokenizer from a folder (relative to the file `beside`, then to the working folder) or from the Hub."""
    folder = _folder(path, beside)
    if folder is None and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputMissingError(f"{where}: there is no folder {path}. Correct the path, or give a Hub id like gpt2.")
    from transformers import AutoTokenizer

    try:
        # False, not left open: beside a model with its own code transformers would ask on the terminal, and wait.
        tokenizer = AutoTokenizer.from_pretrained(folder or path, revision=revision, trust_remote_code=False)
    except Exception as error:  # its files are somebody else's, and may hold anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if folder is not None:
            raise InputMissingError(
                f"{folder}: no tokenizer can be read from it ({reason}). Name a folder with tokenizer.json."
            ) from None
        raise ServiceError(
            f"{where}: {path} is no folder here, and the Hub gave no tokenizer of that name ({reason}). "
            "Check the name, the network and HF_TOKEN, or name a folder."
        ) from None
    if not tokenizer.is_fast:
        raise RecipeError(
            f"{where}: {path} has no tokenizer.json, and one in Python is too slow here. Convert it first."
        )
    return tokenizer


def chosen_template(recipe, controls: list[str]) -> str:
    """The chat template: the file that the recipe names, else the built-in one for these control strings."""
    name = recipe.tokenizer.chat_template
    if name is None:
        return built_in_template(controls)
    near = [Path(recipe.path).parent / name] if recipe.path else []
    for file in [*near, Path(name).expanduser()]:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise InputMissingError(
        f"tokenizer.chat_template: there is no file {name}. Correct the path, or leave the key out."
    )


def _folder(path: str, beside: str | None) -> Path | None:
    near = [Path(beside).parent / path] if beside else []
    return next((folder for folder in [*near, Path(path).expanduser()] if folder.is_dir()), None)


def _add_missing(tokenizer, names) -> list[str]:
    from tokenizers import AddedToken

    known = set(control_strings(tokenizer))
    missing = [name for name in names if name not in known]
    # special=True also where the string was an ordinary id before: then it keeps its id and becomes a control token.
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in missing], special_tokens=True)
    return missing


def _add_pad(tokenizer) -> list[str]:
    if tokenizer.pad_token is not None:
        return []
    added = _add_missing(tokenizer, [PAD])
    tokenizer.pad_token = PAD
    return added


def _say(path: str, added: list[str], ids_before: int, tokenizer) -> None:
    if added:
        print(f"tokenizer: {path} lacks {' '.join(added)}; added: {ids_before:,} -> {len(tokenizer):,} ids")
