"""Generated recipes (mutated text, and trees of known keys with odd values) and overrides, through all that is checked before data are prepared."""

import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from pipeline.recipe import read_recipe
from pipeline.recipe.keys import all_keys, key_at
from pipeline.recipe.schema import ARGUMENTS, alternatives
from pipeline.recipe.start_from import resolve_start
from pipeline.run.checks import check_before_training
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import build_arguments
from tests.hostile import random_inputs as st
from tests.hostile.generated import Kind

ROOT = Path(__file__).parents[2]
GOOD = """\
run:
  stage: pretrain
tokenizer:
  vocab_size: 512
data:
  sources:
    - files: texts/*.jsonl
  row_tokens: 64
  batch_tokens: 512
model:
  n_layer: 2
  n_embd: 32
  n_head: 4
optimizer:
  type: muon_adamw
train:
  max_steps: 100
  use_cpu: true
"""
CHAT = GOOD.replace("pretrain", "sft").replace("texts/*.jsonl", "chat.jsonl").replace("muon_adamw", "trainer")
# The built-in data take a minute to make: files stand for them, and `prepare`'s own base for the recipes that have them.
SHIPPED = [
    re.sub(
        r"extends: .*",
        "extends: base.yaml",
        re.sub(r"id: tandem:.*", "files: texts/*.jsonl", path.read_text(encoding="utf-8")),
    )
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
]
# Those that are refused whatever their value are few among them.
KEYS = sorted(
    {path for paths in all_keys().values() for path in paths} | {f"train.{name}" for name in list(ARGUMENTS)[::8]}
)

# Values that people and programs write by mistake, or somebody on purpose.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, 10**308, 0.0, 0.5, -0.5, 1e-9, 1e-320, 1e300, 1.5, 3e-4,
    float("inf"), float("-inf"), float("nan"), "", " ", "auto", "never", "no", "yes", "null", "None", "1", "1e9", "3e-4", "10%", "1,000", "0x10", "2B", "cpu", "cuda",
    "bfloat16", "linear", "cosine", "steps", "epoch", "adamw_torch", "sgd", "schedule_free_adamw", "inductor", "max-autotune", "fastest", "gpt2", "llama", "nanochat",
    "tandem", "modern", "mixtral", "os:getcwd", "json:loads", "mine:Thing", "a:b", ":", "a:", "x" * 300, "\x00", "a\x00b", "\x07", "a\nb", "a\tb", "\u00b2", "\u0430",
    "\ud7ff", "\u202e", "\U0001f600", "..", ".", "/", "/proc/nowhere", "/dev/null", "~", "~nobody", "texts", "texts/*.jsonl", "texts/a.jsonl", "texts/a.jsonl/below", "chat.jsonl", "{run}",
    "latest:recipe", "latest:", "runs/x@5", "a@1", "a@\u00b2", "*.jsonl", "**/*", "[a", "http://h/x", "C# port #3", "fix: lr", "(", "(a+)+$", "[[:alpha:]]", "a=1,b=2", "a=1,b", "=", "lr=oops",
    [], [1], [None], ["a"], [[]], [1, 2], [0, 1], [0.9, 0.95], ["auto"], [{}], {}, {"a": 1}, {"files": "texts/*.jsonl"}, [{"files": "texts/*.jsonl"}],
    {"text": "text"}, {"": 1}, {"a": {"b": [1]}}, {"min_lr_rate": 0.1}, {"num_cycles": "x"}, {"use_reentrant": False}, {"every_n_layers": 0}, {"split_batches": True}, {"nope": 1},
]  # fmt: skip
NAMES = [
    "a",
    "max_steps",
    "files",
    "0",
    "\u00b2",
    "train",
    "\u0430",
    "",
    " ",
    "<<",
    "x-",
    "m\u0430x_steps",
    "sources",
    "-1",
    "99",
    "1.5",
    "null",
    "\x7f",
    "k" * 5000,
]


def numbers() -> st.Strategy:
    return st.one_of(st.integers(-10, 10_000), st.integers(), st.floats(), st.floats(0, 1))


@functools.cache
def values() -> st.Strategy:
    """Odd values, plain ones, and trees of them."""
    leaves = st.one_of(st.sampled_from(ODD), numbers(), st.text(max_size=20))
    trees = leaves
    for _ in range(3):
        trees = st.one_of(
            leaves, st.lists(trees, max_size=3), st.dictionaries(st.sampled_from(NAMES), trees, max_size=3)
        )
    return st.one_of(leaves, leaves, leaves, trees)


@functools.cache
def fitting(key: str) -> st.Strategy:
    """Values of the key's own types, so that many recipes are taken and looked at further on."""
    kinds = {
        bool: st.booleans(),
        int: st.one_of(st.integers(1, 100), st.sampled_from([0, 1, 2, 2**20, 2**31, 2**32, 2**53])),
        float: st.one_of(st.floats(0, 1), st.floats(0, 1e4), st.sampled_from([0.0, 1e-9, 1e-300, 1e9, 1e300])),
        str: st.sampled_from([word for word in ODD if isinstance(word, str)]),
        type(None): st.none(),
    }
    found = []
    for option in alternatives(key_at(key)[0]):
        if get_origin(option) is Literal:
            found.append(st.sampled_from(get_args(option)))
        elif get_origin(option) is list and get_args(option)[0] in kinds:
            found.append(st.lists(kinds[get_args(option)[0]], max_size=3))
        elif option in kinds:
            found.append(kinds[option])
    return st.one_of(found) if found else values()


@st.composite
def settings_of_keys(draw: Callable, *, most: int) -> list[tuple[str, Any]]:
    """Known keys, each with a value; rarely several, and mostly of their types: else nothing would be taken."""
    count = draw(st.sampled_from([1, 1, 1, 2, most]))
    found = []
    for _ in range(count):
        key = draw(st.sampled_from(KEYS))
        found.append((key, draw(fitting(key) if draw(st.integers(0, 2)) else values())))
    return found


@st.composite
def trees(draw: Callable) -> str:
    """A right recipe with some keys set to something else."""
    tree = yaml.safe_load(draw(st.sampled_from([GOOD, GOOD, CHAT])))
    for key, value in draw(settings_of_keys(most=5)):
        _put(tree, key.split("."), value)
    if draw(st.integers(0, 19)) == 0:
        _put(tree, [draw(st.sampled_from(NAMES)) for _ in range(draw(st.integers(1, 3)))], draw(values()))
    return json.dumps(tree, ensure_ascii=draw(st.booleans())) if draw(st.booleans()) else _dumped(tree)


def _dumped(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _put(tree: Any, parts: list[str], value: Any) -> None:
    for part, following in pairwise(parts):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else {}
        else:
            tree = tree.setdefault(part, [{}] if following == "0" else {})
        if not isinstance(tree, (dict, list)):
            return
    if isinstance(tree, dict):
        tree[parts[-1]] = value
    elif parts[-1].isdecimal() and int(parts[-1]) < len(tree):
        tree[int(parts[-1])] = value


@st.composite
def mutated(draw: Callable) -> str:
    """The text of a right recipe after some slips of the hand."""
    lines = draw(st.sampled_from([GOOD, CHAT, *SHIPPED])).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(0, len(lines) - 1)) if lines else 0
        line = lines[number] if lines else ""
        place = draw(st.integers(0, len(line)))
        slip = draw(st.integers(0, 9))
        if slip == 0:
            lines[number : number + 1] = []
        elif slip == 1:
            lines[number:number] = [draw(st.sampled_from(lines or [""]))]
        elif slip == 2:
            lines = lines[: number + 1]
        elif slip == 3:
            lines[number : number + 1] = [draw(st.sampled_from([" ", "  ", "\t", "- ", "? ", "&a ", "*a ", "<<: ", "!!set ", "--- ", "{", "[" * 500])) + line]  # fmt: skip
        elif slip == 4:
            lines[number : number + 1] = [line.lstrip()]
        elif slip == 5:
            lines[number : number + 1] = [line[:place] + draw(st.text(max_size=3)) + line[place:]]
        elif slip == 6:
            lines[number : number + 1] = [line[:place] + line[place + 1 :]]
        elif slip == 7:
            lines[number : number + 1] = [line[:place] + draw(st.sampled_from(":#-[]{}'\"&*!|>%@`,\x00\ufeff\u2028\x85\r0")) + line[place + 1 :]]  # fmt: skip
        else:
            key, colon, _ = line.partition(": ")
            lines[number : number + 1] = [f"{key}{colon}{json.dumps(draw(values()))}"]
    return "\n".join(lines) + "\n"


@st.composite
def overrides(draw: Callable) -> list[str]:
    """Words of a command line behind a right recipe."""
    words = []
    for key, value in draw(settings_of_keys(most=4)):
        name = key
        if draw(st.integers(0, 19)) == 0:
            name = ".".join([*key.split(".")[: draw(st.integers(0, 3))], draw(st.sampled_from(NAMES))])
        text = value if isinstance(value, str) else json.dumps(value)
        form = draw(st.integers(0, 19))
        words.append(
            {0: name, 1: f"--{name}={text}", 2: f"{name}={draw(st.text(max_size=30))}"}.get(form, f"{name}={text}")
        )
    return words


def prepare(folder: Path) -> None:
    """Texts and conversations, so that what is right goes on to the checks behind the reading."""
    (folder / "texts").mkdir()
    (folder / "base.yaml").write_text(GOOD)
    for name in ("a", "b"):
        (folder / "texts" / f"{name}.jsonl").write_text(f'{{"text": "the text {name} of a file"}}\n' * 300)
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 300)


def _recipe(text: str) -> None:
    Path("recipe.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    _check(["recipe.yaml"])


def _overrides(words: list[str]) -> None:
    Path("recipe.yaml").write_text(GOOD)
    _check(["recipe.yaml", *words])


def _check(argv: list[str]) -> None:
    """What the stages do before they prepare data."""
    recipe = resolve_start(read_recipe(argv, earlier=EarlierRuns()))
    recipe = check_before_training(recipe, processes=1)
    if "max_steps" in recipe.train:  # else the data say it
        build_arguments(recipe, RunDirectory(Path(recipe.run.directory) / str(recipe.run.name)))


RECIPES = Kind(inputs=st.one_of(mutated(), trees()), put_in=_recipe, prepare=prepare)
OVERRIDES = Kind(inputs=overrides(), put_in=_overrides, prepare=prepare)
