"""Every mistake in a recipe gets one clear line with file, line and cure, and its status."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.recipe import read_recipe

ROOT = Path(__file__).parents[2]
GOOD = """\
run:
  stage: pretrain
tokenizer:
  vocab_size: 512
data:
  sources:
    - files: texts/*.parquet
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
"""


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


# what the file says, and all that the message must hold after `recipe.yaml:`
WRONG = {
    "a key with a typo": (changed("max_steps", "max_stepz"), ["17: train.max_stepz: unknown key. Did you mean train.max_steps?"]),
    "a key with a typo in a section": (changed("vocab_size", "vocab_sise"), ["4: tokenizer.vocab_sise: unknown key. Did you mean tokenizer.vocab_size?"]),
    "a section with a typo": (changed("tokenizer:", "tokeniser:"), ["3: tokeniser: unknown key. Did you mean tokenizer?"]),
    "a key of another section": (changed("  n_layer: 2", "  n_layer: 2\n  row_tokens: 64"), ["12: model.row_tokens: unknown key here; it belongs to another section. Write it as data.row_tokens."]),
    "a train key at the top": (GOOD + "eval_steps: 5\n", ["18: eval_steps: unknown key here; it belongs to another section. Write it as train.eval_steps."]),
    "a removed name": (GOOD + "  warmup_ratio: 0.1\n", ["18: train.warmup_ratio: is not a key here. Use train.warmup_steps"]),
    "a renamed name": (GOOD + "  evaluation_strategy: steps\n", ["18: train.evaluation_strategy: is not a key here. Use train.eval_strategy."]),
    "torch_dtype": (GOOD + "  torch_dtype: bfloat16\n", ["18: train.torch_dtype: is not a key here:", "train.bf16"]),
    "overwrite_output_dir": (GOOD + "  overwrite_output_dir: true\n", ["18: train.overwrite_output_dir: is not a key here:", "run.resume"]),
    "a field that is ours": (GOOD + "  output_dir: out\n", ["18: train.output_dir: is set by run.directory and run.name."]),
    "report_to": (GOOD + "  report_to: wandb\n", ["18: train.report_to: is set by monitor.trackers."]),
    "data_seed": (GOOD + "  data_seed: no\n", ["18: train.data_seed: is set by train.seed."]),
    "a refused field": (GOOD + "  auto_find_batch_size: true\n", ["18: train.auto_find_batch_size: is refused: it changes the global batch"]),
    "a default that must stay": (GOOD + "  logging_nan_inf_filter: true\n", ["18: train.logging_nan_inf_filter: is true and must stay false:"]),
    "text for a boolean": (GOOD + '  bf16: "false"\n', ["18: train.bf16: is the text 'false'; it must be true or false or auto. Write true or false without quotes."]),
    "off for a boolean": (GOOD + "  fp16: off\n", ["18: train.fp16: is the text 'off'; it must be true or false."]),
    "a fraction for a count": (changed("100", "1000.5"), ["17: train.max_steps: is 1000.5; it must be a whole number. Write 1000."]),
    "a quoted number": (changed("100", '"100"'), ["17: train.max_steps: is the text '100'; it must be a whole number. Write the number without quotes."]),
    "a boolean for a number": (GOOD + "  seed: true\n", ["18: train.seed: is true; it must be a whole number."]),
    "a word for a number": (GOOD + "  eval_steps: often\n", ["18: train.eval_steps: is the text 'often'; it must be a whole number."]),
    "null for a number": (GOOD + "  seed:\n", ["18: train.seed: is null; it must be a whole number."]),
    "a number that is none": (GOOD + "  max_grad_norm: .nan\n", ["18: train.max_grad_norm: is nan; it must be a number."]),
    "save_steps zero": (GOOD + "  save_steps: 0\n", ["18: train.save_steps: is 0; it must be at least 1."]),
    "a negative rate": (changed("type: muon_adamw", "type: trainer") + "  learning_rate: -1\n", ["18: train.learning_rate: is -1; it must be at least 0."]),
    "a micro-batch of nothing": (GOOD + "  per_device_train_batch_size: 0\n", ["18: train.per_device_train_batch_size: is 0; it must be at least 1."]),
    "accumulation of nothing": (changed("  batch_tokens: 512\n", "") + "  gradient_accumulation_steps: 0\n", ["17: train.gradient_accumulation_steps: is 0; it must be at least 1."]),
    "an unknown choice": (changed("batch_tokens: 512", "batch_tokens: 512\n  packing: cut_and_fill"), ["10: data.packing: is the text 'cut_and_fill'; it must be cut_and_fit | best_fit_crop | concat. Did you mean cut_and_fit?"]),
    "an unknown scheduler": (changed("type: muon_adamw", "type: trainer") + "  lr_scheduler_type: cosin\n", ["18: train.lr_scheduler_type: is the text 'cosin'", "Did you mean cosine?"]),
    "text for a list": (GOOD + "monitor:\n  trackers: wandb\n", ["19: monitor.trackers: is the text 'wandb'", "Write it as a list: [a, b]."]),
    "a list for a section": (changed("data:\n  sources:\n    - files: texts/*.parquet\n  row_tokens: 64\n  batch_tokens: 512\n", "data:\n  - 1\n"), ["5: data: holds a list; it must be keys with values."]),
    "a key given twice": (GOOD + "  max_steps: 200\n", ["18: max_steps: is given twice, here and at", ":17. Remove one of them."]),
    "a section given twice": (GOOD + "data: {}\n", ["18: data: is given twice, here and at", ":5."]),
    "an unknown option": (changed("n_head: 4", "n_head: 4\n  options: {final_logit_softcap: 15}"), ["14: model.options.final_logit_softcap: unknown key. Did you mean model.options.final_logit_softcapping?"]),
    "a size among the options": (changed("n_head: 4", "n_head: 4\n  options: {n_inner: 64}"), ["14: model.options.n_inner: is no option. It is set by model.n_inner."]),
    "a token": (GOOD + "hub:\n  id: hf_abcdefghijklmnopqrstuv\n", ["19: holds a token or password. Remove it, and set HF_TOKEN"]),
    "a key for a token": (GOOD + "  hub_token: secret-value\n", ["18: hub_token: a secret never stands in a recipe."]),
    "an API key": (GOOD + "monitor:\n  api_key: secret-value\n", ["19: api_key: a secret never stands in a recipe."]),
    "two horizons": (GOOD + "  num_train_epochs: 1\n", ["17: train.max_steps: is a second horizon beside train.num_train_epochs", ":18). Keep exactly one."]),
    "no horizon": (changed("  max_steps: 100\n", "  seed: 1\n"), [" train: says nothing on how long to train. Give one of train.max_steps"]),
    "less than a step": (changed("  max_steps: 100\n", "  seed: 1\n").replace("stage: pretrain", "stage: pretrain\n  tokens: 100"), ["3: run.tokens: is less than one step of 512 tokens"]),
    "batch and accumulation": (GOOD + "  gradient_accumulation_steps: 2\n", ["9: data.batch_tokens: stands beside train.gradient_accumulation_steps"]),
    "no batch": (changed("  batch_tokens: 512\n", ""), [" data.batch_tokens: is missing"]),
    "a batch of broken rows": (changed("512\nmodel", "500\nmodel"), ["9: data.batch_tokens: is 500, not a multiple of data.row_tokens (64): a step is whole rows. Write 448 or 512."]),
    "heads that do not divide the width": (changed("n_head: 4", "n_head: 5"), ["12: model.n_embd: is 32, not a multiple of model.n_head (5). Write 30 or 35"]),
    "grouped heads that do not divide": (changed("n_head: 4", "n_head: 4\n  n_kv_head: 3"), ["14: model.n_kv_head: is 3 and does not divide model.n_head (4)."]),
    "odd heads under rope": (changed("n_embd: 32\n  n_head: 4", "n_embd: 36\n  n_head: 4\n  preset: modern"), ["13: model.n_head: gives heads of 9 channels, and rope turns pairs."]),
    "rows longer than the positions": (changed("n_head: 4", "n_head: 4\n  n_positions: 32"), ["8: data.row_tokens: is 64, more than model.n_positions (32)."]),
    "a width that the dial cannot divide": (changed("n_layer: 2\n  n_embd: 32\n  n_head: 4", "depth: 2\n  n_embd: 200"), ["12: model.n_embd: is 200, not a multiple of model.head_dim (128), so model.depth cannot set the heads."]),
    "rates by a batch that is not known": (changed("n_layer: 2\n  n_embd: 32\n  n_head: 4", "depth: 2").replace("  batch_tokens: 512\n", "") + "  gradient_accumulation_steps: 2\n", ["15: train.gradient_accumulation_steps: leaves the batch to the number of processes"]),
    "an absurd depth": (changed("n_layer: 2", "n_layer: 99999999999"), ["11: model.n_layer: is 99999999999; it must be at least 1 and at most 1000."]),
    "a number beyond 64 bits": (changed("100", "99999999999999999999"), ["17: train.max_steps: is 99999999999999999999; it must be a whole number."]),
    "a control character": (GOOD + "# \x07\n", ["18: holds the control character U+0007. Remove it."]),
    "no sizes": (changed("  n_layer: 2\n  n_embd: 32\n  n_head: 4\n", "  preset: modern\n"), [" model: model.n_layer and model.n_embd and model.n_head missing."]),
    "a wrong window pattern": (changed("n_head: 4", "n_head: 4\n  options: {window_pattern: SSX}"), ["14: model.options.window_pattern: is 'SSX'; it must be letters S (sliding) and L (full)"]),
    "a warm-up longer than the run": (changed("type: muon_adamw", "type: muon_adamw\n  schedule: {warmup_steps: 400}"), ["16: optimizer.schedule.warmup_steps: is 400, longer than the run of 100 steps"]),
    "a trainer's warm-up longer than the run": (changed("type: muon_adamw", "type: trainer") + "  warmup_steps: 400\n", ["18: train.warmup_steps: is 400, longer than the run of 100 steps"]),
    "groups beside the trainer's optimizer": (changed("type: muon_adamw", "type: trainer\n  groups: {head: {learning_rate: 0.1}}"), ["16: optimizer.groups.head.learning_rate: is not used by optimizer.type trainer"]),
    "a trainer's rate beside groups": (GOOD + "  learning_rate: 3e-4\n", ["18: train.learning_rate: is not used by optimizer.type muon_adamw. Use optimizer.groups.<group>.learning_rate"]),
    "betas of Muon's matrices": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {matrices: {betas: [0.9, 0.95]}}"), ["16: optimizer.groups.matrices.betas: is not a setting of this group under optimizer.type muon_adamw"]),
    "one beta": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {head: {betas: [0.9]}}"), ["16: optimizer.groups.head.betas: is [0.9]; it must be two numbers"]),
    "an unknown optimizer": (changed("muon_adamw", "adam"), ["15: optimizer.type: is 'adam'. Write trainer, adamw, muon_adamw, or module:attr."]),
    "no sources": (changed("  sources:\n    - files: texts/*.parquet\n", ""), [" data.sources: is missing"]),
    "a source of nothing": (changed("files: texts/*.parquet", "weight: 1"), ["7: data.sources.0: names nothing to read."]),
    "a weight of zero": (changed("files: texts/*.parquet", "files: a.txt\n      weight: 0"), ["8: data.sources.0.weight: is 0; it must be greater than 0."]),
    "weight and epochs": (changed("files: texts/*.parquet", "files: a.txt\n      weight: 1\n      epochs: 2"), ["7: data.sources.0: has a weight and epochs. Keep one."]),
    "an unknown built-in": (changed("files: texts/*.parquet", "id: tandem:quickstart"), ["7: data.sources.0.id: there is no built-in tandem:quickstart."]),
    "an unknown format": (changed("files: texts/*.parquet", "files: a.txt\n      format: plain"), ["8: data.sources.0.format: is 'plain'."]),
    "conversations in pretraining": (changed("files: texts/*.parquet", "files: a.jsonl\n      format: messages"), ["7: data.sources.0: holds conversations, and pretraining reads plain text."]),
    "both half precisions": (GOOD + "  bf16: true\n  fp16: true\n", ["19: train.fp16: stands beside train.bf16."]),
    "a wrong resume": (changed("stage: pretrain", "stage: pretrain\n  resume: yes"), ["3: run.resume: is 'yes'; it must be auto, never, or the number of a step."]),
    "a tab": (changed("  vocab_size", "\tvocab_size"), ["4: a tab character. YAML indents with spaces"]),
    "an open quote": (GOOD + '  optim: "adam\n', ["18: a quote is opened and never closed."]),
    "a star without quotes": (changed("texts/*.parquet", "*.parquet"), ["7: a value that begins with * must stand in quotes"]),
    "a list at the top": ("- train\n", ["1: holds a list. A recipe is sections with keys"]),
    "an empty file": ("\n# nothing\n", [" is empty."]),
    "two documents": (GOOD + "---\n" + GOOD, ["18: a second document begins here."]),
    "a Python tag": (GOOD + "  seed: !!python/name:os.system x\n", ["18:", "the tag"]),
    "a circle of extends": ("extends: recipe.yaml\n" + GOOD, ["1: extends: recipe.yaml extends this recipe in turn, in a circle."]),
}  # fmt: skip


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
    [
        ("train.max_stepz=1", "command line: train.max_stepz: unknown key. Did you mean train.max_steps?"),
        ("max_steps=1", "command line: max_steps: unknown key here; it belongs to another section. Write it as train.max_steps."),
        ("--learning_rate=1", "command line: --learning_rate is not an override. Write section.key=value"),
        ("train.seed", "command line: train.seed is not an override."),
        ('train.seed="7"', "command line: train.seed: is the text '7'"),
        ("train.max_steps=1000.5", "command line: train.max_steps: is 1000.5; it must be a whole number."),
        ("data.sources.3.files=x", "command line: data.sources.3.files: there is no entry 3; there are 0 to 0."),
        ("data.validation.0.files=x", "command line: data.validation.0.files: there is no such list"),
        ("data.sources.0.file=x", "command line: data.sources.0.file: unknown key. Did you mean data.sources.0.files?"),
        ("train.seed.x=1", "command line: train.seed: is keys with values; it must be a whole number."),
        ("hub.id=hf_abcdefghijklmnopqrstuv", "command line: a token or password is given."),
        ("data.sources=[{files: x", "command line: is not valid YAML"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused(folder, override, expected):
    with pytest.raises(RecipeError) as error:
        read_recipe([write(folder, GOOD), override])
    assert expected in str(error.value)
    assert "hf_abc" not in str(error.value)


def test_an_override_given_twice_is_refused(folder):
    with pytest.raises(RecipeError, match=r"command line: train\.seed: is given twice"):
        read_recipe([write(folder, GOOD), "train.seed=1", "train.seed=2"])


def test_a_recipe_of_the_other_stage_names_the_right_command(folder):
    chat = changed("stage: pretrain", "stage: sft")
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml:2: run\.stage: .*Run: accelerate launch pipeline/sft\.py recipe\.yaml"
    ):
        read_recipe([write(folder, chat)], stage="pretrain")
    assert read_recipe([write(folder, changed("  stage: pretrain\n", ""))], stage="sft").run.stage == "sft"
    unsaid = changed("run:\n  stage: pretrain\n", "").replace(
        "files: texts/*.parquet", "files: x.jsonl\n      format: messages"
    )
    with pytest.raises(RecipeError, match=r"its sources hold conversations.*pipeline/sft\.py"):
        read_recipe([write(folder, unsaid)], stage="pretrain")
    with pytest.raises(RecipeError, match=r"pipeline/pretrain\.py"):
        read_recipe([write(folder, GOOD)], stage="sft")


def test_what_is_not_there_has_status_66(folder):
    for argv, expected in [
        (["missing.yaml"], "missing.yaml: there is no such recipe. . holds: recipe.yaml."),
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


def test_text_that_is_not_utf_8_is_refused_with_its_line(folder):
    (folder / "recipe.yaml").write_bytes(GOOD.encode() + "# caf\u00e9".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:18: is not UTF-8 text \(byte 0xe9\)"):
        read_recipe(["recipe.yaml"])


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
