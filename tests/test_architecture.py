"""The shape of the code base: one import direction, no walls, no shadowed names."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pipeline.process.user_code import import_built_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))
# The data's path. A room may import rooms to its left, never to its right.
ROOMS = ["process", "run_dir", "hardware", "recipe", "monitor", "metrics", "sources", "tokenizer", "data", "model", "generation", "evals", "training", "callbacks", "report", "hub", "preflight", "run"]  # fmt: skip
ENTRIES = ["pretrain", "sft", "chat", "launch", "sweep"]  # they import every room; nothing imports them
ORDER = ROOMS + ENTRIES
MOST_LINES = 1000
# What a training loads of ours, in functions too: lower them as the core shrinks.
MOST_REACHED = {"modules": 72, "lines": 21_440}
# What runs beside or after it, or is loaded by what is looked up by name (process/user_code.py), which is never reached either.
NEVER_REACHED = ("chat", "hub", "launch", "report", "sweep.py", "data/packing.py", "data/prepare.py", "data/preview.py", "data/workers.py", "evals/sandbox.py", "preflight/memory.py", "run_dir/columns.py")  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Level and full dotted name of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module}.{a.name}" if node.module else a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((0, a.name) for a in node.names)


def our_imports(path: Path) -> Iterator[str]:
    for _, name in imports(path):
        if name.startswith("pipeline."):
            yield name.split(".")[1]


@cache
def modules_imported(path: Path, *, package: Path = PACKAGE) -> set[Path]:
    """Return the modules of ours that a file imports, in functions too, and the packages that they lie in; what only type
    checkers import is left out."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = [package.name, *path.relative_to(package).parent.parts]
            base = here[: len(here) + 1 - node.level] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{whole}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names if name.split(".")[0] == package.name):
            for n in range(1, len(parts) + 1):
                place = package.joinpath(*parts[1:n])
                found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()}
    return found


def reached(entry: Path, *, package: Path = PACKAGE) -> set[Path]:
    """Return the modules of ours that an entry loads or may load before it ends, itself included; not those that it starts
    as processes."""
    found, left = {entry}, [entry]
    while left:
        new = modules_imported(left.pop(), package=package) - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("entry", ["pretrain", "sft"])
def test_what_a_training_reaches_by_imports_does_not_grow(entry):
    modules = reached(PACKAGE / f"{entry}.py")
    lines = sum(len(path.read_text().splitlines()) for path in modules)
    count, most, most_lines = len(modules), MOST_REACHED["modules"], MOST_REACHED["lines"]
    names = " ".join(sorted(str(path.relative_to(PACKAGE)) for path in modules))
    assert count <= most, (
        f"{count} modules. Put a small class into the module of its subject, or raise MOST_REACHED: {names}"
    )
    assert lines <= most_lines, "remove as much as was added, or raise MOST_REACHED as little as you must"
    places = {path.relative_to(PACKAGE) for path in modules}
    outside = sorted(str(place) for place in places for room in NEVER_REACHED if place.is_relative_to(room))
    assert not outside, f"look them up by name (process/user_code.py), or start a process: {outside}"


def names_looked_up() -> set[str]:
    """Return all `room.module:attr` of modules that call import_built_in."""
    texts = [text for path in FILES if "import_built_in(" in (text := path.read_text())]
    constants = (node.value for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {name for name in constants if isinstance(name, str) and re.fullmatch(r"[a-z_]+\.[a-z_.]+:\w+", name)}


@pytest.mark.parametrize("name", sorted(names_looked_up()))
def test_what_is_looked_up_by_name_is_there_and_outside_the_core(name):
    assert callable(import_built_in(name))
    file = PACKAGE / f"{name.partition(':')[0].replace('.', '/')}.py"
    assert file not in reached(PACKAGE / "pretrain.py") | reached(PACKAGE / "sft.py"), (
        "import it, like any other module that a training reaches"
    )


def test_modules_are_reached_through_functions_packages_and_relative_imports(tmp_path):
    package = tmp_path / "program"
    for name, text in {
        "__init__.py": "",
        "entry.py": "import json\nfrom program.room import first\nfrom program.room.second import name",
        "room/__init__.py": "",
        "room/first.py": "def later():\n    from . import third\n    import program.room.fourth as f",
        "room/second.py": "if TYPE_CHECKING:\n    from program.room import types_only\nname = 1",
        "room/third.py": "from .fifth import anything",
        "room/fourth.py": "from ..sixth import anything",
        "room/fifth.py": "anything = 1",
        "room/types_only.py": "",
        "room/alone.py": "import program.entry",
        "sixth.py": "anything = 1",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = {str(path.relative_to(package)) for path in reached(package / "entry.py", package=package)}
    rooms = {f"room/{name}.py" for name in ("__init__", "first", "second", "third", "fourth", "fifth")}
    assert found == {"__init__.py", "entry.py", "sixth.py", *rooms}


def test_the_rooms_are_those_of_the_design():
    ours = {room_of(p) for p in FILES} - {"__init__"}
    assert ours == set(ORDER), f"rooms that do not stand in ORDER, or are gone: {ours ^ set(ORDER)}"


def test_rooms_import_only_to_their_left():
    wrong = [
        f"{path.relative_to(ROOT)} imports pipeline.{other}"
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for other in our_imports(path)
        if other != room_of(path) and (other in ENTRIES or ORDER.index(other) >= ORDER.index(room_of(path)))
    ]
    assert not wrong, "imports against the data's path:\n" + "\n".join(wrong)


def test_imports_are_absolute_except_in_the_model_that_travels_alone():
    wrong = [
        f"{path.relative_to(ROOT)}: {'.' * level}{name}"
        for path in FILES
        for level, name in imports(path)
        if (level == 0 and name.startswith("pipeline.") if room_of(path) == "model" else level > 0)
    ]
    assert not wrong, "model's files import relatively and nothing of ours, all others absolutely:\n" + "\n".join(wrong)


def test_no_module_is_a_wall():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long, f"files over {MOST_LINES} lines, split by subject: {long}"


FEWEST_LINES = 80  # of a module whose only importer is in its own room; processes and callbacks are excepted
# Started as a process, one callback each, or what another program imports.
SMALL = {
    "callbacks/profiler.py",
    "data/datatrove_step.py",
    "hub/isolated_load_test.py",
    "chat/serve.py",
    "evals/metric.py",
    "launch/launcher.py",
}


def test_no_module_is_a_fragment_of_another_in_its_room():
    importers: dict[Path, set[Path]] = {path: set() for path in FILES}
    for path in FILES:
        for module in modules_imported(path):
            if module in importers and module != path:
                importers[module].add(path)
    small = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path, of in importers.items()
        if path.stem not in ("__init__", "__main__")
        and room_of(path) not in ENTRIES
        and {room_of(p) for p in of} <= {room_of(path)}
        and len(of) <= 1
        and len(path.read_text().splitlines()) < FEWEST_LINES
    }
    assert not small.keys() - SMALL, f"merge with what imports it: {small}"


def test_no_file_name_is_used_three_times():
    names = [p.name for p in FILES if p.name not in ("__init__.py", "__main__.py")]
    thrice = {n for n in names if names.count(n) >= 3}
    assert not thrice, f"name them apart: {thrice}"


def test_names_do_not_shadow_libraries():
    # `accelerate launch pipeline/pretrain.py` puts pipeline/ first on sys.path.
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    libraries = {re.split(r"[^A-Za-z0-9_-]", d)[0].replace("-", "_") for d in dependencies} | set(
        sys.stdlib_module_names
    )
    ours = {p.stem for p in PACKAGE.iterdir()}
    assert not ours & libraries, f"rename: {ours & libraries}"


def test_there_is_no_drawer_for_everything():
    drawers = [
        p
        for p in FILES
        if p.stem in ("utils", "util", "common", "helpers", "misc") or p.parent.name in ("utils", "common", "helpers")
    ]
    assert not drawers, f"name what is in it: {drawers}"


def test_sources_are_ascii():
    kinds = ("*.py", "*.sh", "*.yaml", "*.toml")
    places = [PACKAGE, ROOT / "recipes", ROOT / "accelerate_configs", ROOT / "benchmarks"]
    files = (
        [p for place in places for kind in kinds for p in place.rglob(kind)]
        + list(ROOT.glob("*.sh"))
        + list(ROOT.glob("*.toml"))
    )
    wrong = [str(p.relative_to(ROOT)) for p in files if not p.read_text().isascii()]
    assert not wrong, f"write other characters as escapes: {wrong}"


def test_test_files_have_names_of_their_own():
    # Without __init__.py pytest takes two files of one name for one module.
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    twice = {n for n in names if names.count(n) > 1}
    assert not twice, f"rename: {twice}"


# What runs code that a file names or holds, or could: each place stands behind the gate (process/user_code.py) or reads only
# what this program wrote. A new one belongs behind the gate first, then here.
RUNS_CODE = {
    "import_module": {"process/user_code.py"},
    "exec_module": set(),
    "__import__": set(),
    "eval": set(),
    "exec": {"evals/sandbox_child.py"},  # behind the walls of its process
    "run_path": set(),
    "run_module": {"launch/console.py"},  # modules of ours, from a table
    "get_class_from_dynamic_module": {"evals/subject.py"},  # allow_model_code decides
    "load_dataset": set(),
    "load_dataset_builder": {"sources/splits.py"},  # of a folder without its Python files: datasets 4 runs none
    "load_from_disk": set(),
    "pickle.load": {"data/workers.py"},  # what the process at the other end of a pipe sent, one started by the other
    "pickle.loads": {"data/prepare.py", "data/workers.py"},  # what the parent process sent down a pipe; its own answer
    "pickle.Unpickler": set(),
    "torch.load": set(),
    "joblib.load": set(),
    "np.load": set(),
    "yaml.load": set(),
    "yaml.unsafe_load": set(),
    "yaml.full_load": set(),
    "jinja2.Environment": {"hub/card.py", "report/page.py"},  # our own pages
    "jinja2.Template": set(),
    "render_jinja_template": {"tokenizer/chat.py", "tokenizer/own_template.py"},  # bounded, in a sandbox
    "apply_chat_template": {"tokenizer/chat.py", "evals/chat.py"},
    "pipeline": set(),  # transformers' and diffusers' pipeline(...)
    "AutoConfig.from_pretrained": {"hub/isolated_load_test.py", "model/load.py", "preflight/plan.py"},
    "AutoModelForCausalLM.from_pretrained": {"hub/isolated_load_test.py"},
    "AutoTokenizer.from_pretrained": {"hub/export.py", "hub/isolated_load_test.py", "tokenizer/load.py", "tokenizer/train.py"},
    "PreTrainedTokenizerFast.from_pretrained": {"tokenizer/train.py"},
    "model_class.from_pretrained": {"hub/isolated_load_test.py", "model/build.py"},  # with what allow_model_code decided
}  # fmt: skip
# Files in which trust_remote_code may be another thing than False.
DECIDES_TRUST = {"model/load.py", "evals/subject.py", "hub/isolated_load_test.py"}


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Name of each call, with what stands before its last dot where that is a plain name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield "" if function.attr in ("eval", "exec") else function.attr, node  # model.eval() is another thing
                yield f"{ast.unparse(function.value)}.{function.attr}", node


STARTS_PROCESSES = {"process/commands.py", "launch/launcher.py", "preflight/plan.py", "sweep.py"}


def test_side_processes_are_started_in_one_place():
    """The others start a whole run, and wait for it."""
    found = {str(p.relative_to(PACKAGE)) for p in FILES if re.search(r"\bsubprocess\.Popen\(", p.read_text())}
    assert found == STARTS_PROCESSES, "use process/commands.py: start"


def test_code_of_others_is_run_in_the_known_places_only():
    found: dict[str, set[str]] = {name: set() for name in RUNS_CODE}
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        for name, _ in calls_of(path):
            if name in RUNS_CODE or name.endswith(".from_pretrained"):
                found.setdefault(name, set()).add(place)
    assert found == RUNS_CODE


def test_transformers_is_never_left_to_ask_whether_code_is_trusted():
    open_questions, trusting = [], set()
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        for name, call in calls_of(path):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if re.fullmatch(r"Auto\w+\.from_pretrained", name) and "trust_remote_code" not in given:
                open_questions.append(f"{place}:{call.lineno}")
            trust = given.get("trust_remote_code")
            if trust is not None and ast.unparse(trust) != "False":
                trusting.add(place)
    assert not open_questions, "pass trust_remote_code, what the gate decided or False"
    assert trusting == DECIDES_TRUST
