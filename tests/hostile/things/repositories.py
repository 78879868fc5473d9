"""Repositories of the Hub: what a stranger pushed, and what a Hub in a stranger's hands answers."""

import json
import time
from collections.abc import Callable

from pipeline.process.storage import sum_of
from tests.hostile.case import MARKING, MODELING, Case
from tests.hostile.trial import ALLOWED, Thing

PULL = ("hub pull evil/run", "report runs/x", "chat runs/x -p hello --max-new-tokens 2")
DIRECT = (
    "chat evil/run -p hello --max-new-tokens 2",
    "pretrain in/r.yaml model.start_from=evil/run",
    "data in/r.yaml tokenizer.path=evil/run model.n_layer=1 model.n_embd=16 model.n_head=2",
)
INTO_RUNS = (*(name for name in ALLOWED if not name.startswith("runs")), "runs")
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
FACTS = {"bytes": 1, "sha256": "0" * 64}
NAMES = ["../../elsewhere/pwned", "a/../../../elsewhere/pwned", "..\\..\\elsewhere\\pwned", "a\nb", "a\x1b[31mb", "CONFIG.JSON", "config.json ",
         "con\u0441fig.json", "\u202egnp.exe", "x" * 300, "a//b", "./config.json", "~/pwned", "$HOME/pwned", "-rf"]  # fmt: skip


def seal_of(**values: object) -> bytes:
    """A seal that agrees with itself, whatever it says."""
    value = {"step": 2, "run": "x", "files": {}, **values}
    return json.dumps({**value, "sha256": sum_of(value)}).encode()


def manifest_of(**values: object) -> bytes:
    return json.dumps({"name": "x", "stage": "pretrain", "status": "finished", "finished": 1.0, "attempts": 1} | values).encode()  # fmt: skip


def pushed(**changed: bytes | None) -> Callable[[Case], str]:
    return with_files({name.replace("__", "/").replace("_json", ".json").replace("_yaml", ".yaml"): content for name, content in changed.items()})  # fmt: skip


def with_files(changed: dict[str, bytes | None]) -> Callable[[Case], str]:
    """A pushed run of which these files are other ones."""

    def lay(case: Case) -> str:
        case.recipe(ready=True)
        files = case.pushed()
        _neighbour(case)
        return case.repository({name: content for name, content in (files | changed).items() if content is not None})

    return lay


def _neighbour(case: Case) -> None:
    """A run of the user's own, which no pull may touch."""
    case.put("runs/neighbour/run_manifest.json", json.dumps({"name": "neighbour", "stage": "pretrain", "attempts": 1}))


def aimed_outside(case: Case) -> str:
    """A seal that names absolute paths and paths above, which lie in the repository under those names too."""
    names = [*NAMES, str(case.folder / "elsewhere" / "pwned"), "/etc/passwd", "/proc/self/environ"]
    lay = with_files({"MANIFEST.json": seal_of(files=dict.fromkeys(names, FACTS)), "pwned": b"x"})
    return lay(case)


def one_name(name: str) -> Callable[[Case], str]:
    def lay(case: Case) -> str:
        target = name.replace("FOLDER", str(case.folder))
        return with_files({"MANIFEST.json": seal_of(files={target: FACTS})})(case)

    return lay


def linked(case: Case) -> str:
    """Hub repositories hold git links as small files with the target's path."""
    return with_files({"model.safetensors": b"../../elsewhere/secret", "config.json": b"/etc/passwd"})(case)


def listing(*names: str, times: int = 1) -> Callable[[Case], str]:
    """The Hub's list of files has these names, and every one of them is answered."""

    def lay(case: Case) -> str:
        repo_id = with_files({})(case)
        facts = {"id": repo_id, "modelId": repo_id, "sha": "a" * 40, "private": False, "tags": []}
        all_names = [name.replace("FOLDER", str(case.folder)) for name in names]
        files = [{"rfilename": f"{name}{n or ''}"} for name in all_names for n in range(times)]
        answer = json.dumps({**facts, "siblings": files}).encode()
        tree = json.dumps([{"type": "file", "path": f["rfilename"], "size": 1, "oid": "0" * 40} for f in files]).encode()  # fmt: skip
        case.answers[f"GET /api/models/{repo_id}/tree"] = lambda handler: handler.answer(200, tree)
        case.answers[f"GET /api/models/{repo_id}"] = lambda handler: handler.answer(200, answer)
        if times == 1:
            headers = {"ETag": '"1"', "X_Repo_Commit": "a" * 40}
            case.answers[f"/{repo_id}/resolve/"] = lambda handler: handler.answer(200, b"x", **headers)
        return repo_id

    return lay


def answered(part: str, answer: Callable) -> Callable[[Case], str]:
    def lay(case: Case) -> str:
        repo_id = with_files({})(case)
        case.answers[part] = lambda handler: answer(handler, case)
        return repo_id

    return lay


def redirect_to_a_file(handler, case: Case) -> None:
    handler.answer(302, b"", Location="file:///etc/passwd", ETag='"1"', X_Repo_Commit="a" * 40)


def redirect_in_a_circle(handler, case: Case) -> None:
    handler.answer(302, b"", Location=handler.path, ETag='"1"', X_Repo_Commit="a" * 40)


def without_end(handler, case: Case) -> None:
    """A body that says it is small and goes on for as long as somebody reads."""
    handler.send_response(200)
    for name, value in {"ETag": '"1"', "X-Repo-Commit": "a" * 40, "Content-Type": "application/json"}.items():
        handler.send_header(name, value)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    ends = time.monotonic() + 20
    try:
        while handler.command != "HEAD" and time.monotonic() < ends:
            handler.wfile.write(b" " * (1 << 16))
            time.sleep(0.01)
    except OSError:
        pass


def wrong_length(handler, case: Case) -> None:
    handler.answer(200, b"{}", Content_Length=str(1 << 40), ETag='"1"', X_Repo_Commit="a" * 40)
    handler.close_connection = True


def says(body: bytes) -> Callable:
    return lambda handler, case: handler.answer(200, body)


def etag_above(handler, case: Case) -> None:
    """The ETag names the file in the cache of downloads."""
    handler.answer(200, b"pwned", ETag='"../../../../../elsewhere/pwned"', X_Repo_Commit="../../../../elsewhere")


def code_in_the_model(case: Case) -> str:
    case.auto_map()
    model = {file.name: file.read_bytes() for file in (case.folder / "model").iterdir()}
    case.recipe(ready=True)
    return case.repository(model | {"evil.py": MODELING.encode(), "README.md": b"<script>hostile-script</script>"})


def code_in_the_run(case: Case) -> str:
    """The recipe names the module that the seal put into model/."""
    case.run(form="model.evil:f", data={"validation": [{"files": "in/valid.jsonl", "format": "model.evil:f"}]})
    recipe = (case.folder / "runs" / "x" / "recipe.yaml").read_bytes()
    files = case.pushed()
    case.recipe(ready=True)
    return case.repository(files | {"recipe.yaml": recipe})


RECIPES = ("data runs/x/recipe.yaml", "preflight runs/x/recipe.yaml --probe 0", "pretrain runs/x/recipe.yaml run.name=y run.directory=out")  # fmt: skip
SEALS: dict[str, bytes] = {
    "is a list": b"[]",
    "is nested 100,000 deep": DEEP,
    "is 40 MB of spaces": b" " * (40 << 20),
    "has no files": seal_of(files=None),
    "has a list of files": seal_of(files=["config.json"]),
    "has a step that is text": seal_of(step="../../elsewhere"),
    "has a step of 400 digits": seal_of(step=10**400),
    "has numbers that are none": b'{"step": NaN, "run": Infinity, "files": {}}',
    "has names twice": b'{"files": {}, "files": {"../pwned": 1}, "step": 2, "run": "x"}',
}
MANIFESTS: dict[str, bytes] = {
    "is nested 100,000 deep": DEEP,
    "names a run above": manifest_of(name="../../elsewhere/pwned"),
    "names an absolute folder": manifest_of(name="/tmp/pwned"),
    "names the run beside it": manifest_of(name="neighbour"),
    "names a hidden folder": manifest_of(name=".ssh"),
    "names a run with ESC and newline": manifest_of(name="x\x1b]52;c;aGk=\x07\n"),
    "names a device": manifest_of(name="con"),
    "is of a parent that is a path": manifest_of(parent={"path": "../../elsewhere", "run": "/etc/passwd"}),
}  # fmt: skip

THINGS: dict[str, Thing] = {}
for name, content in SEALS.items():
    THINGS[f"a seal that {name}"] = Thing(lay=with_files({"MANIFEST.json": content}), commands=PULL, allowed=INTO_RUNS)
for name, content in MANIFESTS.items():
    THINGS[f"a manifest that {name}"] = Thing(lay=with_files({"run_manifest.json": content}), commands=PULL, allowed=INTO_RUNS)  # fmt: skip
for name, target in {"above": "../../elsewhere/pwned", "absolute": "FOLDER/elsewhere/pwned", "of Windows": "..\\..\\pwned", "with ESC": "a\x1b[31m\nb"}.items():  # fmt: skip
    THINGS[f"a seal that names a file {name}"] = Thing(lay=one_name(target), commands=PULL, allowed=INTO_RUNS)
ANSWERS: dict[str, tuple[str, Callable]] = {
    "sends files on to file:///etc/passwd": ("/resolve/", redirect_to_a_file),
    "sends files on in a circle": ("/resolve/", redirect_in_a_circle),
    "names a larger file than it sends": ("/resolve/", wrong_length),
    "sends a config without end": ("config.json", without_end),
    "names files in the cache by paths": ("/resolve/", etag_above),
    "sends 300 kB of ESC": ("GET /api/models/", says(b"\x1b[31m" * 60_000)),
}  # fmt: skip
for name, (part, answer) in ANSWERS.items():
    THINGS[f"a Hub that {name}"] = Thing(lay=answered(part, answer), commands=(PULL[0], DIRECT[0], DIRECT[1]), allowed=INTO_RUNS)  # fmt: skip
THINGS |= {
    "a seal of many hostile names": Thing(lay=aimed_outside, commands=PULL, allowed=INTO_RUNS),
    "files that are links": Thing(lay=linked, commands=(*PULL, *DIRECT), allowed=INTO_RUNS),
    "a listing with names above": Thing(lay=listing("../../elsewhere/pwned", "config.json"), commands=(PULL[0], DIRECT[0]), allowed=INTO_RUNS),
    "a listing with absolute names": Thing(lay=listing("FOLDER/elsewhere/pwned", "/etc/cron.d/x"), commands=(PULL[0], DIRECT[0]), allowed=INTO_RUNS),
    "a listing with names of Windows": Thing(lay=listing("..\\..\\elsewhere\\pwned", "C:\\pwned"), commands=(PULL[0], DIRECT[0]), allowed=INTO_RUNS),
    "a listing with names of ESC and newline": Thing(lay=listing("a\x1b[31m\nb", "\u202egnp"), commands=(PULL[0], DIRECT[0]), allowed=INTO_RUNS),
    "a listing of git's own folder": Thing(lay=listing(".git/hooks/post-checkout", ".huggingface/x", ".cache/huggingface/y"), commands=(PULL[0],), allowed=INTO_RUNS),
    "a listing of names that differ by case": Thing(lay=listing("config.json", "CONFIG.JSON", "Config.json"), commands=(PULL[0],), allowed=INTO_RUNS),
    "a listing of 200,000 files": Thing(lay=listing("folder/file", times=200_000), commands=(PULL[0], DIRECT[0]), allowed=INTO_RUNS, limit_s=120),
    "a model of its own code": Thing(lay=code_in_the_model, commands=(*DIRECT, "serve evil/run"), allowed=INTO_RUNS),
    "a run whose recipe names its own code": Thing(lay=code_in_the_run, commands=(*PULL, "evals runs/x", "hub export runs/x --to safetensors --output out/exported", *RECIPES), allowed=INTO_RUNS),
    "modules named as libraries": Thing(lay=with_files({f"{name}.py": MARKING.encode() for name in ("torch", "json", "wandb", "sitecustomize", "conftest")} | {"__init__.py": MARKING.encode(), "x.pth": b"import os; os.system('touch $MARK')"}), commands=(*PULL, *DIRECT), allowed=INTO_RUNS),
    "a whole run, nothing wrong": Thing(lay=with_files({}), commands=(*PULL, "serve runs/x"), allowed=INTO_RUNS),
}  # fmt: skip
