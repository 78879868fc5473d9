"""The shape of the code base: one import direction, no walls, no shadowed names."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))
# The data's path. A room may import rooms to its left, never to its right.
ROOMS = ["process", "run_dir", "hardware", "recipe", "monitor", "metrics", "sources", "tokenizer", "data", "model", "generation", "evals", "training", "callbacks", "report", "hub", "plan", "run", "train", "stage", "preflight"]  # fmt: skip
ENTRIES = ["pretrain", "sft", "chat", "launch", "sweep"]  # they import every room; nothing imports them
# What only some runs need: it may import every room, and is imported by functions alone, where a recipe's key or an option asks.
CONTRIB = "contrib"
ORDER = [*ROOMS, *ENTRIES, CONTRIB]
MOST_LINES = 1000
LONGER: dict[str, int] = {}
# Imports to the right that stay, each with its reason.
EXCEPTED = {
    # The command makes rows of one text each for a model that mixes the texts of a row: it builds the model and tries it.
    ("data/__main__.py", "training"),
    # The command reports what the checks of a run find.
    ("plan/__main__.py", "run"),
}

# How much there is to read, and how entangled it is. A node is one of Python's syntax tree: it stays the same when a line is made
# wider or a statement is split. Each figure may only fall: take away as much as was added, and lower what fell.
MOST = {
    "nodes": 352_500,  # of them 7,300 for adapters and what fits a card, 600 for run.minutes
    "nodes_per_code_line": 8.88,
    "banners": 4,
    "functions_of_recipe": 91,
    "functions_of_trainer": 5,
    "names_of_modules": 0,
    "modules_in_circles": 0,
}
# What the trainer's process holds of ours after two steps of each quickstart: the core to read first.
MOST_LOADED = {"pretrain": {"modules": 122, "nodes": 181_800}, "sft": {"modules": 137, "nodes": 209_900}}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Level and full dotted name of everything a file imports, inside functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module}.{a.name}" if node.module else a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((0, a.name) for a in node.names)


def our_imports(path: Path) -> Iterator[str]:
    for _, name in imports(path):
        if name.startswith("pipeline."):
            yield name.split(".")[1]


@cache
def module_imports(path: Path, *, package: Path = PACKAGE) -> set[Path]:
    """Return the modules of ours that a file imports, in functions too; what only type checkers import is left out."""
    found: set[Path] = set()
    unloaded = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            unloaded |= {id(each) for statement in node.body for each in ast.walk(statement)}
    for node in ast.walk(tree(path)):
        if id(node) in unloaded:
            continue
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
            places = [package.joinpath(*parts[1:n]) for n in range(2, len(parts) + 1)]
            files = [
                file
                for place in places
                for file in (place / "__init__.py", place.with_suffix(".py"))
                if file.is_file()
            ]
            found |= set(files[-1:])  # the last part of a name is a module or something in one
    return found


@cache
def num_nodes(path: Path) -> int:
    return sum(1 for _ in ast.walk(tree(path)))


def num_taking(name: str) -> int:
    """Return how many functions have a parameter of this name."""
    arguments = (node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.arguments))
    return sum(name in [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)] for of in arguments)


def num_code_lines(text: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def num_banners(text: str) -> int:
    """Return how many comments are alone at the left margin, as headings of modules within a module."""
    lines = ["", *text.splitlines(), ""]
    comments = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT)
    alone = (
        t.string
        for t in comments
        if t.start[1] == 0 and not lines[t.start[0] - 1].strip() and not lines[t.start[0] + 1].strip()
    )
    return sum(bool(re.fullmatch(r"# .{3,}\.", comment)) for comment in alone)


def names_of_modules(path: Path) -> list[str]:
    """Return the strings of a file that name an object of ours, as a recipe names the user's: `room.module:attr`."""
    strings = (node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant))
    named = [text for text in strings if isinstance(text, str) and re.fullmatch(r"[a-z_.]+:\w+", text)]
    return [text for text in named if module_file(text.partition(":")[0].removeprefix("pipeline.")).is_file()]


def module_file(name: str) -> Path:
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py")


def circles(package: Path = PACKAGE) -> list[set[Path]]:
    """Return the groups of modules that import each other, in functions too."""
    files = sorted(package.rglob("*.py"))
    contrib = {path for path in files if path.is_relative_to(package / CONTRIB)}  # plug-ins stand on what calls them
    imported = {path: module_imports(path, package=package) - {path} - contrib for path in files}
    reached = {path: everything_behind(path, imported) for path in imported}
    groups = {frozenset({path, *(other for other in reached[path] if path in reached[other])}) for path in imported}
    return [set(group) for group in groups if len(group) > 1]


def everything_behind(path: Path, imported: dict[Path, set[Path]]) -> set[Path]:
    found, left = set(), [path]
    while left:
        new = imported[left.pop()] - found
        found |= new
        left += new
    return found


def test_there_is_not_more_to_read_and_nothing_more_entangled():
    texts = [path.read_text() for path in FILES]
    nodes = sum(map(num_nodes, FILES))
    found = {
        "nodes": nodes,
        "nodes_per_code_line": round(nodes / sum(map(num_code_lines, texts)), 2),
        "banners": sum(map(num_banners, texts)),
        "functions_of_recipe": num_taking("recipe"),
        "functions_of_trainer": num_taking("trainer"),
        "names_of_modules": sum(len(names_of_modules(path)) for path in FILES),
        "modules_in_circles": sum(map(len, circles())),
    }
    risen = {name: f"{value} > {MOST[name]}" for name, value in found.items() if value > MOST[name]}
    assert not risen, f"each may only fall: {risen}"


TWO_STEPS = """
import json, os, sys
from pipeline.{stage} import main
status = main(sys.argv[2:])
ours = [name for name in sys.modules if name.partition(".")[0] == "pipeline"]
with open(sys.argv[1], "w") as file:
    json.dump(ours, file)
    file.flush()
os._exit(status)  # as the entries end
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, set[Path]]:
    """Return our modules that the process of each quickstart holds after two steps and all that comes after the last one."""
    folder = tmp_path_factory.mktemp("loaded")
    small = ["evals.bpb.tokens=2048", "evals.bpb.document_bytes=2000", "samples.max_new_tokens=2"]
    common = [
        f"run.directory={folder}",
        f"data.cache_dir={folder / 'cache'}",
        "train.max_steps=2",
        "train.torch_compile=false",
        *small,
    ]
    changes = {
        "pretrain": ["run.name=base", *common],
        "sft": ["run.name=chat", f"model.start_from={folder / 'base'}", "evals.chat.max_per_task=2", *common],
    }
    found = {}
    for stage, overrides in changes.items():
        command = [sys.executable, "-c", TWO_STEPS.format(stage=stage), str(folder / f"{stage}.json")]
        recipe = f"recipes/quickstart_{stage}.yaml"
        done = subprocess.run([*command, recipe, *overrides], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        names = json.loads((folder / f"{stage}.json").read_text())
        places = [PACKAGE.joinpath(*name.split(".")[1:]) for name in names]
        files = {place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places}
        found[stage] = {path for path in files if path.read_text().strip()}
    return found


@pytest.mark.full  # starts two runs
@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_a_quickstart_loads_no_more_of_ours(loaded, stage):
    files = loaded[stage]
    found = {"modules": len(files), "nodes": sum(map(num_nodes, files))}
    most = MOST_LOADED[stage]
    names = " ".join(sorted(str(path.relative_to(PACKAGE)) for path in files))
    assert all(found[name] <= most[name] for name in most), (
        f"{found}, each may only fall. Import in the function that needs it: {names}"
    )


def test_circles_are_found_through_functions_packages_and_relative_imports(tmp_path):
    package = tmp_path / "program"
    for name, text in {
        "__init__.py": "",
        "entry.py": "import json\nfrom program.room import first\nfrom program.room.second import name",
        "room/__init__.py": "",
        "room/first.py": "def later():\n    from . import third\n    import program.room.fourth as f",
        "room/second.py": "if TYPE_CHECKING:\n    from program.entry import types_only\nname = 1",
        "room/third.py": "from .fifth import anything",
        "room/fourth.py": "from ..sixth import anything",
        "room/fifth.py": "from program.room import first",
        "room/alone.py": "import program.entry",
        "sixth.py": "anything = 1",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = [{str(path.relative_to(package)) for path in circle} for circle in circles(package)]
    assert found == [{"room/first.py", "room/third.py", "room/fifth.py"}]


def test_the_rooms_are_those_of_the_design():
    ours = {room_of(p) for p in FILES} - {"__init__"}
    assert ours <= set(ORDER), f"rooms that do not stand in ORDER, or are gone: {ours ^ set(ORDER)}"


def test_rooms_import_only_to_their_left():
    wrong = [
        f"{path.relative_to(ROOT)} imports pipeline.{other}"
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for other in our_imports(path)
        if other != room_of(path)
        and other != CONTRIB
        and (other in ENTRIES or ORDER.index(other) >= ORDER.index(room_of(path)))
        if (str(path.relative_to(PACKAGE)), other) not in EXCEPTED
    ]
    assert not wrong, "imports against the data's path:\n" + "\n".join(wrong)


def test_contrib_is_imported_inside_functions_alone():
    wrong = [
        str(path.relative_to(ROOT))
        for path in FILES
        if room_of(path) != CONTRIB
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"pipeline.{CONTRIB}")
    ]
    assert not wrong, f"import it in the function that a recipe's key reaches: {wrong}"


def test_imports_are_absolute_except_in_the_model_that_travels_alone():
    wrong = [
        f"{path.relative_to(ROOT)}: {'.' * level}{name}"
        for path in FILES
        for level, name in imports(path)
        if (level == 0 and name.startswith("pipeline.") if room_of(path) == "model" else level > 0)
    ]
    assert not wrong, "model's files import relatively and nothing of ours, all others absolutely:\n" + "\n".join(
        wrong
    )


def test_no_module_is_a_wall():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > LONGER.get(name, MOST_LINES)}
    assert not long, f"files over {MOST_LINES} lines, split by subject: {long}"


FEWEST_LINES = 80  # of a module whose only importer is in its own room; processes and callbacks are excepted
# Started as a process, one callback each, or what another program imports.
SMALL = {
    "callbacks/profiler.py",
    "contrib/datatrove_step.py",
    "hub/isolated_load_test.py",
    "hub/publisher.py",
    "chat/serve.py",
    "evals/metric.py",
    "launch/launcher.py",
}


def test_no_module_is_a_fragment_of_another_in_its_room():
    importers: dict[Path, set[Path]] = {path: set() for path in FILES}
    for path in FILES:
        for module in module_imports(path):
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
    "exec": {"contrib/sandbox_child.py"},  # behind the walls of its process
    "run_path": set(),
    "run_module": {"launch/console.py"},  # modules of ours, from a table
    "get_class_from_dynamic_module": {"evals/subject.py"},  # allow_model_code decides
    "load_dataset": set(),
    "load_dataset_builder": {"sources/splits.py"},  # of a folder without its Python files: datasets 4 runs none
    "load_from_disk": set(),
    "pickle.load": set(),
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
    "render_jinja_template": {"tokenizer/chat.py", "tokenizer/custom_template.py"},  # bounded, in a sandbox
    "apply_chat_template": {"tokenizer/chat.py", "evals/chat.py"},
    "pipeline": set(),  # transformers' and diffusers' pipeline(...)
    "AutoConfig.from_pretrained": {"hub/isolated_load_test.py", "model/load.py", "plan/fit.py", "plan/plan.py"},
    "AutoModelForCausalLM.from_pretrained": {"hub/isolated_load_test.py"},
    "AutoPeftModelForCausalLM.from_pretrained": {"hub/isolated_load_test.py"},
    "AutoTokenizer.from_pretrained": {"contrib/export.py", "contrib/gguf.py", "hub/isolated_load_test.py", "tokenizer/load.py", "tokenizer/train.py"},
    "PreTrainedTokenizerFast.from_pretrained": {"tokenizer/train.py"},
    "model_class.from_pretrained": {"hub/isolated_load_test.py", "model/saved.py"},  # with what allow_model_code decided
}  # fmt: skip
# Files in which trust_remote_code may be another thing than False.
DECIDES_TRUST = {"model/load.py", "evals/subject.py", "hub/isolated_load_test.py"}


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Name of each call, with what stands before its last dot where that is a plain name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield "" if function.attr in ("eval", "exec") else function.attr, node  # model.eval() is another thing
                yield f"{ast.unparse(function.value)}.{function.attr}", node


STARTS_PROCESSES = {"process/commands.py", "launch/launcher.py", "plan/probe.py", "sweep.py", "contrib/sandbox.py"}


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
