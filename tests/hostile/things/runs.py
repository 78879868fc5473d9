"""Run folders of a stranger: manifests, rows, samples, scores, events and the files beside them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import MARKING, Case
from tests.hostile.things.repositories import FACTS, MANIFESTS, SEALS, seal_of
from tests.hostile.trial import ALLOWED, SCRIPT, Thing

REPORT = "report runs/x"
COMPARE = "report runs/x runs/y --output out"
CHAT = "chat runs/x -p hello --max-new-tokens 2"
EVALS = "evals runs/x samples"
BPB = "evals runs/x bpb"
DATA = "data runs/x/recipe.yaml"
START = "pretrain in/r.yaml model.start_from=runs/x"
EXPORT = "hub export runs/x --to safetensors --output out/exported"
PUSH = "hub push runs/x --id somebody/x"
AGAIN = "pretrain runs/x/recipe.yaml run.name=x"
ALL = (REPORT, CHAT, EVALS, START, EXPORT)
DEEP = "[" * 100_000 + "]" * 100_000
MARKUP = f"<script>{SCRIPT}()</script><img src=x onerror={SCRIPT}()>\x1b]52;c;aGk=\x07\x1b[2J\u202e"
LINK = f"[a](javascript:{SCRIPT}()) ![a](file:///etc/passwd) {MARKUP}"
ROW = {"step": 2, "attempt": 1, "time": 1.79e9, "tokens": 64, "train/loss": 3.2, "val/bpb": 1.75}


Content = str | bytes | Callable[[], str]


def run_with(*files: tuple[str, Content], **sections) -> Callable[[Case], None]:
    """A run in which these files are other ones."""

    def lay(case: Case) -> None:
        case.recipe(ready=True)
        case.run(**sections)
        (case.folder / "runs" / "x" / "evil.py").unlink()
        for name, content in files:
            case.put(f"runs/x/{name}", content() if callable(content) else content)

    return lay


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def manifest(**values: object) -> tuple[str, str]:
    base = {"name": "x", "stage": "pretrain", "status": "finished", "finished": 1.0, "attempts": 1}
    return "run_manifest.json", json.dumps(base | values)


def compared(lay: Callable[[Case], None]) -> Callable[[Case], None]:
    def with_another(case: Case) -> None:
        lay(case)
        case.put("runs/y/run_manifest.json", manifest(name="y")[1])
        case.put("runs/y/metrics.jsonl", lines(ROW))

    return with_another


def place(make: Callable[[Path, Case], object], *names: str) -> Callable[[Case], None]:
    def lay(case: Case) -> None:
        run_with()(case)
        case.put("elsewhere/secret.json", json.dumps(ROW))
        for name in names:
            path = case.folder / "runs" / "x" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            make(path, case)

    return lay


def sparse(path: Path, case: Case) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 36)


def linked_folders(case: Case) -> None:
    """What a command writes into the run would go where its links lead."""
    run_with()(case)
    for name in ("report", "checkpoints", "quarantine", "profile", "stacks"):
        (case.folder / "elsewhere" / name).mkdir()
        (case.folder / "runs" / "x" / name).symlink_to(case.folder / "elsewhere" / name)


def linked_files(case: Case) -> None:
    run_with()(case)
    (case.folder / "runs" / "x" / "report").mkdir()
    for name in ("report/evals.json", "report/report.md", "report/report.html", "failure.json", ".lock"):
        target = case.folder / "elsewhere" / name.replace("/", "-")
        target.write_text("kept")
        (case.folder / "runs" / "x" / name).symlink_to(target)


def own_cache(case: Case) -> None:
    """The run's recipe names where its data are prepared: a folder of the user's."""
    case.run(data={"cache_dir": str(case.folder / "elsewhere" / "cache")})
    case.recipe(ready=True)


def own_directory(case: Case) -> None:
    case.run(run={"directory": str(case.folder / "elsewhere")})
    case.recipe(ready=True)


def pickled_state(case: Case) -> None:
    """A checkpoint as the Trainer of others writes it, sealed: its optimizer and random states are pickles."""
    import pickle

    from pipeline.run_dir.checkpoints import whole_folder

    class Touch:
        def __reduce__(self):
            return (Path.touch, (case.folder / "MARK",))

    run_with()(case)
    run = case.folder / "runs" / "x"
    with whole_folder(run / "checkpoints" / "checkpoint-2", step=2, run="x") as folder:
        for file in (case.folder / "model").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin"):
            (folder / name).write_bytes(pickle.dumps(Touch()))
    case.put("runs/x/run_manifest.json", json.dumps({"name": "x", "stage": "pretrain", "attempts": 1}))


WRONG = [7, -1, "text", None, [], {}, [[]], 1e400, float("nan"), True, "\ud800", {"a": {"b": []}}]
ODD_ROWS = [{**ROW, key: value} for key in ROW for value in WRONG] + [{"event": kind, "step": value, "time": value} for kind in ("attempt", "save", "evaluation", "spike", "stop", 7) for value in WRONG]  # fmt: skip
ODD_SAMPLES = [
    {
        "step": value,
        "attempt": value,
        "prompt": value,
        "text": value,
        "time": value,
        "completion": value,
        "samples": value,
    }
    for value in WRONG
]
ODD_RESULTS = [
    {"name": value, "value": value, "protocol": value, "items": value, "low": value, "high": value} for value in WRONG
]
ODD_EVALS = {"entries": [{"step": value, "time": value, "results": value, "model": value, "samples": value} for value in WRONG] + [{"step": 2, "time": 1.0, "results": ODD_RESULTS}, 7, None]}  # fmt: skip

METRICS: dict[str, Content] = {
    "nested 100,000 deep": lines(ROW, DEEP, '{"step": 3, "train/loss": ' + DEEP + "}"),
    "of one line of 200 MB": lambda: '{"step": 2, "train/loss": "' + "a" * (200 << 20) + '"}\n',
    "of 300,000 columns": lambda: lines(*({**ROW, "step": n, **{f"c{n}-{m}": 1.0 for m in range(1000)}} for n in range(300))),
    "of numbers that are none": lines(*({**ROW, "step": n, "train/loss": value} for n, value in enumerate([float("nan"), float("inf"), -1e308, 1e308, 0, -0.0, 10**300] * 20))),
    "of wrong types": lines(*ODD_ROWS),
    "of numbers of 5,000 digits": lines(ROW, '{"step": ' + "9" * 5000 + ', "train/loss": 1.0}', '{"step": 1e999999}'),
    "of steps up to 2**80": lines(*({**ROW, "step": 2**n, "time": 2.0**n, "tokens": 10**n} for n in range(80))),
    "of zero bytes": b"\0" * 10_000_000,
}  # fmt: skip
MARKED_NAMES = {"name": MARKUP, "note": LINK, "tags": [MARKUP], "recipe_name": MARKUP, "hardware": {"device": MARKUP}, "versions": {MARKUP: MARKUP}, "git": {"commit": MARKUP, "dirty": MARKUP}, "inputs": {"sources": {MARKUP: {"files": [MARKUP]}}}, "hub": {"id": f"javascript:{SCRIPT}()", "commit": MARKUP}}  # fmt: skip

THINGS: dict[str, Thing] = {}
for name, content in METRICS.items():
    THINGS[f"metrics {name}"] = Thing(lay=compared(run_with(("metrics.jsonl", content))), commands=(REPORT, COMPARE))
for name, content in MANIFESTS.items():
    THINGS[f"a manifest that {name}"] = Thing(
        lay=run_with(("run_manifest.json", content)), commands=(REPORT, CHAT, AGAIN)
    )
for name, content in SEALS.items():
    THINGS[f"a seal that {name}"] = Thing(lay=run_with(("model/MANIFEST.json", content)), commands=(CHAT, START, PUSH))
INTO_RUNS = (*ALLOWED, "runs")
THINGS |= {
    "types that no samples have": Thing(lay=compared(run_with(("samples.jsonl", lines(*ODD_SAMPLES)))), commands=(REPORT, COMPARE)),
    "types that no scores have": Thing(lay=compared(run_with(("report/evals.json", json.dumps(ODD_EVALS)))), commands=(REPORT, COMPARE, EVALS)),
    "types that no recipe has": Thing(lay=compared(run_with(("recipe.yaml", "run: [1]\nmodel: 7\ndata: {sources: 3, validation: x}\ntrain: null\nevals: [[]]\n"))), commands=(REPORT, COMPARE, CHAT, EVALS, BPB, DATA)),
    "types that no failure has": Thing(lay=run_with(("failure.json", json.dumps({"status": [], "class": 7, "message": {"a": MARKUP}, "facts": [1], "traceback": 3}))), commands=(REPORT,)),
    "markup and control characters": Thing(lay=compared(run_with(manifest(**MARKED_NAMES), ("samples.jsonl", lines(*({"step": n, "attempt": 1, "time": 1.0, "prompt": MARKUP, "text": MARKUP, "completion": LINK} for n in range(4)))), ("metrics.jsonl", lines(ROW, {**ROW, MARKUP: 1.0, "step": 3}, {"event": MARKUP, "step": 3, "time": 2.0, "reason": MARKUP})), ("failure.json", json.dumps({"status": 1, "class": MARKUP, "message": MARKUP, "traceback": [MARKUP]})))), commands=(REPORT, COMPARE, CHAT, EVALS)),
    "a recipe nested 20,000 deep": Thing(lay=run_with(("recipe.yaml", "run: " + "[" * 20_000)), commands=(REPORT, CHAT, EVALS, BPB, DATA, AGAIN)),
    "a recipe of aliases of aliases": Thing(lay=run_with(("recipe.yaml", "x-a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"x-{n}: &{n} [{', '.join([f'*{p}'] * 10)}]\n" for p, n in zip("abcdefghi", "bcdefghij", strict=True)) + "run: {note: *j}\n")), commands=(REPORT, EVALS, DATA)),
    "a recipe of tags of Python": Thing(lay=run_with(("recipe.yaml", "run: !!python/object/apply:os.system ['touch $MARK']\nmodel: !!python/name:os.system\n")), commands=(REPORT, CHAT, EVALS, BPB, DATA, AGAIN)),
    "a recipe with names of code": Thing(lay=lambda case: (case.run(form="model.evil:f", data={"validation": [{"files": "in/valid.jsonl", "format": "model.evil:f"}]}, run={"callbacks": ["evil:f"], "trust_code": True}), case.recipe(ready=True)), commands=(*ALL, BPB, DATA, AGAIN)),
    "a recipe whose data are prepared elsewhere": Thing(lay=own_cache, commands=(BPB, EVALS, REPORT)),
    "a recipe whose runs lie elsewhere": Thing(lay=own_directory, commands=(BPB, EVALS, REPORT, CHAT)),
    "folders that are links": Thing(lay=linked_folders, commands=(REPORT, EVALS)),
    "files that are links": Thing(lay=linked_files, commands=(REPORT, EVALS)),
    "files that are pipes": Thing(lay=place(lambda path, case: os.mkfifo(path), "metrics.jsonl", "samples.jsonl", "report/evals.json", "failure.json"), commands=(REPORT, COMPARE, EVALS)),
    "records that are folders": Thing(lay=place(lambda path, case: path.mkdir(), "metrics.jsonl", "samples.jsonl", "recipe.yaml", "report/evals.json", "failure.json"), commands=(REPORT, COMPARE, CHAT, EVALS)),
    "a checkpoint of pickles": Thing(lay=pickled_state, commands=(REPORT, CHAT, "evals runs/x/checkpoints/checkpoint-2 samples", "pretrain runs/x/recipe.yaml run.directory=runs", START), allowed=INTO_RUNS),
    "checkpoints with names of numbers": Thing(lay=place(lambda path, case: path.mkdir(), *(f"checkpoints/checkpoint-{name}" for name in ("-1", "1e9", "9" * 200, "\u0665", "1\n", "0x10", "\x1b[31m"))), commands=(REPORT, CHAT, EVALS)),
    "a seal of files above": Thing(lay=run_with(("model/MANIFEST.json", seal_of(files=dict.fromkeys(["../../../elsewhere/pwned", "/etc/passwd", "/dev/zero"], FACTS)))), commands=(*ALL, PUSH)),
    "modules named as libraries": Thing(lay=run_with(*((f"{folder}{name}.py", MARKING) for folder in ("", "model/") for name in ("torch", "json", "sitecustomize", "recipe", "conftest"))), commands=(*ALL, BPB, DATA, AGAIN)),
    "logs of ESC": Thing(lay=run_with(("console.log", MARKUP * 1000), ("gpu-\x1b[31m.csv", MARKUP), ("gpu-host.csv", "time,power\n" + MARKUP + "\n"), ("stacks/a.txt", MARKUP)), commands=(REPORT,)),
}  # fmt: skip
