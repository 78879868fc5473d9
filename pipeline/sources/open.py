"""From the recipe to verified sources: everything that is wrong with any planned file is said at once, before step 1."""

import hashlib
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pipeline.artifacts.cache import cache_dir
from pipeline.artifacts.errors import DataError, InputMissingError, RecipeError, ServiceError, TandemError, refuse
from pipeline.sources.bad_rows import grouped
from pipeline.sources.facts import FactsOfFiles
from pipeline.sources.files import SourceFile, local_files
from pipeline.sources.formats import format_of
from pipeline.sources.heads import FILES_OF_A_SOURCE, head_findings
from pipeline.sources.held_out import held_out_files, hold_out_copies, split_rows
from pipeline.sources.open_source import OpenSource
from pipeline.sources.recognition import Recognised, looked_at_rows, recognise
from pipeline.sources.verify import Findings, verified

LOG = logging.getLogger(__name__)
SHOWN = 20  # Problems of a kind that a message lists.


def open_sources(recipe, *, kind: Literal["text", "chat"]) -> tuple[list[OpenSource], list[OpenSource]]:
    """The training and the validation sources of the recipe, every file that is here verified by its content.

    Training files stand in an order permuted by train.seed, validation files in sorted order. Raises all that is wrong as
    one RecipeError, InputMissingError, DataError or ServiceError, whichever of them comes first.
    """
    opening = _Opening(recipe, kind)
    if not recipe.data.sources:
        raise RecipeError(
            f"{opening.where}data.sources names no source, so there is nothing to train on. Write one: data: {{sources: [{{files: corpus/*.parquet}}]}}"
        )
    train = opening.planned(recipe.data.sources, "data.sources")
    if recipe.data.validation is not None:
        validation = opening.planned(recipe.data.validation, "data.validation")
    else:
        validation = opening.held_out(train)
    seed = int(recipe.train.get("seed", 42))
    for place, source in enumerate(train):
        source.files = permuted(source.files, key=f"{seed} {place}")
    opening.recognise_all(train + validation)
    opening.verify_all(train + validation)
    opening.refuse()
    if recipe.data.validation is None:
        opening.split_held_out(train, validation)
    opening.refuse_overlap(train, validation)
    return train, validation


def planned_sources(recipe, *, kind: Literal["text", "chat"]) -> list[OpenSource]:
    """The training sources with their sorted files, nothing looked at. Raises as open_sources what they cannot mean."""
    opening = _Opening(recipe, kind)
    planned = opening.planned(recipe.data.sources, "data.sources")
    opening.refuse()
    return planned


def permuted(files: list[SourceFile], *, key: str) -> list[SourceFile]:
    """The sorted files in the order of a hash: the same on every machine and under every version of every library."""
    order = sorted(range(len(files)), key=lambda index: hashlib.sha256(f"{key} {index}".encode()).digest())
    return [files[index] for index in order]


class _Opening:
    """One pass over a recipe's sources, collecting what is wrong."""

    def __init__(self, recipe, kind: Literal["text", "chat"]):
        self.kind = kind
        self.where = f"{recipe.path}: " if recipe.path else ""
        self.places = recipe.places
        self.folder = str(Path(recipe.path).absolute().parent) if recipe.path else None
        self.code = recipe.code
        self.cache = cache_dir(recipe.data.cache_dir)
        self.facts = FactsOfFiles(self.cache)
        self.max_bad_rows = recipe.data.max_bad_rows
        self.pinned = recipe.data.held_out
        self.problems: list[TandemError] = []
        self.hub_is_silent = False
        self.refused: set[int] = set()  # ids of the sources' specs whose rows were recognised as something else

    def planned(self, specs: list, key: str) -> list[OpenSource]:
        """The sources with their sorted files, unread; one that cannot be planned has none, and its problem is kept."""
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
        refuse([kind(_listed([str(p) for p in self.problems if type(p) is kind])) for kind in kinds])

    def _files(self, source: OpenSource, where: str) -> list[SourceFile]:
        spec = source.spec
        if spec.id is None and spec.files is None:
            raise RecipeError(
                f"{where} names neither id nor files, so there is nothing to read. Write files: PATH or id: HUB/DATASET."
            )
        if spec.id is None:
            return local_files(spec.files, where=where, folder=self.folder, split=spec.split)
        if spec.id.startswith("tandem:"):
            from pipeline.sources.quickstart.built_in import built_in_files

            return built_in_files(spec, kind=self.kind, where=where, cache=self.cache)
        from pipeline.sources.hub_files import dataset_files

        source.revision, files = dataset_files(spec, where=where, cache=self.cache, folder=self.folder)
        return files

    def held_out(self, train: list[OpenSource]) -> list[OpenSource]:
        """The default validation (held_out.py): files taken out of each source's, or its only file once more."""
        validation = []
        for source in train:
            if source.spec.id is not None and source.spec.id.startswith("tandem:"):
                spec = replace(source.spec, split="validation")
                files = self._files(replace(source, spec=spec), f"{self.where}data.sources")
                validation.append(replace(source, spec=spec, files=files))
            elif len(source.files) > 1:
                held = held_out_files(source.files, pinned=(self.pinned or {}).get(source.name))
                labels = {file.label for file in held}
                source.files = [file for file in source.files if file.label not in labels]
                validation.append(replace(source, files=held))
            else:
                try:
                    source.files[0].local_path()  # Its rows are counted at once, so it is needed now.
                except InputMissingError as error:
                    self.problems.append(error)
                validation.append(replace(source, files=[replace(file) for file in source.files]))
        return validation

    def split_held_out(self, train: list[OpenSource], validation: list[OpenSource]) -> None:
        """Do what takes the files' content: a one-file source keeps rows from training, copies follow the file held out."""
        for source, held in zip(train, validation, strict=True):
            if len(source.files) == 1 and len(held.files) == 1 and source.files[0].label == held.files[0].label:
                split_rows(source.files[0], held.files[0], self.facts)
            else:
                hold_out_copies(source.files, held.files)

    def recognise_all(self, sources: list[OpenSource]) -> None:
        """Look at the rows of the sources whose recipe names neither a format nor a column, and choose how they are read.

        A validation that is held out of a training source is read as that one.
        """
        seen: dict[int, Recognised | None] = {}
        for source in sources:
            spec = source.spec
            if spec.format or spec.text_column or spec.messages_column or spec.columns or not source.files:
                continue
            is_built_in = (spec.id or "").startswith("tandem:")
            if id(spec) not in seen and not is_built_in:
                seen[id(spec)] = found = recognise(looked_at_rows(source.files), kind=self.kind)
                if found and not found.format:
                    name = source.spec.id or source.files[0].path
                    if source.spec.id:
                        name = f"{name}/{source.files[0].label}"
                    self.problems.append(DataError(f"{name} {found.refusal}"))
            found = seen.get(id(spec))
            if found and found.format:
                source.format, source.recognised = found.format, "" if found.is_default else found.name
        self.refused = {spec for spec, found in seen.items() if found and not found.format}

    def verify_all(self, sources: list[OpenSource]) -> None:
        """Hash and look into every file that is here, and keep what is wrong with it."""
        sources = [source for source in sources if id(source.spec) not in self.refused]
        work = [(source, file) for source in sources for file in source.files if file.path is not None]
        for source in sources:
            away = [
                file
                for file in source.files
                if file.path is None and not self.facts.head_is_known(_reading(source, file))
            ]
            work += [(source, file) for file in away[:FILES_OF_A_SOURCE]]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            results = list(pool.map(lambda pair: self._verify(*pair), work))
        problems = list(dict.fromkeys(problem for found in results for problem in found.problems))
        rows = list(dict.fromkeys(row for found in results for row in found.bad_rows))
        if len(rows) > self.max_bad_rows:
            allowed = (
                f"data.max_bad_rows allows {self.max_bad_rows}"
                if self.max_bad_rows
                else "data.max_bad_rows allows none"
            )
            problems += [
                *grouped(rows),
                f"{len(rows)} bad {'row' if len(rows) == 1 else 'rows'} among the first and last rows of the files, and {allowed}. Correct them, or raise data.max_bad_rows to leave such rows out.",
            ]
        self.problems += [DataError(problem) for problem in problems]
        left_out = list(dict.fromkeys(row for found in results for row in found.untrainable))
        for line in grouped(left_out)[:SHOWN]:
            LOG.warning("left out, and counted as empty: %s", line)

    def _verify(self, source: OpenSource, file: SourceFile) -> Findings:
        if file.path is None:
            ends = file.peek() if file.peek and not self.hub_is_silent else None
            if ends is None:
                self.hub_is_silent = True  # It would let every further file wait.
                return Findings()  # Looked at when it is fetched (OpenSource.read).
            findings = head_findings(
                f"{source.spec.id}/{file.label}", ends, source.format, column_key=source.column_key
            )
            if not findings.problems:
                self.facts.keep_head(_reading(source, file))
            return findings
        return verified(file, source.format, self.facts, column_key=source.column_key)

    def refuse_overlap(self, train: list[OpenSource], validation: list[OpenSource]) -> None:
        """Validation on trained text measures memory: the same content on both sides is refused, by its hash."""
        trained = {
            (file.sha256, file.period): file for source in train for file in source.files if file.part != "validation"
        }
        whole = {sha256: file for (sha256, _), file in trained.items()}
        same = []
        for source in validation:
            for file in source.files:
                other = whole.get(file.sha256)
                split_alike = (
                    (file.sha256, file.period) in trained
                    and file.part == "validation"
                    and trained[file.sha256, file.period].part == "train"
                )
                if other is not None and not split_alike:
                    same.append(
                        f"{file.label} of {source.name} (validation) has the same content as {other.label}, which is trained on"
                    )
        if same:
            raise DataError(
                _listed([f"{self.where}{line}" for line in same])
                + "\nValidation would measure memory. Take the file out of one of the two."
            )


def _reading(source: OpenSource, file: SourceFile) -> str:
    """What was looked at, and as what: the same content under another name or format is another matter."""
    return f"{file.sha256} {Path(file.label).suffixes} {source.format.identity()}"


def _free_name(spec, sources: list[OpenSource]) -> str:
    """The spec's name, else the last part of its id or files that says something; numbered when it is taken."""
    name = spec.name
    if not name and spec.id:
        name = re.split(r"[/:]", spec.id.rstrip("/"))[-1].lstrip(".") or "files"
    if not name:
        first = spec.files if isinstance(spec.files, str) else (spec.files or [""])[0]
        parts = [part for part in Path(first).parts if not re.search(r"[*?\[]", part) and part not in ("/", ".", "..")]
        name = Path(parts[-1]).name.split(".")[0] if parts else "files"
    taken = {source.name for source in sources}
    return (
        name
        if name not in taken
        else next(f"{name}-{n}" for n in range(2, len(taken) + 3) if f"{name}-{n}" not in taken)
    )


def _listed(problems: list[str]) -> str:
    lines = [line for problem in problems for line in problem.split("\n")]
    if len(lines) == 1:
        return lines[0]
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN + 1 else []
    return "\n".join(
        [
            f"{len(lines)} problems with the data:",
            *(f"  {line}" for line in lines[: SHOWN if more else SHOWN + 1]),
            *(f"  {line}" for line in more),
        ]
    )
