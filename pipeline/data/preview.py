"""Rows as a person reads them: those of a run, and data before there is a recipe, with the lines for one."""

import re
import shlex
import shutil
import textwrap
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pipeline.data.losses import untrained_lines
from pipeline.data.rows import TrainingRows, bits
from pipeline.process.commands import command
from pipeline.process.errors import DataError, InputMissingError, RecipeError, ServiceError
from pipeline.recipe.checks import check_source
from pipeline.recipe.layers import NEAR, find_recipe
from pipeline.recipe.located_yaml import Item, Problems, compose
from pipeline.recipe.resolve import TEXT_ID
from pipeline.recipe.schema import Data, Recipe, Source, SourceSettings, Tokenizer, TokenizerSettings
from pipeline.recipe.values import section_kind, section_of, typed_values
from pipeline.sources.formats import Format, is_described
from pipeline.sources.open import open_sources, planned_sources
from pipeline.sources.raw_rows import kind_of, read_blocks
from pipeline.sources.recognition import NO_CONVERSATIONS, Recognised, column_types, first_rows, recognise
from pipeline.sources.source import OpenSource
from pipeline.sources.verify import grouped, untrainable
from pipeline.tokenizer.chat import rendered_talks

OWN_RECIPES = {"pretrain": "own_text", "sft": "own_chat"}  # of the shipped, those for data of one's own
SHOWN_LINES = 12  # of a row
COUNTED = 2_000  # conversations whose lengths are counted
COLUMNS_SHOWN = 30
GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def shown_rows(rows: TrainingRows, tokenizer: Any, *, count: int, colour: bool) -> Iterator[str]:
    """Yield the first rows of the run as text. Trained tokens are green, or in [[ ]] without colour; padding is only
    counted."""
    for number in range(min(count, rows.total_rows())):
        step = rows.step_rows.steps(number)
        at = number - rows.step_rows.before(step)
        place = rows.places(step)[at]
        shard = rows.stream.shard(place)
        used = int(shard.used[place.row])
        ids = shard.input_ids[place.row][:used].tolist()
        trained = [False] + [True] * (used - 1)
        if shard.trained is not None:
            trained = bits(shard.trained[place.row], rows.row_tokens + 1)[:used].tolist()
            trained[0] = False
        name, pq, rg, row = rows.origins(step)[at]
        head = (
            f"row {number}: {name} pq {pq} rg {rg} row {row}, {used} of {rows.row_tokens + 1} positions used, "
            f"{int(shard.targets[place.row])} trained"
        )
        yield f"{DIM}{head}{PLAIN}" if colour else head
        yield marked(tokenizer, ids, trained, colour=colour)


def marked(tokenizer: Any, ids: list[int], trained: list[bool], *, colour: bool) -> str:
    """Return the text of the ids, what is trained in green, or in [[ ]] without colour."""
    before, behind = (GREEN, PLAIN) if colour else ("[[", "]]")
    parts = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([i for i, _ in group], skip_special_tokens=False)
        parts.append(f"{before}{text}{behind}" if is_trained else text)
    return "".join(parts)


def is_recipe(argument: str) -> bool:
    """Return whether the command's argument names a recipe, and not data: a .yaml file, or the bare name of one."""
    if argument.endswith((".yaml", ".yml")) or Path(argument).exists():
        return argument.endswith((".yaml", ".yml"))
    try:
        find_recipe(argument)
    except InputMissingError as error:
        if NEAR in str(error):  # a recipe's name with a slip; the id of a dataset is like none of them
            raise
        return False
    return True


def preview(
    target: str, settings: list[str], *, tokenizer: str | None, rows: int, colour: bool, with_recipe: bool = True
) -> Generator[str, None, tuple[dict[str, Any], str]]:
    """Yield lines for a terminal of 80 columns; return the source's keys and the stage that it is for.

    settings: keys of a source, as split=test. with_recipe: whether the lines end with a recipe. Raises what a recipe
    with that source would raise: InputMissingError, RecipeError, DataError, ServiceError.
    """
    # 1. The rows as they are, and which stages could read them.
    spec = source_of(target, settings)
    kinds = _kinds(spec)
    # No validation: nothing is held out, all of it is read.
    opened_with = SourceSettings(Data(sources=[spec], validation=[]), kinds[0])
    try:
        planned = planned_sources(opened_with)[0]
    except (ServiceError, InputMissingError) as error:
        if spec.id != target or "/" in target:
            raise
        raise type(error)(f"no file or folder {target} is here; as the id of a dataset, {error}") from None
    planned.files.sort(key=lambda file: file.label)
    sample = first_rows(planned.files)
    found: dict[Any, Recognised | None] = {}
    usable = []
    if not is_described(spec):
        for kind in kinds:
            found[kind] = seen = recognise(sample, kind=kind)
            if seen and seen.format:
                usable.append(kind)
    if any(found.values()) and not usable:
        yield from _columns(sample, None)
        raise DataError(f"{planned.files[0].path or planned.files[0].label} {_refusal(found)}")

    # 2. The source as a training would open it, with everything that is wrong with its files.
    kind = usable[0] if usable else kinds[0]
    source = open_sources(replace(opened_with, kind=kind))[0][0].once
    source.files.sort(key=lambda file: file.label)
    items = list(islice(chain.from_iterable(block.items for block in source.read()), COUNTED))
    if not items:
        raise DataError(f"{target}: no row of it can be trained on. Look at its rows, or name other files.")
    # 3. What is shown of it.
    seen = found.get(kind)
    reading = seen.name if seen else f"read as {source.format.identity()}"
    yield f"{target}: {reading}"
    yield _size(source)
    if any(kind_of(file.label) != "txt" for file in source.files):  # a text file has no columns
        yield from _columns(sample, source.format)
    renderer = _tokenizer(tokenizer)
    yield from _rows(items[:rows], source, renderer, colour=colour)
    if kind == "chat":
        # Bytes have no lengths worth a line: they are counted in tokens of a tokenizer that was named.
        yield from _conversations(source, items, renderer if tokenizer else None)
    stage = "sft" if kind == "chat" else "pretrain"
    given = {key: value for key, value in vars(spec).items() if value and value != getattr(Source(), key)}
    if with_recipe:
        yield from _recipe_lines(given, stage)
        text = found.get("text")
        if usable == ["chat", "text"] and text and text.format:
            yield f"Its column {text.format.column} is text: {command('pretrain')} trains on that alone."
    return given, stage


def source_of(target: str, settings: list[str]) -> Source:
    """Return the source that files, a folder, a glob or the id of a dataset are, with further keys of a source."""
    path = Path(target).expanduser()
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+|tandem:\w+|[\w-]+", target) and kind_of(target) is None
    if not (path.exists() or re.search(r"[*?\[]", target) or is_id):
        raise InputMissingError(
            f"{target}: there is no such file or folder, and it is no id of a dataset (owner/name). Correct the path; "
            "a recipe ends in .yaml."
        )
    problems = Problems()
    key = "id" if is_id and not path.exists() else "files"
    items = {key: Item(target, "command line")}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(
                f"command line: {setting} is no key of a source. Write key=value, for example split=test."
            )
        items[key] = compose(value, "command line", problems, where="command line")
    values = typed_values(section_kind(Source), Item(items, "command line"), "data.sources.0", problems)
    problems.raise_if_any()
    source: Source = section_of(Source, values)
    check_source("data.sources.0", source, problems.of(Recipe(path="command line").where))
    problems.raise_if_any()
    return source


def _kinds(spec: Source) -> list[Any]:
    """Return what the source can be for; conversations first, since most of them have some column of text too."""
    if spec.text_column or spec.format == "text" or "text" in (spec.columns or ()) or spec.id == TEXT_ID:
        return ["text"]
    if is_described(spec) or (spec.id or "").startswith("tandem:"):
        return ["chat"]
    return ["chat", "text"]


def _refusal(found: dict[Any, Recognised | None]) -> str:
    chat, text = found.get("chat"), found.get("text")
    if text and (not chat or chat.name == NO_CONVERSATIONS):
        return (
            f"{text.refusal.removesuffix('.')} to pretrain on it; for SFT name the columns of a conversation: columns: "
            "{prompt: COLUMN, response: COLUMN} (docs/data.md)."
        )
    assert chat is not None
    return chat.refusal


def _size(source: OpenSource) -> str:
    here = [file.path for file in source.files if file.path is not None]
    size = sum(file.bytes for file in source.files)
    assert source.facts is not None
    rows = sum(source.facts.rows(path) for path in here)
    text = f"{rows:,} rows, {size:,} bytes, files: {len(source.files):,}"
    if len(here) < len(source.files):
        text += f", of which {len(here):,} are here"
    return text


def _columns(sample: list[Any], form: Format | None) -> Iterator[str]:
    """Yield the name, kind and use of each column, in the rows that were looked at."""
    types = column_types([row for row in sample if isinstance(row, dict)])
    uses = {}
    if form:
        uses = {column: role for role, column in form.columns}
        if form.column:
            uses[form.column] = "text" if form.kind == "text" else "conversation"
    for name, kind in islice(types.items(), COLUMNS_SHOWN):
        yield f"  {textwrap.shorten(name, 32, placeholder='...'):<32}  {kind:<10}  {uses.get(name, '-')}"
    if len(types) > COLUMNS_SHOWN:
        yield f"  and {len(types) - COLUMNS_SHOWN} more columns"


def _tokenizer(name: str | None) -> Any:
    """Return the named tokenizer, or one of single bytes with the built-in chat template, which shows rows."""
    if name is None:
        from pipeline.tokenizer.train import train_bpe

        return train_bpe([], vocab_size=272, split_pattern="gpt2")
    from pipeline.tokenizer import load_or_train

    return load_or_train(TokenizerSettings(Tokenizer(path=name), "pretrain"), [])


def _rows(items: list[Any], source: OpenSource, tokenizer: Any, *, colour: bool) -> Iterator[str]:
    what = "all of it is learned"
    if source.kind == "chat":
        marks = "green" if colour else "[[ ]]"
        what = f"what the model learns to write is in {marks}"
    if items:
        yield f"{len(items)} rows as trained; {what}:"
    for item in items:
        if source.kind == "text":
            text, length = item.text, f"{len(item.text):,} characters"
        else:
            (rendered,) = rendered_talks(tokenizer, [item])
            length = f"{len(item.messages)} messages, tools: {len(item.tools or ())}"
            if isinstance(rendered, DataError):
                text = f"left out: {rendered}"
            else:
                text = marked(tokenizer, *rendered, colour=colour)
        yield f"row {item.row} of {Path(source.files[item.file].label).name} ({length})"
        most = 4 * 80 * (SHOWN_LINES + 1)  # textwrap takes minutes over one word of a hundred megabytes
        lines = list(islice(_wrapped(text[:most], indent="  "), SHOWN_LINES + 1))
        yield from lines[:SHOWN_LINES]
        if len(lines) > SHOWN_LINES or len(text) > most:
            yield f"  {PLAIN}..." if colour else "  ..."


def _conversations(source: OpenSource, items: list[Any], tokenizer: Any) -> Iterator[str]:
    """Yield lengths of the first conversations and what is left out of them; raise DataError as untrained_lines."""
    if tokenizer is not None:
        rendered = rendered_talks(tokenizer, items)
        lengths = [len(talk[0]) for talk in rendered if not isinstance(talk, DataError)]
        refused = [talk for talk in rendered if isinstance(talk, DataError)]
        if lengths:
            yield f"{len(lengths):,} conversations of {median(lengths):,.0f} tokens (median), {max(lengths):,} at most"
        for line in untrained_lines(source.name, items, tokenizer):
            yield from _wrapped(f"warning: {line}", indent="  ")
        if refused:
            yield from _wrapped(f"{len(refused):,} bad rows for this tokenizer: {refused[0]}", indent="  ")
    file = source.files[0]
    path = file.local_path()
    blocks = islice(read_blocks(path, columns=source.format.read_columns), 2)
    lines = (line for block in blocks for line in untrainable(path, block, source.format))
    for reason in grouped([f"{file.label}{line.removeprefix(str(path))}" for line in lines]):
        yield from _wrapped(f"left out, and counted as empty: {reason}", indent="  ")


def _recipe_lines(given: dict[str, Any], stage: str) -> Iterator[str]:
    recipe = OWN_RECIPES[stage]
    yield "A recipe:"
    tree = {"extends": recipe, "data": {"sources": [given]}}
    for line in yaml.safe_dump(tree, sort_keys=False, width=70, allow_unicode=True).splitlines():
        yield f"  {line}"
    flow = yaml.safe_dump([given], sort_keys=False, default_flow_style=True, width=10_000, allow_unicode=True)
    yield "Or on the command line:"
    yield f"  {command(stage, recipe)} \\"
    yield f"      {shlex.quote(f'data.sources={flow.strip()}')}"


def _wrapped(text: str, *, indent: str = "") -> Iterator[str]:
    """Yield lines of at most 80 columns, the text's own line ends kept."""
    width = min(80, shutil.get_terminal_size().columns)
    for line in text.splitlines() or [""]:
        yield from textwrap.wrap(line, width=width, initial_indent=indent, subsequent_indent=indent) or [""]
