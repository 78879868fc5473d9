"""What the run will read: its sources, its tokenizer, the weights that it starts from, all opened before step 1."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts.cache import cache_dir, can_be_made
from pipeline.artifacts.checkpoints import SEAL, by_step, loadable_strays, problems
from pipeline.artifacts.errors import DataError, InputMissingError, RecipeError, TandemError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.recipe import Recipe
from pipeline.recipe.start_from import start_folder
from pipeline.sources.held_out import use_held_out
from pipeline.sources.revisions import use_revisions


def reading_findings(
    recipe: Recipe, *, only: Sequence[str] = ("sources", "tokenizer", "weights")
) -> tuple[list[TandemError], list[str]]:
    """(problems, notes) of what the recipe names; model.start_from is resolved by now.

    only: `changes` is for who trains nothing: what becomes of a ready tokenizer is said again when a run loads it.
    """
    found: list[TandemError] = []
    notes: list[str] = []
    for what in only:
        try:
            notes += {"sources": _sources, "tokenizer": _tokenizer, "weights": _weights, "changes": _changes}[what](
                recipe
            ) or []
        except TandemError as error:
            found.append(error)
    return found, notes


def _sources(recipe: Recipe) -> list[str]:
    """Opened as the stage will open them; what is found out about a file is kept, so that this costs the start nothing."""
    from pipeline.sources.open import open_sources
    from pipeline.sources.overlap import overlap_of

    if not can_be_made(cache_dir(recipe.data.cache_dir)):  # where it is kept; the check of the folders says so
        return []
    run = _run(recipe)
    goes_on = run.has_trained()
    if goes_on:
        recipe = copy.deepcopy(recipe)
        inputs = run.read_manifest().get("inputs", {})
        use_revisions(recipe, inputs)
        use_held_out(recipe, inputs)
    train, validation = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    note = None if goes_on else overlap_of(train, validation).note()  # it was said before the first step
    return [f"{recipe.where('data.validation')}: {note}"] if note else []


def prepared_notes(recipe: Recipe) -> list[str]:
    """Return what packing will leave out of conversations, by a sample of them, and a validation too small to compare by: for the
    plan of a run whose sources and tokenizer lie here. A stage counts it in what it prepares."""
    from pipeline.data.losses import Loss, loss_warnings, sampled_fit
    from pipeline.data.show import longest_row
    from pipeline.data.validation import ENOUGH_BYTES, size_text
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer.ready import ready_tokenizer

    is_chat = recipe.stage == "sft"
    train, validation = open_sources(recipe, kind="chat" if is_chat else "text")
    notes = []
    if is_chat and recipe.tokenizer.path and Path(recipe.tokenizer.path).is_dir():
        tokenizer, _ = ready_tokenizer(recipe)
        row_tokens, overflow = recipe.data.row_tokens, recipe.data.max_row_overflow
        for source in train:
            loss = Loss(source.name, {}, sampled_fit(source, tokenizer, row_tokens=row_tokens, overflow=overflow))
            notes += [
                f"{recipe.where('data.sources')}: {line}"
                for line in loss_warnings(loss, longest_row=longest_row(recipe))
            ]
    held = _bytes_up_to(ENOUGH_BYTES, validation)
    if validation and held < ENOUGH_BYTES:
        text = size_text({"sft/assistant_bpb" if is_chat else "val/bpb_documents": held})
        notes.append(f"{recipe.where('data.validation')}: {text} Name more in data.validation.")
    return notes


def _bytes_up_to(enough: int, sources: list[Any]) -> int:
    """Bytes of the documents, or of what the assistant says, counted until they are enough or a file is not here."""
    count = 0
    for source in sources:
        if any(file.path is None for file in source.files):
            return enough
        for block in source.read():
            for item in block.items:
                texts = [item.text] if hasattr(item, "text") else [str(m.get("content") or "") for m in item.messages if m["role"] == "assistant"]  # fmt: skip
                count += sum(len(text.encode()) for text in texts)
            if count >= enough:
                return count
    return count


def _run(recipe: Recipe) -> RunDirectory:
    return RunDirectory(Path(recipe.run.directory) / str(recipe.run.name))


def _tokenizer(recipe: Recipe) -> None:
    """A ready tokenizer can be read, its ids have no holes, and they are those that the weights were trained with."""
    path, start = recipe.tokenizer.path, start_folder(recipe)
    if path is None:
        return
    from pipeline.tokenizer.ready import open_tokenizer, ready_tokenizer

    tokenizer, _ = ready_tokenizer(recipe)
    where, ids = recipe.where("tokenizer.path"), tokenizer.get_vocab()
    largest, rows = max(ids.values()), max(len(tokenizer), _rows(start))
    if largest >= rows:
        raise RecipeError(
            f"{where}: {path} has the id {largest} for {_shown(ids, largest)} and {len(ids)} ids in all: the model would have {rows} embeddings and none "
            "for it. Number its ids without holes, or take another tokenizer."
        )
    if start is None or Path(path) == start or not (start / "tokenizer.json").is_file():
        return
    own = open_tokenizer(str(start), revision=None, beside=None, where="model.start_from").get_vocab()
    moved = sorted((number, token) for token, number in own.items() if ids.get(token) != number)
    if moved:
        number, token = moved[0]
        raise RecipeError(
            f"{where}: {path} gives other ids than the tokenizer that {start} was trained with ({len(moved):,} of {len(own):,} tokens; {token!r} was "
            f"{number} and is {ids.get(token, 'none')}), so its embeddings would stand for other text. Leave tokenizer.path out: the tokenizer comes with the weights."
        )


def _changes(recipe: Recipe) -> list[str]:
    """Return what a run keeps of the ready tokenizer and of the vocabulary, and each change to them."""
    if recipe.tokenizer.path is None:
        return []
    from pipeline.tokenizer.ready import ready_tokenizer

    try:
        tokenizer, lines = ready_tokenizer(recipe)
    except TandemError:  # which `tokenizer` has found as well
        return []
    have = _rows(start_folder(recipe))
    if have:
        added = max(0, len(tokenizer) - have)
        lines.append(
            f"model: {added} embeddings are added for new tokens ({have:,} -> {len(tokenizer):,})"
            if added
            else f"model: its {have:,} embeddings stay as they are; none is added"
        )
    return lines or [
        f"tokenizer: {recipe.tokenizer.path} keeps its chat template and its {len(tokenizer):,} ids; nothing is added"
    ]


def _rows(start: Path | None) -> int:
    if start is None:
        return 0
    return int(json.loads((start / "config.json").read_text(encoding="utf-8")).get("vocab_size") or 0)


def _shown(ids: dict[str, int], number: int) -> str:
    return repr(next(token for token, n in ids.items() if n == number))


def _weights(recipe: Recipe) -> None:
    """Sealed weights are whole, and a folder that something else wrote has weights at all.

    A run with a checkpoint of its own goes on from that one and reads them no more.
    """
    start = recipe.model.start_from
    if start is None or not Path(start).is_dir() or by_step(_run(recipe).checkpoints):
        return
    folder, where = Path(start), recipe.where("model.start_from")
    if (folder / SEAL).is_file():
        damaged = problems(folder) or [f"{name} does not belong to it" for name in loadable_strays(folder)]
        if damaged:
            raise DataError(
                f"{where}: {folder} is damaged ({'; '.join(damaged)}). Copy it again, or start from another checkpoint of that run."
            )
    elif not any(_is_weights(path) for path in folder.iterdir()):
        raise InputMissingError(
            f"{where}: {folder} holds no weights (*.safetensors or pytorch_model*.bin). Name a folder that save_pretrained wrote, or a run."
        )


def _is_weights(path: Any) -> bool:
    return path.suffix == ".safetensors" or path.name.startswith("pytorch_model")
