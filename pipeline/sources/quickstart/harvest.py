"""Docstrings and descriptions of installed distributions, read from their files without importing anything.

Run as `python -m pipeline.sources.quickstart.harvest OUT PART PARTS`, it writes every PARTS-th file's prose to OUT: the
work is shared between processes that hold nothing but this.
"""

import ast
import importlib.metadata
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.sources.quickstart.prose import prose_lines

# What pyproject.toml's dependencies bring in on every platform. Left out: torch, whose files differ between builds; psutil,
# hf-xet and others whose files differ between systems; packages without prose.
DISTRIBUTIONS = (
    "absl-py",
    "accelerate",
    "aiohttp",
    "anyio",
    "attrs",
    "charset-normalizer",
    "click",
    "cwevals",
    "datasets",
    "dill",
    "evaluate",
    "filelock",
    "frozenlist",
    "fsspec",
    "grpcio",
    "h11",
    "httpcore",
    "httpx",
    "huggingface-hub",
    "jinja2",
    "markdown",
    "markdown-it-py",
    "mpmath",
    "multidict",
    "networkx",
    "numpy",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "packaging",
    "pandas",
    "pillow",
    "platformdirs",
    "propcache",
    "protobuf",
    "pyarrow",
    "pydantic",
    "pydantic-core",
    "pygments",
    "python-dateutil",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "sympy",
    "tensorboard",
    "tokenizers",
    "tqdm",
    "transformers",
    "typer",
    "typing-extensions",
    "urllib3",
    "wandb",
    "werkzeug",
    "yarl",
)
TESTS = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendor|vendored|_vendored|third_party|benchmarks?|examples)/|/(test|modular)_[^/]*$|_test\.py$|(^|/)conftest\.py$|_pb2(_grpc)?\.pyi?$"
)


@dataclass
class Described:
    """One documented thing: name is dotted, kind module, class, function or attribute.

    module: where it is imported from. parameters: of a function, without self and cls; a plain default stands behind its
    name, any other is left open as `...`. returns: the annotation.
    """

    name: str
    kind: str
    lines: Sequence[str]
    module: str = ""
    parameters: Sequence[str] = ()
    returns: str = ""


@dataclass
class SourceDocument:
    """The prose of one source file. path: distribution and path in it, the same on every machine."""

    path: str
    things: list[Described]


def documented_files() -> list[tuple[str, importlib.metadata.PackagePath | None]]:
    """(distribution/path, file) of every file that is read, sorted; the description of a distribution has no file."""
    found: list[tuple[str, importlib.metadata.PackagePath | None]] = []
    for name in DISTRIBUTIONS:
        distribution = importlib.metadata.distribution(name)
        found.append((f"{name}/METADATA", None))
        for path in distribution.files or []:
            text = path.as_posix()
            if text.endswith(".py") and not text.startswith("..") and not TESTS.search(text):
                found.append((f"{name}/{text}", path))
    return sorted(found, key=lambda pair: pair[0])


def document(label: str, path: importlib.metadata.PackagePath | None) -> SourceDocument | None:
    """What one file documents, or None when it is nothing."""
    if path is None:
        payload = importlib.metadata.metadata(label.split("/")[0]).get_payload()  # type: ignore[attr-defined]
        lines = prose_lines(payload) if isinstance(payload, str) else ()
        things = [Described(label.split("/")[0], "module", lines)] if lines else ()
    else:
        content = Path(str(path.locate())).read_bytes()
        if b'"""' not in content and b"'''" not in content:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Invalid escapes in other people's strings.
                tree = ast.parse(content)
        except (SyntaxError, ValueError):
            return None
        module = path.as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        things = list(_described(tree, module))
    return SourceDocument(label, things) if things else None


def _described(tree: ast.Module, module: str) -> Iterator[Described]:
    stack: list[tuple[ast.AST, str]] = [(tree, module)]
    while stack:
        node, name = stack.pop()
        text = ast.get_docstring(node, clean=False)  # type: ignore[arg-type]
        if text and len(text) > 20:
            lines = prose_lines(text)
            if lines:
                yield _thing(node, name, lines, module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        statements = list(_statements(node))
        yield from _written_apart(statements[1 if text else 0 :], name, module)
        inner = [
            child for child in statements if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        stack += [(child, f"{name}.{child.name}") for child in reversed(inner)]


def _written_apart(statements: list[ast.AST], name: str, module: str) -> Iterator[Described]:
    """Documentation that is no docstring: strings below attributes, templates of docstrings, and numpy's add_newdoc."""
    attribute = ""
    for node in statements:
        texts: Sequence[ast.expr] = ()
        if isinstance(node, ast.Expr):
            texts = (
                node.value.args[1:] if isinstance(node.value, ast.Call) and _is_add_newdoc(node.value) else [node.value]
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            attribute = target.id if isinstance(target, ast.Name) else ""
            texts = [node.value] if node.value else ()
        for text in texts:
            if (
                isinstance(text, ast.Constant)
                and isinstance(text.value, str)
                and len(text.value) > (20 if isinstance(node, ast.Expr) else 200)
            ):
                lines = prose_lines(text.value)
                if lines:
                    yield Described(f"{name}.{attribute}", "attribute", lines, module)


def _is_add_newdoc(call: ast.Call) -> bool:
    return (call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")) == "add_newdoc"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _statements(child)
            yield from getattr(child, "orelse", ())
        else:
            yield child


def _thing(node: ast.AST, name: str, lines: Sequence[str], module: str) -> Described:
    if isinstance(node, ast.Module):
        return Described(name, "module", lines, module)
    if isinstance(node, ast.ClassDef):
        return Described(name, "class", lines, module)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    plain = isinstance(node.returns, ast.Name | ast.Attribute | ast.Constant | ast.Subscript)
    returns = ast.unparse(node.returns).strip("'") if plain and node.returns else ""
    return Described(name, "function", lines, module, parameters_of(node.args), returns)


def parameters_of(arguments: ast.arguments) -> list[str]:
    """`a`, `b=None`, `*args`, `c=...`, as they would be written, without annotations."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)]
    if found and found[0] in ("self", "cls"):
        found.pop(0)
    found += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    found += [
        _parameter(argument.arg, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _parameter(name: str, default: ast.expr | None) -> str:
    if default is None:
        return name
    plain = isinstance(default, ast.Constant) and isinstance(default.value, bool | int | float | str | None)
    return f"{name}={ast.literal_eval(default)!r}" if plain else f"{name}=..."


def main(out: str, part: int, parts: int) -> None:
    parent = os.getppid()
    with open(out, "w", encoding="utf-8") as file:
        for number, (label, path) in enumerate(documented_files()):
            if os.getppid() != parent:  # killed: nobody will read this
                return
            if number % parts == part:
                found = document(label, path)
                if found:
                    file.write(
                        json.dumps(
                            {"number": number, "path": found.path, "things": [vars(thing) for thing in found.things]}
                        )
                        + "\n"
                    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
