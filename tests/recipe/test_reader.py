"""Every mistake in a recipe gets one clear line with file, line and cure, and its status."""

import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from pipeline.process.errors import DamagedFileError, InputMissingError, RecipeError
from pipeline.recipe import dump_recipe, read_recipe
from pipeline.recipe.identity import differences
from pipeline.recipe.keys import REMOVED
from pipeline.recipe.located_yaml import load_mapping
from pipeline.recipe.start_from import resolve_start
from tests.recipe.wrong_recipes import GOOD, OVERRIDES, WRONG, WRONG_BYTES, changed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def test_the_recipe_that_the_wrong_ones_are_made_from_is_right(folder):
    recipe = read_recipe([write(folder, GOOD)], stage="pretrain")
    assert recipe.train["max_steps"] == 100


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_refused_with_place_and_cure(folder, name):
    text, expected = WRONG[name]
    with pytest.raises(RecipeError) as error:
        read_recipe([write(folder, text)])
    message = str(error.value)
    assert len(message.splitlines()) == 1, message
    assert message.startswith("recipe.yaml:")
    for part in expected:
        assert part in message
    assert "hf_abc" not in message
    assert "secret-value" not in message


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file(folder):
    text = (
        changed("vocab_size: 512", "vocab_sise: 512").replace("n_layer: 2", "n_layer: two")
        + "  save_steps: 0\n  nope: 1\n"
    )
    with pytest.raises(RecipeError) as error:
        read_recipe([write(folder, text), "train.seed=x"])
    places = [line.split(": ")[0] for line in str(error.value).splitlines()]
    assert places == ["command line", "recipe.yaml:4", "recipe.yaml:11", "recipe.yaml:18", "recipe.yaml:19"]


def test_mistakes_of_an_extended_recipe_name_that_file_and_line(folder):
    write(folder, changed("max_steps: 100", "max_steps: 1.5"), "base.yaml")
    with pytest.raises(RecipeError) as error:
        read_recipe([write(folder, "extends: base.yaml\ntrain:\n  sede: 1\n")])
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == ["base.yaml:17", "recipe.yaml:3"]


@pytest.mark.parametrize(
    ("override", "expected"),
    OVERRIDES,
)
def test_a_wrong_override_is_refused(folder, override, expected):
    with pytest.raises(RecipeError) as error:
        read_recipe([write(folder, GOOD), override])
    assert expected in str(error.value)
    assert "hf_abc" not in str(error.value)


# What a run directory's recipe.yaml of an earlier version names, though nobody chose it
OF_AN_EARLIER_VERSION = """\
  average_weight: 0.6
  ema_nesterov: null
  ema_nesterov_steps: 100
  ema_nesterov_span:
    - 0.15
    - 0.75
  groups:
    matrices: {update_floor: null, row_floor: null, decay_fraction: null}
evals:
  core: {max_s: null}
  chat: {max_s: null}
"""


def test_keys_that_are_gone_are_read_at_the_default_that_they_had(folder):
    engine = changed("batch_tokens: 512", "batch_tokens: 512\n  engine: processes\n  keep_shards: null")
    before = engine.replace("type: muon_adamw\n", f"type: muon_adamw\n{OF_AN_EARLIER_VERSION}")
    assert dump_recipe(read_recipe([write(folder, before)])) == dump_recipe(read_recipe([write(folder, GOOD)]))
    extending = write(folder, f"extends: {write(folder, before, 'base.yaml')}\n")
    assert read_recipe([extending, "optimizer.average_steps=null"]).optimizer.type == "muon_adamw"


@pytest.mark.parametrize("name", REMOVED)
def test_keys_that_are_gone_are_refused_with_another_value(folder, name):
    with pytest.raises(RecipeError, match=f"^command line: {name}: is 0.5, and this version has no {REMOVED[name][1]}. Remove"):  # fmt: skip
        read_recipe([write(folder, GOOD), f"{name}=0.5"])


def test_keys_that_are_gone_are_no_difference_between_two_starts_of_a_run():
    assert differences({"data.engine": "processes", "optimizer.average_steps": None}, {}) == []
    assert differences({"data.engine": "ray"}, {}) == ['data.engine: "ray" -> null']


def test_a_key_that_came_later_is_at_its_default_in_a_run_begun_before():
    assert differences({}, {"samples.held_out": 0}) == []
    assert differences({}, {"samples.held_out": 3}) == ["samples.held_out: 0 -> 3"]


def test_a_large_file_is_refused_without_being_read(folder):
    with open("recipe.yaml", "wb") as file:
        file.truncate(300 << 20)
    tracemalloc.start()
    with pytest.raises(RecipeError, match=r"^recipe\.yaml: is larger than 1 MiB"):
        read_recipe(["recipe.yaml"])
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "a: " + "9" * 5000, "[1]", "a: 2024-99-99", "a: !!python/name:os.system x", "a: \xe9"],
)  # fmt: skip
def test_a_damaged_or_hostile_yaml_of_a_run_is_reported_plainly(folder, text):
    (folder / "recipe.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"^recipe\.yaml: is no YAML as it was written \("):
        load_mapping("recipe.yaml")


def test_anchors_aliases_and_merge_keys_of_users_are_read(folder):
    text = "x-common: &common\n  max_steps: 7\n  seed: 1\n" + GOOD.replace(
        "  max_steps: 100\n", "  <<: *common\n  seed: 2\n"
    )
    train = read_recipe([write(folder, text)]).train
    assert (train["max_steps"], train["seed"]) == (7, 2)
    assert load_mapping("recipe.yaml")["train"] == {"max_steps": 7, "seed": 2}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.directory=/data/exp #1", "directory", "/data/exp #1"),
        ("run.note=C# port #3", "note", "C# port #3"),
        ("run.note=fix: lr", "note", "fix: lr"),
        ("run.note=two\nlines", "note", "two\nlines"),
        ("run.note=[draft", "note", "[draft"),
        ("run.note=007", "note", "007"),
        ("run.note='quoted #1'", "note", "quoted #1"),
        ("run.note=null", "note", None),
        ("run.tags=[a, 'C #3']", "tags", ["a", "C #3"]),
        ("run.resume=5", "resume", 5),
    ],
)
def test_an_override_of_a_text_key_arrives_as_it_was_typed(folder, override, key, value):
    assert getattr(read_recipe([write(folder, GOOD), override]).run, key) == value


def test_missing_weights_are_named_by_the_key_in_the_recipe(folder):
    recipe = read_recipe([write(folder, changed("n_head: 4", "n_head: 4\n  start_from: /nowhere"))])
    with pytest.raises(
        InputMissingError, match=r"^recipe\.yaml:14: model\.start_from: there is no run or folder /nowhere\."
    ):
        resolve_start(recipe)


@pytest.mark.parametrize("entry", ["pretrain", "sft"])
def test_an_entry_without_arguments_prints_its_usage_with_status_64(folder, entry):
    done = subprocess.run([sys.executable, *COMMANDS[entry]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert done.stderr.startswith(f"usage: accelerate launch pipeline/{entry}.py RECIPE.yaml")
    assert not done.stdout


def test_an_override_given_twice_is_refused(folder):
    with pytest.raises(RecipeError, match=r"command line: train\.seed: is given twice"):
        read_recipe([write(folder, GOOD), "train.seed=1", "train.seed=2"])


def test_a_recipe_of_the_other_stage_names_the_right_command(folder):
    chat = changed("stage: pretrain", "stage: sft")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:2: run\.stage: .*Run: bash \S*run_sft\.sh recipe\.yaml"):
        read_recipe([write(folder, chat)], stage="pretrain")
    with pytest.raises(RecipeError, match=r"Run: bash \S*run_pretrain\.sh \S*recipes/quickstart_pretrain\.yaml$"):
        read_recipe(["quickstart_pretrain"], stage="sft")
    assert read_recipe([write(folder, changed("  stage: pretrain\n", ""))], stage="sft").run.stage == "sft"
    unsaid = changed("run:\n  stage: pretrain\n", "").replace(
        "files: texts/*.parquet", "files: x.jsonl\n      format: messages"
    )
    with pytest.raises(RecipeError, match=r"its sources hold conversations.*run_sft\.sh"):
        read_recipe([write(folder, unsaid)], stage="pretrain")
    with pytest.raises(RecipeError, match=r"run_pretrain\.sh recipe\.yaml"):
        read_recipe([write(folder, GOOD)], stage="sft")


def test_what_is_not_there_has_status_66(folder):
    for argv, expected in [
        (["missing.yaml"], "missing.yaml: there is no such recipe. In its folder: recipe.yaml. Shipped are: "),
        (["quickstart_pretrian"], "quickstart_pretrian: there is no such recipe. Did you mean quickstart_pretrain?"),
        (["."], r".: is a folder, not a recipe."),
        ([write(folder, "extends: gone.yaml\n" + GOOD)], "recipe.yaml:1: extends: gone.yaml does not exist."),
    ]:
        with pytest.raises(InputMissingError) as error:
            read_recipe(argv)
        assert expected in str(error.value)
        assert error.value.status == 66


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_recipe_without_read_permission_has_status_66(folder):
    (folder / write(folder, GOOD)).chmod(0)
    with pytest.raises(InputMissingError, match="cannot be read"):
        read_recipe(["recipe.yaml"])


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_a_file_that_is_no_text_is_refused_with_its_line(folder, name):
    content, expected = WRONG_BYTES[name]
    (folder / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as error:
        read_recipe(["recipe.yaml"])
    assert str(error.value).startswith("recipe.yaml:")
    assert expected in str(error.value)


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(folder):
    (folder / "recipe.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_recipe(["recipe.yaml"]).train["max_steps"] == 100


@pytest.mark.parametrize("argv", [[], ["--help"], ["train.max_steps=5"]])
def test_a_command_without_a_recipe_says_so(argv):
    with pytest.raises(RecipeError, match="command line: no recipe is named"):
        read_recipe(argv)


def test_a_wrong_recipe_is_refused_within_a_second_and_without_torch(folder):
    write(folder, GOOD + "  nope: 1\n")
    code = (
        "import sys\nfrom pipeline.recipe import read_recipe\n"
        "try: read_recipe(['recipe.yaml'])\nexcept Exception as error: print(error.status)\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy', 'datasets'}))\n"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)  # fmt: skip
        seconds.append(time.perf_counter() - started)
        assert done.stdout.split("\n")[:2] == ["64", "[]"]
    assert min(seconds) < 1


COMMANDS = {
    "pretrain": [str(ROOT / "pipeline" / "pretrain.py")],
    "sft": [str(ROOT / "pipeline" / "sft.py")],
    "preflight": ["-m", "pipeline.preflight"],
    "data": ["-m", "pipeline.data"],
    "tokenizer": ["-m", "pipeline.tokenizer"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_all_mistakes_with_status_64_and_no_traceback(folder, command):
    write(folder, changed("max_steps", "max_stepz").replace("n_layer: 2", "n_layer: two"))
    done = subprocess.run([sys.executable, *COMMANDS[command], "recipe.yaml", "train.seed=x"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 64, done.stderr
    lines = done.stderr.removeprefix("error: ").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["command line", "recipe.yaml:11", "recipe.yaml:17"]
