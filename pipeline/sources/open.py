"""From the recipe to verified sources: everything that is wrong with any planned file is reported at once, before step
1."""

import logging
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count, zip_longest
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
from pipeline.recipe.schema import Data, SourceSettings, with_values
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
    values: dict[str, Any] = {
        role: [
            with_values(spec, {"revision": before["revision"] or spec.revision})
            if before and spec.id is not None and spec.id == before["id"]
            else spec
            for spec, before in zip_longest(specs, inputs.get(role, [])[: len(specs)])
        ]
        for role, specs in (("sources", data.sources), ("validation", data.validation))
        if specs
    }
    values["readings"] = [s.get("format", "") for role in ("sources", "validation") for s in inputs.get(role, [])]
    values["one_text_rows"] = inputs.get("one_text_rows", False)
    if data.validation is None:
        values["held_out"] = {
            source["name"]: [file["label"] for file in source["files"] if "part" not in file]
            for source in inputs.get("validation", [])
        }
    return with_values(data, values)


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
        kinds = dict.fromkeys(type(problem) for problem in self.problems)
        raise_errors([kind(_listed([str(p) for p in self.problems if type(p) is kind])) for kind in kinds])

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
                    for file in source.files if counted(source.files) else []:
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
            form, name = found.format, "" if found.is_default else found.name
        media = [name for name in MEDIA if any(isinstance(row, dict) and row.get(name) for row in rows)]
        if media and self.kind == "chat" and not (given or self.readings):
            self.problems.append(
                DataError(
                    f"{where} has {' and '.join(media)} to its conversations, and only text can be trained. Take the "
                    "rows that have none, without that column."
                )
            )
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
        work = [
            (source, file)
            for source in sources
            for place, file in enumerate(source.files)
            if file.path is not None or place < REMOTE_FILES
        ]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            results = list(
                pool.map(
                    lambda pair: verify_file(pair[1], pair[0].format, self.facts, column_key=pair[0].column_key), work
                )
            )
        results = self._without_empty(work, results)
        problems = list(dict.fromkeys(problem for found in results for problem in found.problems))
        rows = list(dict.fromkeys(row for found in results for row in found.bad_rows))
        if len(rows) > self.max_bad_rows:
            convert = ""
            if any("is not UTF-8" in row for row in rows):
                convert = (
                    " Convert text in another encoding, for instance by iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW."
                )
            problems += [
                *grouped(rows),
                (
                    f"{len(rows)} bad {'row' if len(rows) == 1 else 'rows'} among the first and last rows of the "
                    f"files, and data.max_bad_rows allows {self.max_bad_rows or 'none'}. Correct them, or raise "
                    f"data.max_bad_rows to leave such rows out.{convert}"
                ),
            ]
        self.problems += [DataError(problem) for problem in problems]
        left_out = list(dict.fromkeys(row for found in results for row in found.untrainable))
        for line in grouped(left_out)[:SHOWN]:
            LOG.warning("left out, and counted as empty: %s", line)

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
        trained = {
            (file.sha256, file.period): file for source in train for file in source.files if file.part != "validation"
        }
        whole = {sha256: file for (sha256, _), file in trained.items()}
        same = []
        for source in validation:
            for file in source.files:
                other = whole.get(file.sha256)
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
        name = Path(parts[-1]).name.split(".")[0] if parts else "files"
    taken = {source.name for source in sources}
    return next(free for free in chain([name], (f"{name}-{n}" for n in count(2))) if free not in taken)


def _listed(problems: list[str]) -> str:
    lines = [line for problem in problems for line in problem.split("\n")]
    if len(lines) == 1:
        return lines[0]
    shown = lines if len(lines) <= SHOWN + 1 else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more"]
    return "\n  ".join([f"{len(lines)} problems with the data:", *shown])
