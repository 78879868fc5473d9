"""The tokenizer of a run: a ready one loaded and checked, or else one trained on its sources (train.py)."""

import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from pipeline.process.errors import InputMissingError, RecipeError, ServiceError, first_line
from pipeline.process.storage import refuse_unreadable_files
from pipeline.recipe.schema import Tokenizer, TokenizerSettings
from pipeline.tokenizer.chat import RESPONSE_TEMPLATE, built_in_template, custom_template, template_problems
from pipeline.tokenizer.encode import (
    AWKWARD,
    BOS,
    END,
    PAD,
    TEMPLATE_MARKS,
    control_strings,
    plain_backend,
)

CONTROL_MARK = re.compile(r"<\|\w+\|>")
WRITE_ONE = (
    "Name a Jinja file as tokenizer.chat_template that has {% generation %} ... {% endgeneration %} around what the "
    "assistant writes, its end of turn included; TRL has such files for many models "
    "(trl/chat_templates/*_training.jinja)."
)


def load_ready(settings: TokenizerSettings) -> Any:
    """Return the tokenizer that `tokenizer.path` names, ready for both stages; the first rank prints each change."""
    tokenizer, lines = ready_tokenizer(settings)
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line)
    return tokenizer


def ready_tokenizer(settings: TokenizerSettings) -> tuple[Any, list[str]]:
    """Return the tokenizer that `tokenizer.path` names, and a line for what is kept of it and for each change.

    One with a chat template stays as it is: its end token, its control tokens, its ids. `tokenizer.chat_template`
    replaces the template alone. One without gets the built-in template, and behind its last id the control tokens that
    this writes: the model needs rows for them. Raises RecipeError when stage sft cannot train with the template.
    """
    # 1. The tokenizer, and the template that the recipe gives it. A template of one's own that writes our control
    #    tokens needs their ids as the built-in one does.
    section = settings.tokenizer
    assert section.path is not None
    tokenizer = open_tokenizer(
        section.path, revision=section.revision, beside=settings.recipe_path, where="tokenizer.path"
    )
    other_ids = _other_ids(tokenizer, section.revision)
    given = given_template(settings)
    if given and (tokenizer.chat_template or not any(mark in given for mark in TEMPLATE_MARKS)):
        tokenizer.chat_template = given
    elif given or not tokenizer.chat_template:
        lines = _completed(tokenizer, section, template=given)
        if lines:
            lines[-1] += other_ids
        return tokenizer, lines
    # 2. One with a template keeps its ids; for SFT the template must show what the assistant writes.
    problems = template_problems(tokenizer)
    whose = section.chat_template or f"the chat template of {section.path}"
    if problems and (given or settings.stage == "sft"):
        raise RecipeError(f"tokenizer: {whose} cannot be trained with: it {'; it '.join(problems)}. {WRITE_ONE}")
    lines = _template_lines(tokenizer, section, problems, stage=settings.stage)
    pieces = sorted({mark for mark in CONTROL_MARK.findall(given or "") if len(tokenizer.tokenize(mark)) > 1})
    if pieces:
        lines.append(
            f"tokenizer: {', '.join(pieces)} of {section.chat_template} is no token of {section.path}: it is trained "
            "as pieces of text. For a new token begin with stage 1."
        )
    if lines:
        lines[0] += other_ids
    return tokenizer, lines


def _other_ids(tokenizer: Any, revision: str | None) -> str:
    """Return what to add to a line where the class that transformers reads tokenizer.json with gives other ids than
    the file."""
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    quiet = {f"_raise_exceptions_for_{kind}": False for kind in ("gated_repo", "missing_entries", "connection_errors")}
    file = cached_file(tokenizer.name_or_path, "tokenizer.json", revision=revision, local_files_only=True, **quiet)
    if file is None:
        return ""
    of_file = Tokenizer.from_file(file)
    of_file.no_truncation()
    of_file.no_padding()
    of_file.encode_special_tokens = True
    found = of_file.encode_batch_fast(list(AWKWARD), add_special_tokens=False)
    used = plain_backend(tokenizer).encode_batch_fast(list(AWKWARD), add_special_tokens=False)
    if [encoding.ids for encoding in found] == [encoding.ids for encoding in used]:
        return ""
    return (
        f". {type(tokenizer).__name__}, as which transformers reads it, gives other ids than its tokenizer.json, and "
        'these are used: to use the file\'s, write "tokenizer_class": "TokenizersBackend" into tokenizer_config.json'
    )


def _template_lines(tokenizer: Any, section: Tokenizer, problems: list[str], *, stage: str) -> list[str]:
    path, given, own = section.path, section.chat_template, custom_template(tokenizer)
    if own is None:  # ours, of an earlier stage
        if given or tokenizer.chat_template == built_in_template(control_strings(tokenizer)):
            return []
        return [
            (
                f"tokenizer: {path} keeps its chat template, which is another than the built-in one; "
                "tokenizer.chat_template: FILE replaces it"
            )
        ]
    whose = f"has the chat template {given}" if given else "keeps its chat template"
    lines = [f"tokenizer: {path} {whose} and its {len(tokenizer):,} ids; nothing is added"]
    if problems:
        return [*lines, f"tokenizer: stage sft could not train with this template: it {'; it '.join(problems)}"]
    if stage == "pretrain":
        return lines
    end = None if own.end_of_turn is None else tokenizer.convert_ids_to_tokens(own.end_of_turn)
    if own.marks_answers:
        lines.append("tokenizer: trained is what the template has between its {% generation %} marks")
    else:
        lines.append(f"tokenizer: trained are the assistant's turns, each with its end {end!r}")
    if end is None:
        lines.append("tokenizer: no control token stands between these marks, so the model does not learn to stop")
    if own.writes_date:
        lines.append(f"tokenizer: where the template writes today's date, the rows have {own.date:%d %B %Y}")
    return lines


def _completed(tokenizer: Any, section: Tokenizer, *, template: str | None) -> list[str]:
    """Add bos, pad, a chat template and the control tokens that it writes; a line for each change."""
    ids_before, lines = len(tokenizer), []
    added: list[str] = []
    if tokenizer.bos_token is None:
        added = _add_missing(tokenizer, [BOS])
        if added:
            tokenizer.bos_token = BOS
    added += _add_missing(tokenizer, TEMPLATE_MARKS)
    if tokenizer.eos_token != END:
        lines.append(
            f"tokenizer: eos_token of {section.path} was {tokenizer.eos_token!r} and is now {END!r}, the end of a turn"
        )
        tokenizer.former_eos = tokenizer.eos_token
        tokenizer.eos_token = END
    if tokenizer.pad_token is None:
        added += _add_missing(tokenizer, [PAD])
        tokenizer.pad_token = PAD
    set_template(tokenizer, template)
    if problems := template_problems(tokenizer):
        what = section.chat_template or f"the built-in chat template with {section.path}"
        raise RecipeError(f"tokenizer: {what} cannot be trained with: it {'; it '.join(problems)}. {WRITE_ONE}")
    if added:
        lines.append(
            f"tokenizer: {section.path} has no chat template and gets "
            f"{section.chat_template or 'the built-in one'}; it lacks {' '.join(added)}; added: {ids_before:,} -> "
            f"{len(tokenizer):,} ids"
        )
    return lines


def _is_of_a_model(record: logging.LogRecord) -> bool:
    """Return False for transformers' warning that a tokenizer's folder is of a type of model that it does not know."""
    return "to instantiate a model of type ``" not in record.getMessage()


def open_tokenizer(path: str, *, revision: str | None, beside: str | None, where: str) -> Any:
    """Return a fast tokenizer from a folder (relative to the file `beside`, then to the working folder) or from the
    Hub."""
    folder = next(filter(Path.is_dir, _places(path, beside)), None)
    if folder is None and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputMissingError(f"{where}: there is no folder {path}. Correct the path, or give a Hub id like gpt2.")
    if folder is not None:
        refuse_unreadable_files(folder)
    from transformers import AutoTokenizer

    # Whoever renders with it, as lm_eval and our letters do.
    from pipeline.tokenizer.template_sandbox import bound_templates

    bound_templates()
    logging.getLogger("transformers.configuration_utils").addFilter(_is_of_a_model)
    try:
        # False, not left open: beside a model with its own code transformers would ask on the terminal, and wait.
        tokenizer = AutoTokenizer.from_pretrained(folder or path, revision=revision, trust_remote_code=False)
    except Exception as error:  # its files are somebody else's, and may hold anything
        reason = first_line(error)
        if folder is not None:
            raise InputMissingError(_none(where, folder, reason)) from None
        raise ServiceError(
            f"{where}: {path} is no folder here, and the Hub gave no tokenizer of that name ({reason}). "
            "Check the name, the network and HF_TOKEN, or name a folder."
        ) from None
    # For many types of models transformers makes an empty tokenizer where there are no files of one.
    tokens = "".join(tokenizer.get_vocab().keys() - set(control_strings(tokenizer)))
    if not any(map(str.isalnum, tokens)):
        raise InputMissingError(_none(where, folder or path, f"its {len(tokenizer)} ids stand for no text"))
    if not tokenizer.is_fast:
        raise RecipeError(
            f"{where}: {path} has no tokenizer.json, and one in Python is too slow here. Convert it first."
        )
    return tokenizer


def _none(where: str, place: Any, reason: str) -> str:
    at = "" if where == str(place) else f"{where}: "
    return (
        f"{at}{place} has no tokenizer ({reason[:100]}). Put its tokenizer.json there, or name one as tokenizer.path."
    )


def set_template(tokenizer: Any, template: str | None) -> None:
    """Give the tokenizer this chat template, or else the built-in one for its control strings."""
    if template is None:
        tokenizer.chat_template = built_in_template(control_strings(tokenizer))
        tokenizer.response_template = RESPONSE_TEMPLATE
    else:
        tokenizer.chat_template = template
        tokenizer.response_template = None


def given_template(settings: TokenizerSettings) -> str | None:
    """Return the text of the file that tokenizer.chat_template names."""
    name = settings.tokenizer.chat_template
    if name is None:
        return None
    for file in _places(name, settings.recipe_path):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise InputMissingError(
        f"tokenizer.chat_template: there is no file {name}. Correct the path, or leave the key out."
    )


def _places(path: str, beside: str | None) -> list[Path]:
    """Return where a path is looked for: relative to the file `beside`, then to the working folder."""
    places = [Path(path).expanduser()]
    if beside:
        places.insert(0, Path(beside).parent / path)
    return places


def _add_missing(tokenizer, names) -> list[str]:
    from tokenizers import AddedToken

    known = set(control_strings(tokenizer))
    missing = [name for name in names if name not in known]
    # special=True also where the string was an ordinary id before: then it keeps its id and becomes a control token.
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in missing], special_tokens=True)
    return missing


def identity(tokenizer) -> str:
    """Return what makes two tokenizers the same: ids for every text, named specials, chat template; 64 hex digits."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left behind by whoever called the tokenizer last; no part of what it is.
    backend.pop("padding")
    backend.pop("truncation")
    state = {"backend": backend, "specials": tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def comes_back_beside(config: Any, tokenizer: Any) -> bool:
    """Return whether AutoTokenizer, asked for a folder with this model config, gives this very tokenizer.

    A config that AutoTokenizer cannot read (of your own code) decides nothing, and gives True.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            back = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, KeyError, OSError):
            return True
    return hasattr(back, "backend_tokenizer") and identity(back) == identity(tokenizer)
