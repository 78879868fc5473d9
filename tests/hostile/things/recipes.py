"""Recipes of a stranger, which a user starts: what they name, where they write, and YAML that is no recipe."""

import os
from collections.abc import Callable

from tests.hostile.case import MARKING, Case
from tests.hostile.trial import Thing

DATA = "data in/r.yaml --show 1"
PREFLIGHT = "preflight in/r.yaml --probe 0"
PRETRAIN = "pretrain in/r.yaml"
TOKENIZER = "tokenizer in/r.yaml"
ALL = (DATA, PREFLIGHT, PRETRAIN, TOKENIZER)


def recipe(**sections: dict) -> Callable[[Case], None]:
    return lambda case: case.recipe(**sections)


def source(name: str, **more: object) -> Callable[[Case], None]:
    """A recipe with one source of these files."""
    return lambda case: case.recipe(data={"sources": [{"files": name.replace("FOLDER", str(case.folder)), **more}]})


def text(content: str) -> Callable[[Case], None]:
    def lay(case: Case) -> None:
        case.recipe()
        case.put("in/r.yaml", content.replace("FOLDER", str(case.folder)))

    return lay


def piped(case: Case) -> None:
    os.mkfifo(case.folder / "in" / "pipe.jsonl")
    source("FOLDER/in/pipe.jsonl")(case)


def linked_data(case: Case) -> None:
    (case.folder / "in" / "link.jsonl").symlink_to("/dev/zero")
    (case.folder / "in" / "circle.jsonl").symlink_to(case.folder / "in" / "circle.jsonl")
    source("FOLDER/in/*.jsonl")(case)


def folder_in_itself(case: Case) -> None:
    (case.folder / "in" / "deep").mkdir()
    (case.folder / "in" / "deep" / "again").symlink_to(case.folder / "in")
    source("FOLDER/in/**/*.jsonl")(case)


def extended(case: Case) -> None:
    case.put("in/r.yaml", "extends: r.yaml\nrun: {name: x}\n")


def extended_device(case: Case) -> None:
    case.put("in/r.yaml", "extends: /dev/zero\nrun: {name: x}\n")


BOMB = "x-a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"x-{n}: &{n} [{', '.join([f'*{p}'] * 10)}]\n" for p, n in zip("abcdefghi", "bcdefghij", strict=True))  # fmt: skip
FILES: dict[str, str] = {
    "a device without end": "/dev/zero",
    "a device of chance": "/dev/urandom",
    "the environment of the process": "/proc/self/environ",
    "the memory of the process": "/proc/self/mem",
    "all of /proc": "/proc/**/*",
    "the shell's words": "$(touch MARK)`touch MARK`;touch MARK|touch MARK",
    "a variable of the environment": "$HOME/../in/${HOSTILE}/*.jsonl",
    "a program": "|touch MARK",
    "an address of a file": "file:///etc/passwd",
    "an address on this machine": "http://169.254.169.254/latest/meta-data",
    "the passwords": "/etc/shadow",
    "a name with a zero byte": "a\0b",
    "a name of ESC": "\x1b]52;c;aGk=\x07.jsonl",
    "a glob that never ends": "/" + "*/" * 40 + "*",
}
TEXTS: dict[str, str] = {
    "of aliases of aliases": BOMB + "run: {note: *j}\n",
    "nested 20,000 deep": "run: " + "[" * 20_000,
    "nested 3,000 keys deep": "".join(" " * n + f"a{n}:\n" for n in range(3000)),
    "of tags of Python": "run: !!python/object/apply:os.system ['touch $MARK']\n",
    "of tags of Python that are new": "run: !!python/object/new:subprocess.Popen [['touch', '$MARK']]\n",
    "of an anchor that holds itself": "run: &a [*a]\n",
    "of zero bytes": "\0" * 1000,
    "of another encoding": "\ufeff\ud7ff\u2028run:\u2029",
    "of a number of 5,000 digits": "train: {max_steps: " + "9" * 5000 + "}\n",
    "of 10**5 documents": "--- {}\n" * 100_000,
    "of a key of ESC": 'run: {"\\e]52;c;aGk=\\a": 1, "\\x1b[2J": "\\x1b[31m"}\n',
    "of a merge of itself": "run: &a\n  <<: *a\n",
}
SECTIONS: dict[str, dict] = {
    "writes above": {"run": {"directory": "../../../../../../../../elsewhere", "name": "../../pwned"}},
    "names its run by a path": {"run": {"name": "../../../elsewhere/pwned"}},
    "names its run by a newline and ESC": {"run": {"name": "x\n\x1b[31m"}},
    "names a callback of os": {"run": {"callbacks": ["os:system"]}},
    "names a model type of os": {"model": {"type": "os:getcwd"}},
    "names an optimizer of builtins": {"optimizer": {"type": "builtins:exec"}},
    "names a format by a program": {"data": {"sources": [{"files": "in/popen.jsonl", "format": "subprocess:check_output"}]}},
    "names a program as a tracker": {"monitor": {"trackers": ["os:system"]}},
    "starts from a device": {"model": {"start_from": "/dev/zero"}},
    "takes its tokenizer from /proc": {"tokenizer": {"path": "/proc/self"}},
    "takes its template from a device": {"tokenizer": {"chat_template": "/dev/zero"}},
    "takes its template from the environment": {"tokenizer": {"chat_template": "/proc/self/environ"}},
    "splits by a pattern that tries all ways": {"tokenizer": {"split_pattern": "(a+|[a-z ]+)+$|(.*.*)*x"}},
    "splits by a pattern of 10**6 groups": {"tokenizer": {"split_pattern": "(" * 10_000 + "a" + ")" * 10_000}},
    "wants a vocabulary of 2**40": {"tokenizer": {"vocab_size": 2**40}},
    "wants 10**9 layers": {"model": {"n_layer": 10**9}},
    "wants rows of 2**40 tokens": {"data": {"row_tokens": 2**40, "batch_tokens": 2**41}},
    "wants 2**62 steps": {"train": {"max_steps": 2**62}},
    "wants a seed of 2**32": {"train": {"seed": 2**32}},
    "compiles by a name": {"train": {"torch_compile": True, "torch_compile_backend": "os:system"}},
    "trusts itself": {"run": {"trust_code": True, "callbacks": ["evil_installed:C"]}},
    "pushes to somebody": {"hub": {"id": "../../evil/x\n"}},
    "names deepspeed's file": {"train": {"deepspeed": "/dev/zero"}},
    "names a config of accelerate": {"train": {"accelerator_config": "/proc/self/environ"}},
    "names logging elsewhere": {"train": {"logging_dir": "../../elsewhere"}},
    "names an unknown dataset": {"data": {"sources": [{"id": "../../etc/passwd"}]}},
    "asks lm_eval for tasks of a folder": {"evals": {"tasks": ["lm_eval:../../elsewhere"]}},
}  # fmt: skip

THINGS: dict[str, Thing] = {}
for name, files in FILES.items():
    THINGS[f"files: {name}"] = Thing(lay=source(files), commands=(DATA, PRETRAIN))
for name, content in TEXTS.items():
    THINGS[f"YAML {name}"] = Thing(lay=text(content), commands=(DATA, PREFLIGHT, PRETRAIN))
for name, sections in SECTIONS.items():
    THINGS[f"a recipe that {name}"] = Thing(lay=recipe(**sections), commands=(PREFLIGHT, PRETRAIN))
THINGS |= {
    "a file without end": THINGS.pop("files: a device without end"),
    "files: a pipe": Thing(lay=piped, commands=(DATA, PRETRAIN)),
    "files: links to a device and to themselves": Thing(lay=linked_data, commands=(DATA, PRETRAIN)),
    "files: a folder that holds itself": Thing(lay=folder_in_itself, commands=(DATA,)),
    "a recipe that extends itself": Thing(lay=extended, commands=ALL),
    "a recipe that extends a device": Thing(lay=extended_device, commands=ALL),
    "a recipe beside modules named as libraries": Thing(lay=lambda case: ([case.put(f"in/{name}.py", MARKING) for name in ("torch", "json", "datasets", "sitecustomize", "conftest")], case.recipe()), commands=ALL),
}  # fmt: skip
