"""From the recipe to verified sources: everything that is wrong with any planned file is reported at once, before step
1."""

import logging
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.process.errors import (
    DataError,
    InputMissingError,
    RecipeError,
    ServiceError,
    TandemError,
    raise_errors,
)
from pipeline.process.storage import cache_dir
from pipeline.recipe.schema import Data, Source, SourceSettings, with_values
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import Format, format_of, is_described, is_newly_read
from pipeline.sources.holdout import counted, file_size, held_out_files, hold_out_duplicates, split_rows
from pipeline.sources.patterns import local_files
from pipeline.sources.source import OpenSource, permuted
from pipeline.sources.verify import (
    Findings,
    grouped,
    verify_file,
)

if TYPE_CHECKING:
    from pipeline.sources.recognition import Recognised

LOG = logging.getLogger(__name__)
MEDIA = ("images", "videos", "audios")  # columns of what placeholders in messages stand for


def with_recorded_inputs(data: Data, inputs: dict[str, Any]) -> Data:
    """Return the section with the commits of Hub datasets, the readings, the held-out files and the kind of rows that a
    manifest's inputs name, whatever a branch holds, or the sources would be read as or hold out by now."""
    train, validation = inputs.get("sources", []), inputs.get("validation", [])
    values: dict[str, Any] = {
        "sources": _at_commits(data.sources, train),
        "readings": [source.get("format", "") for source in train + validation],
        "one_text_rows": inputs.get("one_text_rows", False),
    }
    if data.validation is not None:
        values["validation"] = _at_commits(data.validation, validation)
    else:
        # Of files whose rows are split, nothing is to be kept: the rows follow from the content.
        values["held_out"] = {}
        for source in validation:
            labels = [file["label"] for file in source["files"] if "part" not in file]
            values["held_out"][source["name"]] = labels
    return with_values(data, values)


def _at_commits(specs: list[Source], recorded: list[dict[str, Any]]) -> list[Source]:
    """Return the sources, those of the Hub at the commits that were recorded for them."""
    found = list(specs)
    for place, (spec, before) in enumerate(zip(specs, recorded, strict=False)):
        if spec.id is not None and spec.id == before["id"]:
            found[place] = with_values(spec, {"revision": before["revision"] or spec.revision})
    return found


REMOTE_FILES = 64  # of a source, first in its order: a large one has thousands, and a look takes up to two requests
SHOWN = 20  # Problems of a kind that a message lists.


def open_sources(settings: SourceSettings) -> tuple[list[OpenSource], list[OpenSource]]:
    """Return the training and the validation sources of a run, every file that is here verified by its content.

    Training files stand in an order permuted by train.seed, for each of a source's passes anew, validation files in
    sorted order. Raises all that is wrong as one RecipeError, InputMissingError, DataError or ServiceError, whichever
    comes first.
    """
    opening, data, seed = SourceResolver(settings), settings.data, settings.seed
    if not data.sources:
        raise RecipeError(
            f"{opening.where}data.sources names no source, so there is nothing to train on. Write one: data: "
            "{sources: [{files: corpus/*.parquet}]}"
        )
    train = opening.planned(data.sources, "data.sources")
    if data.validation is not None:
        validation = opening.planned(data.validation, "data.validation")
    else:
        validation = opening.held_out(train)
    for place, source in enumerate(train):
        source.files = permuted(source.files, key=f"{seed} {place}")
    opening.recognise_all(train + validation)
    opening.verify_all(train + validation)
    opening.refuse()
    if data.validation is None:
        opening.split_held_out(train, validation)
    opening.refuse_overlap(train, validation)
    # The files of further passes, as if they were more files: a cursor in the source needs no number of the pass.
    for place, source in enumerate(train):
        first = list(source.files)
        for n in range(1, source.spec.passes or 1):
            again = permuted(first, key=f"{seed} {place} {n}")
            source.files += [replace(file, order=f"{seed} {place} {n} {at}") for at, file in enumerate(again)]
    return train, validation


def planned_sources(settings: SourceSettings) -> list[OpenSource]:
    """Return the training sources with their sorted files, nothing looked at. Raises as open_sources what they cannot
    mean."""
    opening = SourceResolver(settings)
    planned = opening.planned(settings.data.sources, "data.sources")
    opening.refuse()
    return planned


class SourceResolver:
    """One pass over the sources of a run, collecting what is wrong."""

    def __init__(self, settings: SourceSettings):
        self.kind = settings.kind
        self.places = settings.places
        self.code = settings.code
        self.max_bad_rows = settings.data.max_bad_rows
        self.pinned = settings.data.held_out
        self.readings = settings.data.readings
        self.where, self.folder = "", None
        if settings.recipe_path:
            self.where = f"{settings.recipe_path}: "
            self.folder = str(Path(settings.recipe_path).absolute().parent)
        self.cache = cache_dir(settings.data.cache_dir)
        self.facts = FileFacts(self.cache)
        self.problems: list[TandemError] = []
        self.refused: set[int] = set()  # ids of the sources' specs whose rows were recognised as something else

    def planned(self, specs: list, key: str) -> list[OpenSource]:
        """Return the sources with their sorted files, unread; one that cannot be planned has none, and its problem is
        kept."""
        sources: list[OpenSource] = []
        for place, spec in enumerate(specs):
            at = self.places.get(f"{key}.{place}")
            where = f"{at}: {key}[{place}]" if at else f"{self.where}{key}[{place}]"
            try:
                form = format_of(spec, kind=self.kind, where=where, folder=self.code)
                source = OpenSource(
                    name=_free_name(spec, sources), spec=spec, kind=self.kind, format=form, facts=self.facts
                )
                source.files = self._files(source, where)
                sources.append(source)
            except ServiceError:
                raise  # asking for the next source would take as long and end the same way
            except TandemError as error:
                self.problems.append(error)
        return sources

    def refuse(self) -> None:
        """Raise everything that was found, by kind."""
        by_kind: dict[type[TandemError], list[str]] = {}
        for problem in self.problems:
            by_kind.setdefault(type(problem), []).append(str(problem))
        raise_errors([kind(_listed(messages)) for kind, messages in by_kind.items()])

    def _files(self, source: OpenSource, where: str) -> list[SourceFile]:
        spec = source.spec
        if spec.id is None and spec.files is None:
            raise RecipeError(
                f"{where} names neither id nor files, so there is nothing to read. Write files: PATH or id: "
                "HUB/DATASET."
            )
        if spec.id is None:
            return local_files(spec.files, where=where, folder=self.folder, split=spec.split, cache=self.cache)
        if source.is_built_in:
            from pipeline.sources.built_in import built_in_files

            return built_in_files(spec, kind=self.kind, where=where, cache=self.cache)
        from pipeline.sources.hub_files import dataset_files

        source.revision, files = dataset_files(spec, where=where, cache=self.cache, folder=self.folder)
        return files

    def held_out(self, train: list[OpenSource]) -> list[OpenSource]:
        """Return the default validation: files taken out of each source's, or its files once more, whose rows are
        split."""
        validation = []
        for source in train:
            pinned = (self.pinned or {}).get(source.name)
            full = [file for file in source.files if file_size(file)] or source.files
            if source.is_built_in:
                spec = replace(source.spec, split="validation")
                files = self._files(replace(source, spec=spec), f"{self.where}data.sources")
                validation.append(replace(source, spec=spec, files=files))
            elif len(full) > 1 and (self.kind == "text" or pinned):
                held = held_out_files(full, pinned=pinned)
                labels = {file.label for file in held}
                source.files = [file for file in source.files if file.label not in labels]
                validation.append(replace(source, files=held))
            else:
                try:
                    if counted(source.files):
                        for file in source.files:
                            file.local_path()  # Its rows are counted at once, so it is needed now.
                except InputMissingError as error:
                    self.problems.append(error)
                validation.append(replace(source, files=[replace(file) for file in source.files]))
        return validation

    def split_held_out(self, train: list[OpenSource], validation: list[OpenSource]) -> None:
        """Do what takes the files' content: rows are kept from training, or copies follow the file held out."""
        for source, held in zip(train, validation, strict=True):
            if {file.label for file in source.files} == {file.label for file in held.files}:
                split_rows(source.files, held.files, self.facts, kind=self.kind)
            else:
                hold_out_duplicates(source.files, held.files)

    def recognise_all(self, sources: list[OpenSource]) -> None:
        """Look at the rows of the sources, and choose how they are read where the recipe names neither a format nor a
        column.

        A validation that is held out of a training source is read as that one.
        """
        seen: dict[int, tuple[Format, str]] = {}
        for source in sources:
            if source.is_built_in or not source.files:
                continue
            if id(source.spec) not in seen:
                seen[id(source.spec)] = self._recognise(source)
            source.format, source.recognised = seen[id(source.spec)]

    def _recognise(self, source: OpenSource) -> tuple[Format, str]:
        """Return how a source's rows are read, and what they are where that is to be said; keep why they cannot be
        read."""
        spec, form, name = source.spec, source.format, ""
        given = is_described(spec)
        if given and self.kind == "text" and source.files[0].path is None:
            return form, name  # It need not be fetched for this.
        # 1. What the first rows are, where the recipe does not say it.
        where = f"{spec.id}/{source.files[0].label}" if spec.id else source.files[0].path
        from pipeline.sources.recognition import first_rows, recognise

        rows = first_rows(source.files)
        found: Recognised | None = None
        if not given:
            found = recognise(rows, kind=self.kind)
        if found and not found.format:
            self.problems.append(DataError(f"{where} {found.refusal}"))
            self.refused.add(id(spec))
        elif found and found.format:
            form = found.format
            if not found.is_default:
                name = found.name
        # 2. Pictures and the like, which would be left out in silence; a run that continues has been told.
        if self.kind == "chat" and not (given or self.readings):
            mappings = [row for row in rows if isinstance(row, dict)]
            media = [column for column in MEDIA if any(row.get(column) for row in mappings)]
            if media:
                self.problems.append(
                    DataError(
                        f"{where} has {' and '.join(media)} to its conversations, and only text can be trained. Take "
                        "the rows that have none, without that column."
                    )
                )
        # 3. The reading that a run has begun with, where an earlier version read these rows otherwise.
        form = replace(form, newly_read=is_newly_read(rows, form))
        if self.readings and form.identity() not in self.readings:
            for other in (replace(form, newly_read=True), replace(form, newly_read=False), form.as_before()):
                if other.identity() in self.readings:
                    return other, "kept under the key of the run's beginning; rows not yet prepared are read anew"
        return form, name

    def verify_all(self, sources: list[OpenSource]) -> None:
        """Hash and look into every file that is here, look at the ends of those that are not, and keep what is
        wrong."""
        sources = [source for source in sources if id(source.spec) not in self.refused]
        work = []
        for source in sources:
            for place, file in enumerate(source.files):
                if file.path is not None or place < REMOTE_FILES:
                    work.append((source, file))

        def verify(pair: tuple[OpenSource, SourceFile]) -> Findings:
            source, file = pair
            return verify_file(file, source.format, self.facts, column_key=source.column_key)

        # Threads: hashing and reading release the GIL.
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            results = list(pool.map(verify, work))
        # Each line once: two sources may name the same file.
        problems: dict[str, None] = {}
        bad_rows: dict[str, None] = {}
        left_out: dict[str, None] = {}
        for found in self._without_empty(work, results):
            problems |= dict.fromkeys(found.problems)
            bad_rows |= dict.fromkeys(found.bad_rows)
            left_out |= dict.fromkeys(found.untrainable)
        self.problems += map(DataError, problems)
        if len(bad_rows) > self.max_bad_rows:
            self.problems += map(DataError, self._too_bad(list(bad_rows)))
        for line in grouped(list(left_out))[:SHOWN]:
            LOG.warning("left out, and counted as empty: %s", line)

    def _too_bad(self, rows: list[str]) -> list[str]:
        """Return the bad rows by their reasons, and what to do about them."""
        what = "bad row" if len(rows) == 1 else "bad rows"
        summary = (
            f"{len(rows)} {what} among the first and last rows of the files, and data.max_bad_rows allows "
            f"{self.max_bad_rows or 'none'}. Correct them, or raise data.max_bad_rows to leave such rows out."
        )
        if any("is not UTF-8" in row for row in rows):
            summary += " Convert text in another encoding, for instance by iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW."
        return [*grouped(rows), summary]

    def _without_empty(self, work: list[tuple[OpenSource, SourceFile]], results: list[Findings]) -> list[Findings]:
        """Leave out the files with nothing in them of sources that have others, and return the findings of the rest.
        Where files have to be corrected anyway, these are named as well."""
        if any(found.problems and not found.is_empty for found in results):
            return results
        empty = Counter(id(source) for (source, _), found in zip(work, results, strict=True) if found.is_empty)
        kept, left_out = [], dict[int, str]()
        for (source, file), found in zip(work, results, strict=True):
            if found.is_empty and empty[id(source)] < len(source.files):
                left_out[id(file)] = f"{source.name}: {file.label} has nothing in it and is left out"
            else:
                kept.append(found)
        for source in {id(source): source for source, _ in work}.values():
            source.files = [file for file in source.files if id(file) not in left_out]
        for line in dict.fromkeys(left_out.values()):
            LOG.warning("%s", line)
        return kept

    def refuse_overlap(self, train: list[OpenSource], validation: list[OpenSource]) -> None:
        """Refuse the same content, by its hash, on both sides: validation on trained text measures memory."""
        trained, whole = {}, {}
        for source in train:
            for file in source.files:
                if file.part != "validation":
                    trained[file.sha256, file.period] = whole[file.sha256] = file
        same = []
        for source in validation:
            for file in source.files:
                other = whole.get(file.sha256)
                # Its other rows: of one file that is split by rows, or of two copies that are split alike.
                twin = trained.get((file.sha256, file.period))
                split_alike = file.part == "validation" and twin is not None and twin.part == "train"
                if other is not None and not split_alike:
                    same.append(
                        f"{file.label} of {source.name} (validation) has the same content as {other.label}, which is "
                        "trained on"
                    )
        if same:
            raise DataError(
                _listed([f"{self.where}{line}" for line in same])
                + "\nValidation would measure memory. Take the file out of one of the two."
            )


def _free_name(spec, sources: list[OpenSource]) -> str:
    """Return the spec's name, else the last part of its id or files that says something; numbered when it is taken."""
    name = spec.name
    if not name and spec.id:
        name = re.split(r"[/:]", spec.id.rstrip("/"))[-1].lstrip(".") or "files"
    if not name:
        first = spec.files if isinstance(spec.files, str) else (spec.files or [""])[0]
        parts = [part for part in Path(first).parts if not re.search(r"[*?\[]", part) and part not in ("/", ".", "..")]
        name = parts[-1].split(".")[0] if parts else "files"
    taken = {source.name for source in sources}
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _listed(problems: list[str]) -> str:
    lines = "\n".join(problems).split("\n")
    if len(lines) == 1:
        return lines[0]
    shown = [f"{len(lines)} problems with the data:", *lines]
    if len(lines) > SHOWN + 1:  # one line more is not worth a line that says so
        shown[SHOWN + 1 :] = [f"... and {len(lines) - SHOWN} more"]
    return "\n  ".join(shown)
