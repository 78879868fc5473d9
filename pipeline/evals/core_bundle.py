"""CORE's bundle: its tasks, fetched and verified."""

import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.process.errors import DataError, InputMissingError, ServiceError
from pipeline.process.storage import cache_dir, file_lock, write_bytes
from pipeline.sources.raw_rows import check_content, lone_surrogate

Kind = Literal["multiple_choice", "schema", "language_modeling"]
FOUNDRY = "8c8dd48f72168c5d51e2f7b151595892a8fba43d"  # the commit whose files are meant


@dataclass(frozen=True)
class CoreTask:
    """file: under eval_data/; shots: examples before the question; v1, v2: share that guessing gets right.

    rows: items of the published file; blob: the hash by which git names its content.
    """

    name: str
    file: str
    kind: Kind
    shots: int
    rows: int
    v1: float
    blob: str
    v2: float | None = None
    delimiter: str = " "

    def centred(self, accuracy: Any, version: str) -> Any:
        """Return 0 at guessing, 1 when all is right; of one accuracy or an array of them."""
        baseline = self.v1 if version == "v1" or self.v2 is None else self.v2
        return (accuracy - baseline) / (1 - baseline)


MC: Kind = "multiple_choice"
LM: Kind = "language_modeling"
ANSWER = "\nAnswer: "
HELLASWAG = ("language_understanding/hellaswag.jsonl", "448321079fdc140bd8566b16b24eda9ceacd3501")

# Shots, delimiters and baselines are as DCLM defined them and nanochat scores them.
# fmt: off
TASKS = (
    CoreTask(name="hellaswag_zeroshot", file=HELLASWAG[0], kind=MC, shots=0, rows=10042, v1=0.25, blob=HELLASWAG[1]),
    CoreTask(name="jeopardy", file="world_knowledge/jeopardy_all.jsonl", kind=LM, shots=10, rows=2117, v1=0.0, delimiter=ANSWER, blob="2f771918dbc8b68550df204171b14d2648b5d494"),
    CoreTask(name="bigbench_qa_wikidata", file="world_knowledge/bigbench_qa_wikidata.jsonl", kind=LM, shots=10, rows=20321, v1=0.0, blob="5e1be72797ba082fd4f6efa42f7d759d2d23339a"),
    CoreTask(name="arc_easy", file="world_knowledge/arc_easy.jsonl", kind=MC, shots=10, rows=2376, v1=0.25, delimiter=ANSWER, blob="b5fd1bf87a24246a6be67230b721541688f5c349"),
    CoreTask(name="arc_challenge", file="world_knowledge/arc_challenge.jsonl", kind=MC, shots=10, rows=1172, v1=0.25, delimiter=ANSWER, blob="ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89"),
    CoreTask(name="copa", file="commonsense_reasoning/copa.jsonl", kind=MC, shots=0, rows=100, v1=0.5, blob="b22f96e08ae9d0e97e1ae58f67b6425c77ef200a"),
    CoreTask(name="commonsense_qa", file="commonsense_reasoning/commonsense_qa.jsonl", kind=MC, shots=10, rows=1221, v1=0.2, v2=0.403, blob="f1cc16a88b05ab0934aab2ec2d02a6869e6e5520"),
    CoreTask(name="piqa", file="commonsense_reasoning/piqa.jsonl", kind=MC, shots=10, rows=1838, v1=0.5, delimiter=ANSWER, blob="a9992adfdefde366fe7ccff871f5aa62449a09cf"),
    CoreTask(name="openbook_qa", file="commonsense_reasoning/openbook_qa.jsonl", kind=MC, shots=0, rows=500, v1=0.25, blob="a8aff255a64cbc72a85252acf00df25a315686c2"),
    CoreTask(name="lambada_openai", file="language_understanding/lambada_openai.jsonl", kind=LM, shots=0, rows=5153, v1=0.0, blob="4da02dd53b9e7385871d06ab855471d77b2f7dda"),
    CoreTask(name="hellaswag", file=HELLASWAG[0], kind=MC, shots=10, rows=10042, v1=0.25, blob=HELLASWAG[1]),
    CoreTask(name="winograd", file="language_understanding/winograd_wsc.jsonl", kind="schema", shots=0, rows=273, v1=0.5, blob="762fe030ac6938ecba438c47a04057247c6ab891"),
    CoreTask(name="winogrande", file="language_understanding/winogrande.jsonl", kind="schema", shots=0, rows=1267, v1=0.5, blob="316e87ae4659f0c402b0f00551fdec83ab0a0986"),
    CoreTask(name="bigbench_dyck_languages", file="symbolic_problem_solving/bigbench_dyck_languages.jsonl", kind=LM, shots=10, rows=1000, v1=0.0, blob="27a4ac2b3b18716add92f4ecd62475c4f8d77768"),
    CoreTask(name="agi_eval_lsat_ar", file="symbolic_problem_solving/agi_eval_lsat_ar.jsonl", kind=MC, shots=3, rows=230, v1=0.2, v2=0.25, blob="d663b427ba310d3f877f09a6830198ca7c856189"),
    CoreTask(name="bigbench_cs_algorithms", file="symbolic_problem_solving/bigbench_cs_algorithms.jsonl", kind=LM, shots=10, rows=1320, v1=0.0, blob="7ecee0f270f3de8b6558da14ae02181f3d950a40"),
    CoreTask(name="bigbench_operators", file="symbolic_problem_solving/bigbench_operators.jsonl", kind=LM, shots=10, rows=210, v1=0.0, blob="a982dc4f962725c9dc4abb07d3cc333c99959290"),
    CoreTask(name="bigbench_repeat_copy_logic", file="symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl", kind=LM, shots=10, rows=32, v1=0.0, blob="86621f10e7124ed6f3a61fb91493c1256c008f60"),
    CoreTask(name="squad", file="reading_comprehension/squad.jsonl", kind=LM, shots=10, rows=10570, v1=0.0, blob="dc733b8f58ec666c53fd946198c434b819a00680"),
    CoreTask(name="coqa", file="reading_comprehension/coqa.jsonl", kind=LM, shots=0, rows=7983, v1=0.0, blob="028bd4e51326cc43f8394987ae47fbb271aeba9d"),
    CoreTask(name="boolq", file="reading_comprehension/boolq.jsonl", kind=MC, shots=10, rows=3270, v1=0.62, delimiter=ANSWER, blob="f42083a58713d00ef4600118cfdf79618c269190"),
    CoreTask(name="bigbench_language_identification", file="language_understanding/bigbench_language_identification.jsonl", kind=MC, shots=10, rows=10000, v1=0.091, v2=0.25, blob="1f132fbbb12a67ce267b7b92b458175632c265f3"),
)
# fmt: on


SILENCE_S = 60.0
# Where the files are, {file} their name under eval_data/. A content counts by its hash alone, so that a mirror can
# neither change a score nor put an error page into the cache.
MIRRORS = (
    f"https://raw.githubusercontent.com/mosaicml/llm-foundry/{FOUNDRY}/scripts/eval/local_data/{{file}}",
    "https://raw.githubusercontent.com/Milpo1/nanochat-pl/e4b75d6eb1de434d3a61c5bf968472b6c93bae8e/eval_bundle/eval_data/{file}",
)
# What a mirror's answer can fail with; urllib's own errors are OSErrors, an address of another kind is a ValueError.
UNUSABLE = (OSError, http.client.HTTPException, ValueError)


def fetch_file(file: str, blob: str, *, folder: Path) -> bytes:
    """Return the content whose git hash is `blob`, kept in the folder under that hash.

    $TANDEM_CORE_MIRRORS, addresses with blanks between, comes before the built-in mirrors. Raises ServiceError naming
    what each mirror gave.
    """
    place = folder / blob
    with file_lock(folder / f".{blob}.lock"):
        if place.exists():
            content = place.read_bytes()
            if git_blob(content) == blob:
                return content
        # The first mirror whose content has the published hash.
        reasons = []
        for mirror in [*os.environ.get("TANDEM_CORE_MIRRORS", "").split(), *MIRRORS]:
            address = mirror.replace("{file}", file)
            try:
                content = _get(address)
            except UNUSABLE as error:
                reasons.append(f"{address}: {error}")
                continue
            if git_blob(content) == blob:
                write_bytes(place, content)
                return content
            reason = check_content(content[:4096]) or "gave another content than the published file."
            reasons.append(f"{address} {reason}")
        raise ServiceError(
            f"CORE bundle: no mirror gives {file}, so nothing was scored:\n  "
            + "\n  ".join(reasons)
            + "\nName the folder of a downloaded eval_bundle (--bundle, evals.core.bundle), or a mirror in "
            "TANDEM_CORE_MIRRORS."
        )


def _get(address: str) -> bytes:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise urllib.error.URLError("HF_HUB_OFFLINE is set")
    with urllib.request.urlopen(address, timeout=SILENCE_S) as answer:
        return answer.read()


SHOWN = 10
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}


@dataclass(frozen=True)
class Bundle:
    """items: by file; sha256: of each file; blobs: the hashes by which git names them; missing: task -> why not."""

    items: dict[str, list[dict]]
    sha256: dict[str, str]
    blobs: dict[str, str]
    missing: dict[str, str]

    @property
    def id(self) -> str:
        files = "".join(f"{file}{sha256}" for file, sha256 in sorted(self.sha256.items()))
        return f"core-{hashlib.sha256(files.encode()).hexdigest()[:12]}"

    def only(self, names: list[str] | None) -> "Bundle":
        """Return the bundle with these tasks alone; the others are missing because they were not asked for."""
        if names is None:
            return self
        left_out = {task.name: "not asked for" for task in TASKS if task.name not in names}
        return replace(self, missing={**self.missing, **left_out})

    def published(self, task: CoreTask) -> bool:
        """Return whether the task's file is the one that published scores are of."""
        return self.blobs[task.file] == task.blob


def open_bundle(path: str | None = None, *, cache: str | None = None, wanted: list[str] | None = None) -> Bundle:
    """Return the bundle in a folder, else the published files, fetched once into the cache.

    A task without a file is in `missing`; wanted: the names of tasks that must be there. Raises InputMissingError when
    nothing is there or a wanted task is not, DataError with every file and row that is not what a task needs, and
    ServiceError when no mirror gives a published file.
    """
    # 1. The files: those of the folder, or the published ones.
    contents, missing = {}, {}
    if path is None:
        for task in TASKS:  # two of them may have one file
            if task.file not in contents:
                contents[task.file] = fetch_file(task.file, task.blob, folder=cache_dir(cache) / "core")
    else:
        contents = _local(Path(path).expanduser())
        missing = {task.name: f"{task.file} is not in {path}" for task in TASKS if task.file not in contents}
        if absent := [name for name in wanted or [] if name in missing]:
            raise InputMissingError(
                f"{path}: the bundle lacks {', '.join(absent)} ({'; '.join(missing[name] for name in absent)}), so "
                "nothing was scored. Add the files, or leave the path out to fetch the published ones."
            )
    # 2. Their items, and all that is wrong with them.
    items: dict[str, list[dict]] = {}
    problems: list[str] = []
    for task in TASKS:
        if task.file in contents and task.file not in items:
            items[task.file], wrong = _read(task, contents[task.file])
            problems += [f"{path or 'CORE bundle'}: {task.file}{what}" for what in wrong]
    if problems:
        shown = problems[:SHOWN]
        if len(problems) > SHOWN:
            shown.append(f"and {len(problems) - SHOWN} more")
        raise DataError(
            "\n".join(shown)
            + "\nNothing was scored. Download the bundle again, or leave the path out to fetch the published files."
        )
    return Bundle(
        items=items,
        sha256={file: hashlib.sha256(content).hexdigest() for file, content in contents.items()},
        blobs={file: git_blob(content) for file, content in contents.items()},
        missing=missing,
    )


def git_blob(content: bytes) -> str:
    """Return the hash by which git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _local(path: Path) -> dict[str, bytes]:
    """Return the tasks' files in a folder (the bundle, or what it is in), by their names under eval_data/."""
    found = {}
    for folder in (path, path / "eval_data", path / "eval_bundle" / "eval_data"):
        for task in TASKS:
            if (folder / task.file).is_file():
                found[task.file] = (folder / task.file).read_bytes()
    if not found:
        raise InputMissingError(
            f"{path}: holds no file of a CORE task (such as eval_data/{TASKS[0].file}), so nothing can be scored. "
            "Name the folder of the eval_bundle, unzipped, or leave it out to fetch the published files."
        )
    return found


def _read(task: CoreTask, content: bytes) -> tuple[list[dict], list[str]]:
    """Return the items, and what is wrong with the file as `: ...` or `:row: ...`."""
    if not content.strip():
        return [], [" is empty."]
    if reason := check_content(content[:4096]):
        return [], [f" {reason}"]
    items, wrong = [], []
    # Not splitlines(): it also breaks at characters that may be inside a JSON string.
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            wrong.append(f":{number}: is no JSON ({error.msg} at {error.pos}).")
            continue
        if reason := _reason(task, item) or _no_character(item):
            wrong.append(f":{number}: {reason}")
        items.append(item)
    return items, wrong


def _no_character(item: dict) -> str | None:
    """Return why no tokenizer can read the item: a JSON escape can make half of a character."""
    text = json.dumps(item, ensure_ascii=False)
    at = lone_surrogate(text)
    return None if at is None else f"holds half of a character ({text[at]!r})."


def _reason(task: CoreTask, item: Any) -> str | None:
    if not isinstance(item, dict):
        return f"is {type(item).__name__}, no object."
    for name, kind in FIELDS[task.kind].items():
        if type(item.get(name)) is not kind:
            return f"{name} is {item.get(name)!r}, where {kind.__name__} belongs."
    # What the types do not say: two options or more, the right one among them, something to continue with.
    if options := OPTIONS.get(task.kind):
        texts = item[options]
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            return f"{options} are {texts!r}: two texts or more belong there."
        if not 0 <= item["gold"] < len(texts):
            return f"gold is {item['gold']}, of {len(texts)} {options}."
    elif not item["continuation"]:
        return "continuation is empty, so there is nothing to say."
    return None


def why_partial(missing: Iterable[str], published: Mapping[str, bool]) -> list[str]:
    """Return why a mean over tasks may not be called CORE; empty for CORE itself.

    published: of each task scored, whether its file is the published one.
    """
    missing, reasons = list(missing), []
    if missing:
        reasons.append(f"missing {', '.join(missing)}")
    other = [name for name, is_published in published.items() if not is_published]
    if other and len(other) == len(published):
        reasons.append("none of the files is the published one")
    elif other:
        reasons.append(f"not the published file of {', '.join(other)}")
    return reasons
