"""Overrides, extends, the values that follow from others, the saved recipe, and what makes a run this run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process.errors import RecipeError
from pipeline.recipe import describe_filled, dump_recipe, help_text, read_recipe
from pipeline.recipe.batch import StepRows
from pipeline.recipe.identity import LATER, default_name, differences, resume_keys
from pipeline.recipe.model_sizes import model_fields
from pipeline.recipe.resolve import plain
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import MODERN, TANDEM_OPTIONS

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(p.name for p in (ROOT / "recipes").glob("*.yaml"))
OF_ANOTHERS = ("own_finetune.yaml", "lora_8gb.yaml", "full_24gb.yaml")  # sizes come with weights of the Hub
STAGES = dict.fromkeys(("quickstart_sft.yaml", "chat_sft_d24.yaml", "own_chat.yaml", *OF_ANOTHERS), "sft")
NEEDS = {name: ["data.sources=[{files: mine}]"] for name in ("own_text.yaml", "own_chat.yaml", *OF_ANOTHERS)}
BASE = """\
tokenizer: {vocab_size: 512}
data:
  sources: [{files: texts/a.txt}]
  row_tokens: 64
  batch_tokens: 512
model: {n_layer: 2, n_embd: 32, n_head: 4}
optimizer: {type: muon_adamw}
train: {max_steps: 100}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, text=BASE, name="recipe.yaml"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return name


def test_evaluation_files_beside_the_recipe_are_found_by_the_saved_recipe_too(folder):
    for name in ("sub/bundle/x", "sub/tasks/x", "sub/mine.jsonl"):
        write(folder, "", name)
    evals = "evals: {core: {bundle: bundle}, chat: {data: tasks, own: [{name: mine, files: mine.jsonl}]}}\n"
    recipe = read_recipe([write(folder, BASE + evals, "sub/recipe.yaml")])
    chat = recipe.evals.chat
    assert [recipe.evals.core.bundle, chat.data, chat.own[0].files] == ["sub/bundle", "sub/tasks", "sub/mine.jsonl"]
    assert (
        read_recipe([write(folder, BASE + evals.replace("bundle: bundle", "bundle: /abs"))]).evals.core.bundle
        == "/abs"
    )


def test_overrides_have_the_types_of_the_file(folder):
    recipe = read_recipe(
        [
            write(folder),
            "train.max_grad_norm=3e-4",
            "train.save_total_limit=null",
            "run.tokens=1e6",
            "samples.prompts=[a, 'b: c']",
            "optimizer.groups.head.betas=[0.9, 0.95]",
            "model.options.final_logit_softcapping=15",
            "run.note=hello world",
        ]
    )
    assert recipe.train["max_grad_norm"] == 3e-4
    assert recipe.train["save_total_limit"] is None
    assert recipe.run.tokens == 1_000_000
    assert recipe.samples.prompts == ["a", "b: c"]
    assert recipe.optimizer.groups.head.betas == [0.9, 0.95]
    assert recipe.model.options == {"final_logit_softcapping": 15.0}
    assert recipe.run.note == "hello world"


def test_a_list_override_replaces_the_list(folder):
    recipe = read_recipe([write(folder), "data.sources=[{files: x.parquet, weight: 2}, {files: y.parquet}]"])
    assert [s.files for s in recipe.data.sources] == ["x.parquet", "y.parquet"]


@pytest.mark.parametrize(
    "horizon",
    ["train.max_steps=7", "train.num_train_epochs=2", "run.tokens=4096", "run.tokens_per_param=20", "run.flops=1e12"],
)
def test_a_horizon_named_later_replaces_the_inherited_one(folder, horizon):
    for first in ("train: {max_steps: 100}", "run: {tokens: 51200}", "run: {flops: 1.0e12}"):
        write(folder, BASE.replace("train: {max_steps: 100}", first), "base.yaml")
        recipe = read_recipe([write(folder, "extends: base.yaml\n"), horizon])
        section, _, key = horizon.split("=")[0].partition(".")
        value = getattr(recipe.run, key) if section == "run" else recipe.train[key]
        assert value == float(horizon.split("=")[1])
        others = {"tokens", "tokens_per_param", "flops"} - {key}
        assert [getattr(recipe.run, name) for name in others] == [None] * len(others)


def test_two_horizons_on_one_command_line_are_refused(folder):
    with pytest.raises(RecipeError, match="second horizon"):
        read_recipe([write(folder), "train.max_steps=7", "run.tokens=4096"])


def test_keys_that_came_later_leave_older_runs_their_identity_until_used(folder):
    recipe = read_recipe([write(folder), "optimizer.type=muon_adamw"])
    names = {name.removeprefix("optimizer.") for name in resume_keys(recipe) if name.startswith("optimizer.")}
    in_schedule = (
        "warmup_steps",
        "decay_fraction",
        "decay",
        "final_fraction",
        "momentum_warmup_steps",
        "weight_decay",
    )
    assert {name for name in names if not name.startswith("groups.")} == {"type", "rate_scale", *(f"schedule.{key}" for key in in_schedule)}  # fmt: skip
    of_groups = {name.split(".")[2] for name in names if name.startswith("groups.")}
    assert of_groups == {"learning_rate", "betas", "eps", "weight_decay", "momentum"}
    used = {
        "optimizer.decay_scale": 2.0,
        "optimizer.schedule.batch_halvings": 3,
    }
    changed = read_recipe(
        [write(folder), "optimizer.type=muon_adamw", *(f"{key}={value}" for key, value in used.items())]
    )
    assert LATER.keys() & resume_keys(changed).keys() == used.keys()
    assert changed.run.name != recipe.run.name


@pytest.mark.parametrize(("warmup_steps", "halvings"), [(7, 3), (2, 3), (12, 1), (0, 0)])
def test_rows_of_smaller_first_steps_add_up_and_are_counted_back(warmup_steps, halvings):
    rows, before = StepRows(64, warmup_steps, halvings), 0
    sizes = [rows.at(step) for step in range(30)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 64 // 2**halvings
    assert sizes[warmup_steps:] == [64] * (30 - warmup_steps)
    for step, size in enumerate(sizes):
        assert rows.before(step) == before
        assert rows.steps(before) == step
        before += size
        assert rows.steps(before - 1) == step


def test_a_horizon_in_tokens_has_more_steps_where_the_first_are_smaller(folder):
    adamw = "optimizer.type=adamw"
    warmup = [adamw, "optimizer.schedule.batch_warmup_steps=8"]
    assert read_recipe([write(folder), "run.tokens=51200", adamw]).train["max_steps"] == 100
    recipe = read_recipe([write(folder), "run.tokens=51200", *warmup])
    assert recipe.train["max_steps"] == 105  # four steps of 2 rows, four of 4, then of 8
    assert recipe.tokens_at(105) == 51200
    with pytest.raises(RecipeError, match="8 rows of a step cannot be halved that often"):
        read_recipe([write(folder), *warmup, "optimizer.schedule.batch_halvings=4"])


def test_steps_are_whole_batches_of_the_tokens(folder):
    recipe = read_recipe([write(folder), "run.tokens=5631"])
    assert recipe.train["max_steps"] == 10  # 5631 = 10 x 512 + 511
    assert describe_filled(recipe) == ["train.max_steps = 10 (set by run.tokens)"]


def test_accumulation_named_later_replaces_batch_tokens_and_the_reverse(folder):
    recipe = read_recipe([write(folder), "train.gradient_accumulation_steps=3", "train.per_device_train_batch_size=2"])
    assert recipe.data.batch_tokens is None
    assert recipe.global_batch_tokens(4) == 4 * 2 * 3 * 64
    write(folder, BASE.replace("  batch_tokens: 512\n", "") .replace("max_steps: 100", "max_steps: 100, gradient_accumulation_steps: 2"), "base.yaml")  # fmt: skip
    recipe = read_recipe([write(folder, "extends: base.yaml\ndata: {batch_tokens: 1024}\n")])
    assert recipe.data.batch_tokens == 1024
    assert "gradient_accumulation_steps" not in recipe.train


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "expected"), [(1, 8, 1), (2, 2, 2), (3, 2, 2), (1, 3, 3), (16, 8, 1)]
)
def test_rows_of_a_step_are_dealt_to_any_number_of_processes(folder, world_size, micro_batch, expected):
    recipe = read_recipe([write(folder), f"train.per_device_train_batch_size={micro_batch}"])
    assert recipe.rows_per_step == 8
    assert recipe.micro_steps(world_size) == expected


def test_a_chain_of_extends_merges_sections_key_by_key_and_replaces_lists(folder):
    write(folder, BASE + "monitor: {trackers: [tensorboard, wandb], project: p}\n", "deep/base.yaml")
    write(
        folder,
        "extends: base.yaml\ntrain: {seed: 1, max_steps: 50}\nmodel: {options: {window_pattern: SL}}\n",
        "deep/middle.yaml",
    )
    top = "extends: deep/middle.yaml\ntrain: {seed: 2}\nmonitor: {trackers: [wandb]}\nmodel: {options: {qk_norm: true}}\n"
    recipe = read_recipe([write(folder, top)])
    assert (recipe.train["seed"], recipe.train["max_steps"]) == (2, 50)
    assert (recipe.monitor.trackers, recipe.monitor.project) == (["wandb"], "p")
    assert recipe.model.options == {"window_pattern": "SL", "qk_norm": True}


def test_a_bom_underscores_and_crlf_are_read(folder):
    (folder / "recipe.yaml").write_bytes(
        b"\xef\xbb\xbf" + BASE.replace("512\n", "1_024\n").replace("\n", "\r\n").encode()
    )
    assert read_recipe(["recipe.yaml"]).data.batch_tokens == 1024


def test_turning_the_dial_on_the_command_line_resizes_a_saved_recipe(folder):
    text = BASE.replace(
        "model: {n_layer: 2, n_embd: 32, n_head: 4}", "model: {depth: 4, head_dim: 32, aspect_ratio: 16}"
    )
    (folder / "saved.yaml").write_text(dump_recipe(read_recipe([write(folder, text)])))
    recipe = read_recipe(["saved.yaml", "model.depth=2"])
    assert (recipe.model.n_layer, recipe.model.n_embd, recipe.model.n_head, recipe.model.n_kv_head) == (2, 32, 1, 1)


def test_the_dial_fills_only_what_is_open_and_says_what_it_set(folder):
    text = BASE.replace("model: {n_layer: 2, n_embd: 32, n_head: 4}", "model: {depth: 4, head_dim: 32, n_embd: 96}")
    recipe = read_recipe([write(folder, text), "optimizer.groups.head.learning_rate=0.1", "optimizer.rate_scale=2"])
    assert (recipe.model.n_layer, recipe.model.n_embd, recipe.model.n_head) == (4, 96, 3)
    assert recipe.data.batch_tokens == 512
    assert recipe.optimizer.rate_scale == 2
    assert recipe.optimizer.groups.head.learning_rate == 0.1
    assert recipe.optimizer.groups.embeddings.learning_rate == pytest.approx(0.3 * (768 / 96) ** 0.5)
    lines = describe_filled(recipe)
    assert "model.n_layer = 4 (set by model.depth)" in lines
    assert not [
        line
        for line in lines
        if line.startswith(("model.n_embd", "data.batch", "optimizer.groups.head", "optimizer.rate"))
    ]


def test_the_dial_without_horizon_or_batch_trains_compute_optimally(folder):
    recipe = read_recipe([write(folder, "data: {sources: [{files: a.txt}]}\nmodel: {preset: modern, depth: 12}\noptimizer: {type: muon_adamw}\n")])  # fmt: skip
    assert recipe.run.tokens_per_param == 10.5
    assert (recipe.data.batch_tokens, recipe.train["max_steps"]) == (2**19, 2205)


@pytest.mark.parametrize("kind", ["adamw", "muon_adamw"])
def test_every_setting_of_every_group_is_filled(folder, kind):
    groups = read_recipe([write(folder), f"optimizer.type={kind}"]).optimizer.groups
    for name, group in vars(groups).items():
        given = {key for key, value in vars(group).items() if value is not None}
        muon = kind == "muon_adamw" and name == "matrices"
        assert given == (
            {"learning_rate", "momentum", "weight_decay"}
            if muon
            else {"learning_rate", "betas", "eps", "weight_decay"}
        )


def test_a_short_run_gets_a_short_warm_up_unless_one_is_given(folder):
    assert read_recipe([write(folder), "train.max_steps=10"]).optimizer.schedule.warmup_steps == 2
    assert read_recipe([write(folder), "train.max_steps=1000"]).optimizer.schedule.warmup_steps == 40
    with pytest.raises(RecipeError, match="longer than the run"):
        read_recipe([write(folder), "train.max_steps=10", "optimizer.schedule.warmup_steps=40"])


@pytest.mark.parametrize("name", SHIPPED)
def test_twenty_steps_of_any_shipped_recipe_are_a_smoke_test(name, folder):
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    recipe = read_recipe(
        [f"recipes/{name}", "train.max_steps=20", *NEEDS.get(name, [])], stage=STAGES.get(name, "pretrain")
    )
    assert recipe.train["max_steps"] == 20
    schedule = recipe.optimizer.schedule
    warmup = recipe.train["warmup_steps"] if recipe.optimizer.type == "trainer" else schedule.warmup_steps
    assert warmup <= 20
    longer = {"quickstart_pretrain.yaml": 40, "gpt2_124m.yaml": 700}
    said = f"{longer.get(name)} -> 4, a fifth of the run: train.max_steps makes it 20 steps."
    assert [said in note for note in recipe.notes] == [True] * (name in longer)


def test_a_warm_up_named_beside_a_short_horizon_is_not_shortened(folder):
    write(folder, BASE.replace("train: {max_steps: 100}", "train: {max_steps: 10}"), "base.yaml")
    late = "extends: base.yaml\noptimizer: {schedule: {warmup_steps: 40}}\n"
    with pytest.raises(RecipeError, match=r"recipe\.yaml:2: .*is 40, longer than the run of 10 steps"):
        read_recipe([write(folder, late)])
    write(folder, BASE.replace("{type: muon_adamw}", "{type: muon_adamw, schedule: {warmup_steps: 40}}"), "base.yaml")
    recipe = read_recipe([write(folder, "extends: base.yaml\ntrain: {max_steps: 10}\n")])
    assert recipe.optimizer.schedule.warmup_steps == 2


def test_anchors_aliases_and_merge_keys_are_read(folder):
    text = BASE.replace("optimizer: {type: muon_adamw}", "x-slow: &slow {learning_rate: 0.01, weight_decay: 0.5}\noptimizer:\n  type: muon_adamw\n  groups:\n    head: {<<: *slow, weight_decay: 0.0}\n    embeddings: *slow\n    scalars: {<<: [{eps: 0.5}, *slow]}")  # fmt: skip
    groups = read_recipe([write(folder, text)]).optimizer.groups
    assert (groups.head.learning_rate, groups.head.weight_decay) == (0.01, 0.0)
    assert (groups.embeddings.learning_rate, groups.embeddings.weight_decay) == (0.01, 0.5)
    assert (groups.scalars.eps, groups.scalars.learning_rate) == (0.5, 0.01)


@pytest.mark.parametrize("name", ["quickstart_pretrain", "quickstart_pretrain.yaml", "recipes/mine", "mine", "own"])
def test_a_recipe_is_found_by_its_bare_name(folder, name):
    write(folder, BASE, "own.yaml")
    write(folder, BASE, "recipes/mine.yaml")
    recipe = read_recipe([name])
    stem = Path(name).stem
    expected = {"own": "own.yaml", "mine": "recipes/mine.yaml"}.get(stem, str(ROOT / "recipes" / f"{stem}.yaml"))
    assert recipe.path == expected
    assert recipe.run.name.startswith(f"{stem}-")


@pytest.mark.parametrize("base", ["quickstart_pretrain", "quickstart_pretrain.yaml"])
def test_a_shipped_recipe_is_extended_by_its_bare_name(folder, base):
    assert read_recipe([write(folder, f"extends: {base}\n")]).model.n_embd == 128


def test_rows_are_as_long_as_the_model_can_hold_unless_set(folder):
    text = BASE.replace("  row_tokens: 64\n", "").replace("batch_tokens: 512", "batch_tokens: 4096")
    assert read_recipe([write(folder, text)]).data.row_tokens == 2048
    recipe = read_recipe([write(folder, text), "model.n_positions=512"])
    assert recipe.data.row_tokens == 512
    with pytest.raises(RecipeError, match=r"is 1024, more than model\.n_positions \(512\)"):
        read_recipe([write(folder, text), "model.n_positions=512", "data.row_tokens=1024"])


def test_sizes_among_the_options_of_another_type_are_the_recipe_s_own(folder):
    text = BASE.replace("model: {n_layer: 2,", "model: {type: llama, n_layer: 2,")
    options = "model.options={num_key_value_heads: 2, intermediate_size: 96, max_position_embeddings: 128}"
    model = read_recipe([write(folder, text), options]).model
    assert (model.n_kv_head, model.n_inner, model.n_positions) == (2, 96, 128)
    with pytest.raises(RecipeError, match=r"model\.options: hidden_size is 64, and model\.n_embd is 32\. Keep one"):
        read_recipe([write(folder, text), "model.options={hidden_size: 64}"])


def test_the_size_of_a_ready_tokenizer_is_read_from_its_folder(folder):
    (folder / "tok").mkdir()
    (folder / "tok/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 299}]}')
    text = BASE.replace("tokenizer: {vocab_size: 512}", "tokenizer: {path: tok}")
    assert read_recipe([write(folder, text)]).tokenizer.vocab_size == 300
    with pytest.raises(RecipeError, match="how many ids somebody/tokenizer has is not known"):
        read_recipe([write(folder, text), "tokenizer.path=somebody/tokenizer", "run.tokens_per_param=8"])


def test_files_beside_the_recipe_are_found_again_from_the_saved_one(folder):
    write(folder, "hello", "mine/texts/a.txt")
    recipe = read_recipe([write(folder, BASE, "mine/recipe.yaml")])
    assert recipe.data.sources[0].files == "mine/texts/a.txt"
    assert recipe.run.code_folder == "mine"
    (folder / "runs/x").mkdir(parents=True)
    (folder / "runs/x/recipe.yaml").write_text(dump_recipe(recipe))
    again = read_recipe(["runs/x/recipe.yaml"])
    assert (again.data.sources[0].files, again.run.code_folder) == ("mine/texts/a.txt", "mine")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_resolves_and_its_saved_form_says_the_same(name, folder):
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    stage = STAGES.get(name, "pretrain")
    recipe = read_recipe([f"recipes/{name}", *NEEDS.get(name, [])], stage=stage)
    assert recipe.model.n_layer or name in OF_ANOTHERS
    assert recipe.data.batch_tokens
    (folder / "runs").mkdir()
    (folder / "runs/recipe.yaml").write_text(dump_recipe(recipe))
    again = read_recipe(["runs/recipe.yaml"], stage=stage)
    assert plain(again) == plain(recipe)
    assert differences(resume_keys(recipe), resume_keys(again)) == []
    body = [line for line in dump_recipe(recipe).splitlines() if not line.startswith("#")]
    assert [line for line in dump_recipe(again).splitlines() if not line.startswith("#")] == body


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_says_what_where_how_long_cost_result_and_command(name):
    head = []
    for line in (ROOT / "recipes" / name).read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    text = "\n".join(head)
    for word in ("Where:", "Cost:", "Reaches:", "Run:"):
        assert word in text
    assert f"recipes/{name}" in text


def test_a_null_that_undoes_a_default_survives_saving(folder):
    overrides = ["train.save_total_limit=null", "model.preset=modern", "model.options.final_logit_softcapping=null"]
    recipe = read_recipe([write(folder), *overrides])
    (folder / "saved.yaml").write_text(dump_recipe(recipe))
    again = read_recipe(["saved.yaml"])
    assert again.train["save_total_limit"] is None
    assert again.model.options == {"final_logit_softcapping": None}
    assert (
        model_fields(again.model, vocab_size=8, bos_token_id=0, eos_token_id=1, pad_token_id=2)[
            "final_logit_softcapping"
        ]
        is None
    )


def test_nulls_inside_the_trainer_s_settings_survive_saving(folder):
    text = BASE.replace("muon_adamw", "trainer").replace(
        "max_steps: 100", "max_steps: 100, lr_scheduler_kwargs: {a: null, b: {}}"
    )
    recipe = read_recipe([write(folder, text), "train.activation_checkpointing_kwargs={}"])
    (folder / "saved.yaml").write_text(dump_recipe(recipe))
    assert read_recipe(["saved.yaml"]).train == recipe.train


def test_texts_that_look_like_numbers_survive_saving(folder):
    recipe = read_recipe(
        [write(folder), 'run.note="0012"', 'run.tags=["3e-4", "null", "no", "a: b", "1_000"]', 'monitor.project="~"']
    )
    (folder / "saved.yaml").write_text(dump_recipe(recipe))
    again = read_recipe(["saved.yaml"])
    assert (again.run.note, again.run.tags, again.monitor.project) == (
        recipe.run.note,
        recipe.run.tags,
        recipe.monitor.project,
    )
    assert again.run.tags[0] == "3e-4"


def test_the_batch_computed_at_first_start_is_kept_by_the_saved_recipe(folder):
    recipe = read_recipe([write(folder), "train.gradient_accumulation_steps=3"])
    open_one = resume_keys(recipe)
    recipe = with_values(recipe, {"data.batch_tokens": recipe.global_batch_tokens(2)})
    (folder / "saved.yaml").write_text(dump_recipe(recipe))
    assert read_recipe(["saved.yaml"]).data.batch_tokens == 2 * 8 * 3 * 64
    assert differences(resume_keys(recipe), open_one) == []


def test_the_name_follows_the_keys_that_must_match_and_no_others(folder):
    def name(*overrides):
        return read_recipe([write(folder), *overrides]).run.name

    assert name().startswith("recipe-")
    assert len(name()) == len("recipe-") + 6
    same = ["train.logging_steps=3", "train.save_steps=9", "run.note=x", "monitor.project=y", "train.per_device_train_batch_size=2", "evals.bpb.at_start=false", "train.max_grad_norm=2", "hub.id=a/b", "data.sources=[{files: texts/a.txt, name: other}]"]  # fmt: skip
    assert {name(override) for override in same} == {name()}
    other = ["train.seed=3", "train.max_steps=101", "data.batch_tokens=1024", "model.n_layer=3", "optimizer.groups.head.learning_rate=1", "optimizer.schedule.decay=cosine", "data.sources=[{files: b.txt}]", "data.packing=concat", "tokenizer.vocab_size=600"]  # fmt: skip
    assert len({name(override) for override in other} | {name()}) == len(other) + 1
    assert read_recipe([write(folder), "run.name=mine"]).run.name == "mine"


@pytest.mark.parametrize(
    ("file", "stem"),
    [("my recipe (v2)", "my-recipe-v2"), ("modèle d12", "modele-d12"), ("模型", "recipe"), ("(a).b_-", "a-.b_-"), ("+x", "x")],
)  # fmt: skip
def test_the_default_name_is_one_that_the_saved_recipe_may_give(folder, file, stem):
    recipe = read_recipe([write(folder, name=f"{file}.yaml")])
    assert recipe.run.name.rpartition("-")[0] == stem
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    assert read_recipe([str(folder / "recipe.yaml")]).run.name == recipe.run.name


def test_differences_name_key_and_both_values(folder):
    saved, now = resume_keys(read_recipe([write(folder)])), resume_keys(read_recipe([write(folder), "train.seed=3"]))
    assert differences(saved, now) == ["train.seed: 42 -> 3"]
    assert default_name(read_recipe([write(folder)])) == read_recipe([write(folder)]).run.name


def test_where_cites_the_line_of_a_key(folder):
    recipe = read_recipe([write(folder), "train.seed=4"])
    assert recipe.where("data.batch_tokens") == "recipe.yaml:5: data.batch_tokens"
    assert recipe.where("train.seed") == "command line: train.seed"
    assert recipe.where("run.name") == "recipe.yaml: run.name"


def test_the_options_are_those_of_the_model_s_config():
    from dataclasses import fields

    from transformers import GPT2Config

    from pipeline.model.configuration_tandem import TandemConfig

    own = {f.name for f in fields(TandemConfig)} - {f.name for f in fields(GPT2Config)}
    assert own - {"n_kv_head"} <= set(TANDEM_OPTIONS)
    assert set(TANDEM_OPTIONS) <= {f.name for f in fields(TandemConfig)}
    assert set(MODERN) <= set(TANDEM_OPTIONS)


def test_fields_of_other_models_have_their_own_names(folder):
    recipe = read_recipe([write(folder), "model.type=llama", "model.n_kv_head=2", "model.options.rope_theta=5000"])
    values = model_fields(recipe.model, vocab_size=512, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    assert values["num_hidden_layers"] == 2
    assert values["num_key_value_heads"] == 2
    assert values["max_position_embeddings"] == 64
    assert values["rope_theta"] == 5000
    assert "n_layer" not in values


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_help_names_the_command_and_every_section(stage):
    text = help_text(stage)
    assert f"pipeline/{stage}.py RECIPE.yaml" in text
    assert all(f"\n  {section} " in text for section in ("run", "data", "train", "hub"))


def test_chat_formats_make_conversations(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import chat_formats

    question, answer = chat_formats.multiple_choice({"question": "2+2? ", "choices": ["3", "4"], "answer": 1})
    assert (question["content"], answer["content"]) == ("2+2?\n\nA. 3\nB. 4\n\nAnswer with the letter only.", "B")
    _, answer = chat_formats.word_problem({"question": "q", "answer": "3*4=<<3*4=12>>12\n#### 12"})
    assert answer == {"role": "assistant", "content": "3*4=12\n#### 12"}


@pytest.mark.parametrize("arguments", [["--help"], ["recipe.yaml", "train.max_stepz=3"]])
@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_help_and_a_wrong_recipe_are_answered_without_importing_torch(folder, stage, arguments):
    write(folder)
    entry = ROOT / "pipeline" / f"{stage}.py"
    how = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-X", "importtime", str(entry), *arguments], **how)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pipeline.recipe" in imported
    assert not imported & {"torch", "transformers", "accelerate", "datasets", "numpy"}
    assert done.returncode == (0 if arguments == ["--help"] else 64)
    assert ("usage:" if arguments == ["--help"] else "train.max_steps") in done.stdout + done.stderr
