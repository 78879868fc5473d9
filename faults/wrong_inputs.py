"""`python -m faults.wrong_inputs`: how many of the wrong recipes and wrong data files are reported, and where.

A recipe is reported with `recipe.yaml:LINE`, status 64 and the reason; a file with its name, the wrong row and the reason, and
without a row of nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from faults.wrong_files import WrongFile, good_file, wrong_files
from pipeline.process.errors import RecipeError, TandemError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from tests.recipe.wrong_recipes import GOOD, OVERRIDES, WRONG, WRONG_BYTES
from tests.sources.dataset_hub import HubServer

ROOT = Path(__file__).parents[1]


def recipe_is_reported(content: bytes, expected: list[str], folder: Path, *overrides: str) -> bool:
    (folder / "recipe.yaml").write_bytes(content)
    try:
        read_recipe(["recipe.yaml", *overrides])
    except RecipeError as error:
        message = str(error)
        return message.startswith(("recipe.yaml:", "command line: ")) and all(part in message for part in expected)
    return False


def sources(folder: Path, kind: str, *, max_bad_rows: int = 0) -> tuple[list, list]:
    """Open the files of the folder's data/ as a stage does; named by a glob, so that a csv or arrow file beside jsonl counts."""
    recipe = Recipe(path=str(folder / "recipe.yaml"), stage="sft" if kind == "chat" else "pretrain")
    recipe.data.cache_dir = str(folder / "cache")
    recipe.data.sources = [Source(files=str(folder / "data" / "*"))]
    recipe.data.max_bad_rows = max_bad_rows
    return open_sources(recipe.source_settings())


def lay(case: WrongFile, folder: Path) -> None:
    """The wrong file between two good ones."""
    (folder / "data").mkdir(parents=True)
    for name, content in among_good_ones(case).items():
        (folder / "data" / name).write_bytes(content)


def among_good_ones(case: WrongFile) -> dict[str, bytes]:
    good = {"a-good.jsonl": good_file(case.kind), "z-good.jsonl": good_file(case.kind, first=2000)}
    return {**good, case.file: case.content}


def is_reported(case: WrongFile, message: str) -> bool:
    return (
        f"{case.file}{case.row}" in message
        and case.said in message
        and "-good.jsonl" not in message
        and "Traceback" not in message
    )


STREAM = """
import json, sys
from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
for number, kind in enumerate(json.loads(sys.stdin.read())):
    recipe = Recipe(path="recipe.yaml", stage="sft" if kind == "chat" else "pretrain")
    recipe.data.cache_dir = sys.argv[1]
    recipe.data.sources = [Source(id=f"faults/case-{number}", files="*")]  # Of several formats `datasets` reads one alone.
    recipe.data.max_bad_rows = 200
    message, items, when = [], [], "start"
    try:
        train, validation = open_sources(recipe.source_settings())
        when = "reading"
        for source in train + validation:
            for block in source.read():
                message += block.bad_rows
                items += [item.text if kind == "text" else item.messages for item in block.items]
    except TandemError as error:
        message.append(str(error))
    print(json.dumps([when, message, sum(not str(item).strip() for item in items)]))
"""


def stream(cases: list[WrongFile], folder: Path) -> list[tuple[str, str, int]]:
    """Of each case, laid into a dataset of a Hub on this machine: reported at the start or when reading, what, items of nothing."""
    server = HubServer()
    for number, case in enumerate(cases):
        server.others[f"faults/case-{number}"] = among_good_ones(case)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-c", STREAM, str(folder / "cache")]
    kinds = json.dumps([case.kind for case in cases])
    done = subprocess.run(
        command, input=kinds, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        (when, "\n".join(message), nothing) for when, message, nothing in map(json.loads, done.stdout.splitlines())
    ]


def file_is_reported(case: WrongFile, folder: Path) -> bool:
    lay(case, folder)
    try:
        sources(folder, case.kind)
    except TandemError as error:
        return is_reported(case, str(error))
    return False


def figures(folder: Path) -> Iterator[dict]:
    """A row for each matrix: what, reported, of, seconds. The working folder is `folder` meanwhile."""
    cases = list(wrong_files())

    def row(what: str, outcomes: Iterator[bool]) -> dict:
        started, made = time.monotonic(), list(outcomes)
        return {"what": what, "reported": sum(made), "of": len(made), "seconds": round(time.monotonic() - started, 1)}

    recipes = [(text.encode(), expected) for text, expected in WRONG.values()]
    recipes += [(content, [expected]) for content, expected in WRONG_BYTES.values()]
    back = os.getcwd()
    os.chdir(folder)
    try:
        yield row("wrong recipes", (recipe_is_reported(content, expected, folder) for content, expected in recipes))
        given = ((GOOD.encode(), [expected], folder, override) for override, expected in OVERRIDES)
        yield row("wrong overrides", (recipe_is_reported(*arguments) for arguments in given))
        for ending in ("jsonl", "json", "csv", "parquet", "arrow"):
            some = [case for case in cases if case.file.split(".")[1] == ending]
            yield row(f"wrong {ending} files", (file_is_reported(case, folder / "files" / case.id) for case in some))
        yield row("wrong files streamed from a Hub", _streamed(cases, folder / "streamed"))
    finally:
        os.chdir(back)


def _streamed(cases: list[WrongFile], folder: Path) -> Iterator[bool]:
    for case, (_, message, nothing) in zip(cases, stream(cases, folder), strict=True):
        yield is_reported(case, message) and not nothing


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(figures(Path(folder)))
    for found in rows:
        print(f"{found['what']}: {found['reported']} of {found['of']} reported, {found['seconds']} s")
    return int(any(found["reported"] != found["of"] for found in rows))


if __name__ == "__main__":
    sys.exit(main())
