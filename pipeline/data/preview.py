"""Rows as a person reads them: what a source gives, what is learnt, and the line for a recipe."""

import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Generator, Iterator
from itertools import groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pipeline.data.losses import MOST, MUCH, aligned, trained_characters
from pipeline.data.rows import TrainingRows, bits
from pipeline.process.commands import command
from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.recipe.batch import step_rows
from pipeline.recipe.checks import check_source, sayer
from pipeline.recipe.layers import find_recipe
from pipeline.recipe.located_yaml import Item, Problems, compose
from pipeline.recipe.resolve import TEXT_ID
from pipeline.recipe.schema import Recipe, Source
from pipeline.recipe.values import section_kind, section_of, typed_values
from pipeline.sources.formats import Format
from pipeline.sources.open import OpenSource, open_sources, planned_sources
from pipeline.sources.raw_rows import kind_of, read_blocks, text_bytes
from pipeline.sources.recognition import NO_CONVERSATIONS, Recognised, column_types, first_rows, recognise
from pipeline.sources.verify import grouped, untrainable
from pipeline.tokenizer.chat import rendered_talks
from pipeline.tokenizer.encode import plain_backend
from pipeline.tokenizer.trained_share import missing_lines, untrained_shares

# Prepared rows for people, with their trained tokens marked.

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
    parts = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([i for i, _ in group], skip_special_tokens=False)
        parts.append(text if not is_trained else f"{GREEN}{text}{PLAIN}" if colour else f"[[{text}]]")
    return "".join(parts)


# The length of a run in epochs before its rows are packed.

COUNTED_BYTES = 1_000_000  # of each source; of the rest the size is known


def about_steps(tokens: float | None, recipe: Recipe) -> int | None:
    """Return the steps of a run over so many tokens. data.batch_tokens must be known."""
    return None if tokens is None else step_rows(recipe).steps(int(tokens / recipe.data.row_tokens))


def about_tokens(recipe: Recipe) -> tuple[float | None, int | None]:
    """Return the tokens of a run in epochs, by those of each source's first megabyte, and the bytes that are held out;
    None where sizes are not known, for the tokens also where a source has a weight or the tokenizer is that of a model
    elsewhere.

    A tokenizer that has to be trained is trained on these texts. Raises as open_sources.
    """
    from pipeline.tokenizer.load import ready_tokenizer
    from pipeline.tokenizer.train import text_of, train_bpe

    sources, validation = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    sizes = [text_bytes(source) for source in validation]
    held_out = None if None in sizes else sum(size or 0 for size in sizes)
    elsewhere = recipe.tokenizer.path is None and recipe.model.start_from is not None
    if elsewhere or any(source.spec.weight is not None for source in sources):
        return None, held_out
    first = [_first_items(source) for source in sources]
    if recipe.tokenizer.path:
        tokenizer, _ = ready_tokenizer(recipe)
    else:
        texts = (text_of(item) for items, _ in first for item in items)
        settings = recipe.tokenizer
        assert settings.vocab_size is not None
        tokenizer = train_bpe(texts, vocab_size=settings.vocab_size, split_pattern=settings.split_pattern)
    tokens = 0.0
    for source, (items, share) in zip(sources, first, strict=True):
        if share is None:
            return None, held_out
        tokens += _count_tokens(items, tokenizer, recipe) / share * (source.spec.epochs or 1.0)
    epochs = float(recipe.train.get("num_train_epochs") or 1.0)
    return tokens * epochs, held_out


def _first_items(source: OpenSource) -> tuple[list[Any], float | None]:
    """Return the source's first documents or conversations, and the share of it that they are."""
    items, size = list[Any](), 0
    for item in (item for block in source.read() for item in block.items):
        if size >= COUNTED_BYTES:
            whole = text_bytes(source)
            return items, min(1.0, size / whole) if whole else None
        items.append(item)
        content = item.text if source.kind == "text" else json.dumps(item.messages, ensure_ascii=False)
        size += len(content.encode())
    return items, 1.0


def _count_tokens(items: list[Any], tokenizer: Any, recipe: Recipe) -> int:
    """Return the tokens of documents, each with its BOS, or of conversations, which are cut to a row; padding of rows
    of one each too."""
    if recipe.stage == "sft":
        rendered = [talk for talk in rendered_talks(tokenizer, items) if not isinstance(talk, DataError)]
        if recipe.data.one_text_rows:
            return len(rendered) * recipe.data.row_tokens
        return sum(min(len(ids), recipe.data.row_tokens + 1) for ids, _ in rendered)
    encoded = plain_backend(tokenizer).encode_batch([item.text for item in items], add_special_tokens=False)
    return sum(len(encoding.ids) + 1 for encoding in encoded)


# A look at data before there is a recipe: what the rows are, three of them as they are trained, the lines for a
# recipe.

REPOSITORY = Path(__file__).parents[2]
OWN_RECIPES = {"pretrain": "own_text", "sft": "own_chat"}  # of the shipped, those for data of one's own
SHOWN_LINES = 12  # of a row
COUNTED = 2_000  # Conversations whose turns and lengths are counted.
LENGTHS = (512, 1024, 2048)
COLUMNS_SHOWN = 30


def is_recipe(argument: str) -> bool:
    """Return whether the command's argument names a recipe, and not data: a .yaml file, or the bare name of one."""
    if argument.endswith((".yaml", ".yml")) or Path(argument).exists():
        return argument.endswith((".yaml", ".yml"))
    try:
        find_recipe(argument)
    except InputMissingError:
        return False
    return True


def preview(
    target: str, settings: list[str], *, tokenizer: str | None, rows: int, colour: bool, recipe: bool = True
) -> Generator[str, None, tuple[dict[str, Any], str]]:
    """Yield lines for a terminal of 80 columns; return the source's keys and the stage that it is for. settings: keys
    of a source, `split=test`; recipe: whether the lines end with a recipe.

    Raises what a recipe with that source would raise: InputMissingError, RecipeError, DataError, ServiceError.
    """
    whole = Recipe()
    whole.data.sources = [source_of(target, settings)]
    whole.data.validation = []  # Nothing is held out: all of it is looked at.
    spec = whole.data.sources[0]
    kinds = _kinds(spec)
    planned = planned_sources(whole, kind=kinds[0])[0]
    planned.files.sort(key=lambda file: file.label)
    sample = first_rows(planned.files)
    found = {} if _says_itself(spec) else {kind: recognise(sample, kind=kind) for kind in kinds}
    usable = [kind for kind in kinds if (seen := found.get(kind)) and seen.format]
    if any(found.values()) and not usable:
        yield f"{target}:"
        yield from _columns(sample, None)
        yield ""
        raise DataError(f"{planned.files[0].path or planned.files[0].label} {_refusal(found)}")

    kind = usable[0] if usable else kinds[0]
    source = open_sources(whole, kind=kind)[0][0].once
    source.files.sort(key=lambda file: file.label)
    items = list(islice((item for block in source.read() for item in block.items), COUNTED))
    if not items:
        raise DataError(f"{target}: no row of it can be trained on. Look at its rows, or name other files.")
    seen = found.get(kind)
    yield f"{target}: {seen.name if seen else f'read as {source.format.identity()}'}"
    yield _size(source)
    yield ""
    if any(kind_of(file.label) != "txt" for file in source.files):  # A text file has no columns.
        yield from _columns(sample, source.format)
        yield ""
    named = _named_tokenizer(whole, tokenizer) if tokenizer else None
    yield from _rows(items[:rows], source, named or _bytes_tokenizer(), colour=colour)
    if kind == "chat":
        yield from _conversations(source, items, named)
    given, stage = _given(spec), "sft" if kind == "chat" else "pretrain"
    if not recipe:
        return given, stage
    yield from _recipe_lines(given, stage)
    text = found.get("text")
    if usable == ["chat", "text"] and text and text.format:
        yield ""
        yield from _wrapped(f"Its column {text.format.column} is text: {command('pretrain')} trains on that alone.")
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
    items = {"files" if path.exists() or not is_id else "id": Item(target, "command line")}
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
    check_source("data.sources.0", source, sayer(Recipe(path="command line"), problems))
    problems.raise_if_any()
    return source


def _says_itself(spec: Source) -> bool:
    return bool(spec.text_column or spec.messages_column or spec.format or spec.columns)


def _kinds(spec: Source) -> list[Any]:
    """Return what the source can be for; conversations first, since most of them have some column of text too."""
    if spec.text_column or spec.format == "text" or "text" in (spec.columns or ()) or spec.id == TEXT_ID:
        return ["text"]
    return ["chat"] if _says_itself(spec) or (spec.id or "").startswith("tandem:") else ["chat", "text"]


def _refusal(found: dict[Any, Recognised | None]) -> str:
    chat, text = found.get("chat"), found.get("text")
    if text and (not chat or chat.name == NO_CONVERSATIONS):
        refusal = text.refusal.removesuffix(".")
        _, is_named, column = refusal.rpartition("text_column: ")
        typed = f" On the command line, behind the data: {shlex.quote(f'text_column={column}')}." if is_named else ""
        return (
            f"{refusal} to pretrain on it; for SFT name the columns of a conversation: columns: {{prompt: COLUMN, "
            f"response: COLUMN}} (docs/data.md).{typed}"
        )
    assert chat is not None
    return chat.refusal


def _size(source: OpenSource) -> str:
    here = [file for file in source.files if file.path is not None]
    size = sum(file.bytes for file in source.files)
    unit = next(
        (f"{size / scale:,.1f} {name}" for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if size >= scale),
        f"{size} bytes",
    )
    files = f"{unit} in {len(source.files):,} file{'s' if len(source.files) > 1 else ''}"
    assert source.facts is not None
    rows = sum(source.facts.rows(file.path) for file in here if file.path is not None)
    if len(here) == len(source.files):
        return f"{rows:,} rows, {files}"
    return f"{files}; {len(here):,} here, with {rows:,} rows"


def _columns(sample: list[Any], form: Format | None) -> Iterator[str]:
    """Name, kind, share of rows with a value and use of each column, in the rows that were looked at."""
    rows = [row for row in sample if isinstance(row, dict)]
    types = column_types(rows)
    if not types:
        return
    uses: dict[str, str] = {column: role for role, column in form.columns} if form else {}
    if form and form.column:
        uses[form.column] = "text" if form.kind == "text" else "conversation"
    lines = [("column", "holds", "filled", "read as")]
    for name, kind in islice(types.items(), COLUMNS_SHOWN):
        filled = sum(row.get(name) not in (None, "", []) for row in rows) / len(rows)
        holds = {"messages": "role, content", "turns": "from, value", "exchanges": "input, output"}.get(kind, kind)
        lines.append((textwrap.shorten(name, 32, placeholder="..."), holds, f"{filled:4.0%}", uses.get(name, "-")))
    yield from (f"  {line}" for line in aligned(lines))
    if len(types) > COLUMNS_SHOWN:
        yield f"  and {len(types) - COLUMNS_SHOWN} more columns"


def _named_tokenizer(recipe: Recipe, name: str) -> Any:
    from pipeline.tokenizer import load_or_train

    recipe.tokenizer.path = name
    return load_or_train(recipe, [])


def _bytes_tokenizer() -> Any:
    """Return a tokenizer of single bytes with the built-in chat template: it shows rows, and its lengths mean
    nothing."""
    from pipeline.tokenizer.train import train_bpe

    return train_bpe([], vocab_size=272, split_pattern="gpt2")


def _rows(items: list[Any], source: OpenSource, tokenizer: Any, *, colour: bool) -> Iterator[str]:
    kind = source.kind
    learned = "in green" if colour else "in [[ ]]"
    what = f"what the model learns to write is {learned}" if kind == "chat" else "all of it is learned"
    if items:
        yield f"{len(items)} row{'s' if len(items) > 1 else ''} as trained; {what}:"
    for item in items:
        yield ""
        if kind == "text":
            text, length = item.text, f"{len(item.text):,} characters"
        else:
            (rendered,) = rendered_talks(tokenizer, [item])
            refused = isinstance(rendered, DataError)
            text = f"left out: {rendered}" if refused else marked(tokenizer, *rendered, colour=colour)
            length = f"{len(item.messages)} messages"
            if item.tools:
                length += f", tools: {len(item.tools)}"
        file = f" of {Path(source.files[item.file].label).name}" if len(source.files) > 1 else ""
        yield f"row {item.row}{file} ({length})"
        most = 4 * 80 * (SHOWN_LINES + 1)  # textwrap takes minutes over one word of a hundred megabytes
        lines = list(islice(_wrapped(text[:most], indent="  "), SHOWN_LINES + 1))
        yield from lines[:SHOWN_LINES]
        if len(lines) > SHOWN_LINES or len(text) > most:
            yield f"  {PLAIN if colour else ''}..."
    yield ""


def _conversations(source: OpenSource, items: list[Any], tokenizer: Any) -> Iterator[str]:
    """Turns, lengths, and what is left out, over the first conversations."""
    talks = [item.messages for item in items]
    answers = [sum(message["role"] == "assistant" for message in talk) for talk in talks]
    system = sum(talk[0]["role"] == "system" for talk in talks)
    yield f"In the first {len(talks):,} conversations:"
    yield f"  answers in each   {median(answers):g} in the middle, {max(answers)} at most"
    yield f"  system message    in {system / len(talks):.0%}"
    if tokenizer is None:
        lengths = [sum(len(message.get("content") or "") for message in talk) for talk in talks]
        yield f"  characters        {median(lengths):,.0f} in the middle, {max(lengths):,} at most"
        yield "                    (--tokenizer ID_OR_FOLDER counts tokens)"
    else:
        rendered = rendered_talks(tokenizer, items)
        lengths = [len(talk[0]) for talk in rendered if not isinstance(talk, DataError)]
        refused = [talk for talk in rendered if isinstance(talk, DataError)]
        if lengths:
            yield f"  tokens            {median(lengths):,.0f} in the middle, {max(lengths):,} at most"
            longer = ", ".join(
                f"{limit:,}: {sum(n > limit + 1 for n in lengths) / len(lengths):.1%}" for limit in LENGTHS
            )
            yield f"  longer than rows  of {longer} (data.row_tokens)"
        characters = trained_characters(tokenizer, items, rendered)
        untrained = sum(untrained_shares(characters).values())
        if characters:
            yield f"  trained           {100 * (1 - untrained):.2f} % of the answers' characters"
        missing = missing_lines(tokenizer, characters, least=MUCH)
        if untrained > MOST:
            raise DataError("\n".join(f"{source.name}: {line}" for line in missing))
        for line in missing:
            yield from _wrapped(f"warning: {line}", indent="  ")
        if refused:
            yield from _wrapped(f"{len(refused):,} bad rows for this tokenizer: {refused[0]}", indent="  ")
    file = source.files[0]
    path = file.local_path()
    blocks = islice(read_blocks(path, columns=source.format.read_columns), 2)
    lines = (line for block in blocks for line in untrainable(path, block, source.format))
    left_out = [f"{file.label}{line.removeprefix(str(path))}" for line in lines]
    for reason in grouped(left_out):
        yield from _wrapped(f"left out, and counted as empty: {reason}", indent="  ")
    yield ""


def _given(spec: Source) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(spec).items()
        if value != Source.__dataclass_fields__[name].default and value
    }


def _recipe_lines(given: dict[str, Any], stage: str) -> Iterator[str]:
    recipe = OWN_RECIPES[stage]
    yield "A recipe:"
    tree = {"extends": recipe, "data": {"sources": [given]}}
    for line in yaml.safe_dump(tree, sort_keys=False, width=70, allow_unicode=True).splitlines():
        yield f"  {line}"
    yield ""
    yield "Or on the command line:"
    yield f"  {command(stage, recipe)} \\"
    yield f"      {shlex.quote(f'data.sources=[{_flow(given)}]')}"


def _flow(value: Any) -> str:
    """YAML on one line, with double quotes where it needs any: the shell wants the single ones."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(v)}' for key, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./*-]*", value)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _wrapped(text: str, *, indent: str = "") -> Iterator[str]:
    """Yield lines of at most 80 columns, the text's own line ends kept."""
    width = min(80, shutil.get_terminal_size().columns)
    for line in text.splitlines() or [""]:
        yield from textwrap.wrap(line, width=width, initial_indent=indent, subsequent_indent=indent) or [""]
