"""The one gate for code that is not this program's: `module:attr` names, and the code files of a model (`auto_map`).

Code runs unasked where the user named the place: a module next to the recipe of the command line, or in the working
folder for a name on the command line itself. All other code (an installed module, a run's own recipe, a model's
repository) runs only when the user trusts it. What runs is printed before it does, and recorded in the manifest.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.process.errors import RecipeError, Stopped, TandemError
from pipeline.process.storage import sha256_file

ENTRY_POINTS = "tandem"  # group in which an installed package names what recipes may use
INSTALLED = ("site-packages", "dist-packages")
COMMAND_TRUST = "--trust-code"
RECIPE_TRUST = "run.trust_code=true on the command line"

_ran: dict[str, dict[str, Any]] = {}  # by module:attr or model, in the order of this process
_files: dict[str, Path] = {}  # of the modules that were imported from a folder here


@dataclass(frozen=True)
class CodeFolder:
    """The folder that `module:attr` names may point into. path: the folder whose modules run unasked; None: no module
    does, for the reason `closed`.

    trusted: the user runs installed modules and a run's own code too. trust_with: how the user allows it.
    """

    path: str | None
    trusted: bool = False
    trust_with: str = RECIPE_TRUST
    closed: str = ""


def import_attribute(name: str, folder: CodeFolder | str | None, *, where: str = "") -> Any:
    """Return the object `module:attr`. folder: where it may be; a path means CodeFolder(path).

    Raises RecipeError for code that the user has not named or trusted, for a module that cannot be imported or ends the
    process, and for an object that is another module's.
    """
    code = folder if isinstance(folder, CodeFolder) else CodeFolder(folder)
    at = f"{where}: {name}" if where else name
    module_name, _, attribute = name.partition(":")
    # 1. May it run? A module of the code folder may; everything else only where the user trusts it.
    file = _file_of(module_name, code.path)
    if file is None and not code.trusted and not _is_entry_point(name):
        raise RecipeError(_refusal(at, module_name, code))
    if file is not None:
        _refuse_taken_name(at, module_name, file)
    # 2. Said before it runs, since it may do anything when it is imported.
    _announce(name, file or _installed(module_name))
    with importing(at), _first_on_path(code.path if file else None):
        module = importlib.import_module(module_name)
        if file is not None:
            _files[module_name] = file
        return _attribute(module, attribute, own=None if code.trusted or file is None else Path(str(code.path)))


def code_sum(function: Any, folder: CodeFolder | str | None) -> str:
    """Return a short hash of the file that defines the object, with those that it imports from the code folder, also
    in turn."""
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    file = Path(getattr(module, "__file__", None) or "")
    if not file.is_file():
        return ""
    root = folder.path if isinstance(folder, CodeFolder) else folder
    code = file.read_bytes()
    if module and module.__name__ in _files and root:
        file = file.resolve()
        files = {file}
        _add_imports(module.__name__, file, root, files)
        code += b"".join(other.read_bytes() for other in sorted(files - {file}))
    return hashlib.sha256(code).hexdigest()[:16]


def _add_imports(module_name: str, file: Path, folder: str, files: set[Path]) -> None:
    """Add the files of the folder that the module imports anywhere in its code, and what those import."""
    if file.suffix not in SOURCE_SUFFIXES:
        return
    package = module_name if file.stem == "__init__" else module_name.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package of this module, each further one the package around it
                start = package.split(".")[: 1 - node.level or None]
                base = ".".join(filter(None, [*start, node.module]))
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    # `import a.b` runs a/__init__.py too.
    for name in names:
        parents = name.split(".")
        for end in range(1, len(parents) + 1):
            other = _file_of(".".join(parents[:end]), folder)
            if other and other not in files:
                files.add(other)
                _add_imports(".".join(parents[:end]), other, folder, files)


def allow_model_code(config: dict[str, Any], path: str, *, known: bool, code: CodeFolder, where: str = "") -> bool:
    """Return what transformers gets as trust_remote_code for a model: whether its own code files are to be run.

    config: the content of its config.json. known: its model_type is one that needs no code files. Raises
    RecipeError for one that does and is not trusted.
    """
    classes = config.get("auto_map")
    if known or not classes:
        return False
    at = path
    if where and where != path:
        at = f"{where}: {path}"
    if not code.trusted:
        raise RecipeError(
            f"{at}: its model_type {config.get('model_type')!r} is known only to code files of its own, and code of a "
            f"model is not run unasked. Read them, then trust them with {code.trust_with}."
        )
    if isinstance(classes, dict):
        classes = ", ".join(map(str, classes.values()))
    files = sorted(Path(path).glob("*.py")) if Path(path).is_dir() else []
    sums = {file.name: sha256_file(file) for file in files}
    hashes = [f", {name} (sha256 {sum_[:12]})" for name, sum_ in sums.items()]
    _print_code(f"{classes} from {path}{''.join(hashes)}")
    only = next(iter(sums.values())) if len(sums) == 1 else None
    _ran[path] = {"name": str(classes), "file": path, "sha256": only}
    return True


def allow_task_folder(folder: str, *, code: CodeFolder, where: str) -> None:
    """Let lm_eval read a folder of tasks: their `!function` and their templates, which no sandbox renders, are code.

    Raises RecipeError where it is not trusted.
    """
    if not code.trusted:
        raise RecipeError(
            f"{where} {folder}: the task files of lm_eval are code (`!function`, templates), and code of a folder is "
            f"not run unasked. Read them, then trust them with {code.trust_with}."
        )
    _print_code(f"tasks of lm_eval from {folder}")
    _ran[folder] = {"name": "lm_eval tasks", "file": folder, "sha256": None}


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Turn what code does at its import into a RecipeError, also to end the process."""
    with guarded(name, doing="cannot be imported"):
        yield


@contextmanager
def guarded(name: str, *, doing: str = "cannot be used") -> Iterator[None]:
    """Turn whatever user's code raises, also to end the process, into a RecipeError. Ctrl-C and our own errors
    pass."""
    try:
        yield
    except (TandemError, KeyboardInterrupt, Stopped):
        raise
    except SystemExit as error:
        status = "" if error.code is None else repr(error.code)
        raise RecipeError(
            f"{name} {doing} (it ends the program with SystemExit({status})). Remove that call."
        ) from error
    except BaseException as error:  # it may raise anything, and a run that ends must say why
        raise RecipeError(
            f"{name} {doing} ({reason_of(error)}). Correct it, or name another one beside the recipe."
        ) from error


def ran() -> list[dict[str, Any]]:
    """Return what this process ran of the user's code: name, file, sha256."""
    return list(_ran.values())


def reason_of(error: BaseException) -> str:
    """Return why an object could not be imported; the kind of what its module itself raised, whose text may say
    little."""
    has_reason = isinstance(error, ImportError | AttributeError | TypeError | ValueError | RecipeError)
    if has_reason and not isinstance(error, SyntaxError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _file_of(module_name: str, folder: str | None) -> Path | None:
    """Return the module's file in the folder. None for one that is not there, or leads out of it by a link or into
    installed packages."""
    parts = module_name.split(".")
    if folder is None or not all(part.isidentifier() for part in parts) or parts[0] == "pipeline":
        return None
    base, root = Path(folder, *parts), Path(folder).resolve()
    suffixes = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
    for file in [base / "__init__.py", *(base.with_name(base.name + suffix) for suffix in suffixes)]:
        if file.is_file():
            real = file.resolve()
            inside = real.is_relative_to(root) and not set(real.relative_to(root).parts) & set(INSTALLED)
            return real if inside else None
    return None


def _is_entry_point(name: str) -> bool:
    return any(point.value == name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))


def _refusal(at: str, module_name: str, code: CodeFolder) -> str:
    if code.path is None:
        why = code.closed or "it was named by no recipe of the command line"
        return f"{at} is code and is not run: {why}. Read it, then trust it with {code.trust_with}."
    return (
        f"{at} cannot be imported (there is no module {module_name} in the folder {code.path}, where code runs "
        f"unasked). Put the module there; for an installed one add {code.trust_with}."
    )


def _refuse_taken_name(at: str, module_name: str, file: Path) -> None:
    """Refuse a name that is taken: a module is imported once by it, and the other one would be used instead of the
    file."""
    for name in dict.fromkeys((module_name.partition(".")[0], module_name)):
        loaded = sys.modules.get(name)
        if loaded is None or _holds(loaded, file):
            continue
        if name not in _files:
            raise RecipeError(
                f"{at} cannot be imported ({name} is the name of another module, which is loaded). Rename {file.name}."
            )
        del sys.modules[name]  # it came from another recipe's folder


def _holds(loaded: ModuleType, file: Path) -> bool:
    packages = [Path(place).resolve() for place in getattr(loaded, "__path__", [])]
    return _origin(loaded) == file or any(file.is_relative_to(package) for package in packages)


def _origin(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path else None


def _installed(module_name: str) -> Path | None:
    """Return where an installed module's top package is; nothing of it is run for that."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module_name.partition(".")[0])
        if spec and spec.has_location and spec.origin:
            return Path(spec.origin)
    return None


def _attribute(module: ModuleType, attribute: str, *, own: Path | None) -> Any:
    """Return the object. own: the folder whose code it must be; what a module imported from elsewhere is not its
    own."""
    found: Any = module
    for part in attribute.split("."):
        if own is not None and (part.startswith("__") or (found is not module and isinstance(found, ModuleType))):
            raise AttributeError(f"{attribute} is not the module's own")
        found = getattr(found, part)
    if own is None:
        return found
    if isinstance(found, ModuleType):
        raise AttributeError(f"{attribute} is a module")
    if inspect.isroutine(found) or inspect.isclass(found):
        home = inspect.unwrap(found) if inspect.isfunction(found) else found
        defined = sys.modules.get(getattr(home, "__module__", None) or "")
        origin = _origin(defined) if defined else None
        if origin is None or not origin.is_relative_to(own.resolve()):
            raise AttributeError(
                f"{attribute} is defined in {getattr(home, '__module__', None) or 'no module'}, which does not lie "
                f"beside the recipe; an installed one needs {RECIPE_TRUST} or {COMMAND_TRUST}"
            )
    return found


def _announce(name: str, file: Path | None) -> None:
    if name in _ran and _ran[name]["file"] == str(file):
        return
    sha256 = sha256_file(file) if file is not None and file.is_file() else None
    _ran[name] = {"name": name, "file": str(file), "sha256": sha256}
    if file is None:
        _print_code(f"{name}, an installed module")
        return
    digest = f" (sha256 {sha256[:12]})" if sha256 else ""
    _print_code(f"{file.name}:{name.partition(':')[2]} from {file.parent}{digest}")


def _print_code(text: str) -> None:
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"running your code: {text}", file=sys.stderr, flush=True)


@contextmanager
def _first_on_path(folder: str | None) -> Iterator[None]:
    """Put the folder first on the path while its module is imported, whose neighbours it imports; last from then on,
    where it hides no library."""
    if folder is None:
        yield
        return
    place = str(Path(folder).resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)
