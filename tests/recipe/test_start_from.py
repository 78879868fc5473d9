"""What model.start_from means: resolved once, and kept by a run that has begun."""

import json
from functools import partial

import pytest
from transformers import GPT2Config

from pipeline.model.configuration_tandem import TandemConfig
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe import dump_recipe, read_recipe
from pipeline.recipe.model_sizes import sizes_from_config, sizes_of
from pipeline.recipe.start_from import check_sizes, resolve_start
from pipeline.run_dir.checkpoints import whole_folder
from pipeline.run_dir.earlier_runs import EarlierRuns

read = partial(read_recipe, earlier=EarlierRuns())

SFT = """\
model: {start_from: START}
data:
  sources: [{files: chats/a.jsonl, format: messages}]
  row_tokens: 64
  batch_tokens: 512
train: {max_steps: 10}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(folder, name, *, finished=None, recipe_name="base", config=None, **manifest):
    run = folder / "runs" / name
    (run / "checkpoints").mkdir(parents=True)
    if finished is not None:
        (run / "model").mkdir()
        (run / "model" / "config.json").write_text(json.dumps(config or {}))
        manifest["finished"] = finished
    (run / "run_manifest.json").write_text(json.dumps({"recipe_name": recipe_name, **manifest}))
    return run


def checkpoint(run, step):
    with whole_folder(run / "checkpoints" / f"checkpoint-{step}", step=step) as made:
        (made / "model.safetensors").write_bytes(bytes(step))
    return run / "checkpoints" / f"checkpoint-{step}"


def resolved(folder, start, *overrides):
    (folder / "sft.yaml").write_text(SFT.replace("START", start))
    return resolve_start(read(["sft.yaml", *overrides], stage="sft"))


def test_latest_is_the_run_of_that_recipe_that_finished_last(folder):
    make_run(folder, "a", finished=20)
    make_run(folder, "b", finished=10)
    make_run(folder, "other", finished=30, recipe_name="other")
    (make_run(folder, "training") / "model").mkdir()  # cut off between the model and the end
    recipe = resolved(folder, "latest:base")
    assert recipe.model.start_from == recipe.tokenizer.path == "runs/a/model"


def test_latest_passes_over_sweep_runs_which_are_still_found_by_name(folder):
    make_run(folder, "a", finished=10, tags=["mine"])
    make_run(folder, "tried", finished=20, tags=["mine", "sweep:rates"])
    assert resolved(folder, "latest:base").model.start_from == "runs/a/model"
    assert resolved(folder, "tried").model.start_from == "runs/tried/model"


def test_without_a_finished_run_the_command_that_trains_one_is_named(folder):
    make_run(folder, "training")
    with pytest.raises(InputMissingError, match=r"has no finished run of a recipe or stage 'base'\. Train it first"):
        resolved(folder, "latest:base")


def test_a_newer_base_run_renames_the_next_stage_unless_it_is_named(folder):
    make_run(folder, "a", finished=10)
    first = resolved(folder, "latest:base").run.name
    assert resolved(folder, "latest:base").run.name == first
    make_run(folder, "b", finished=20)
    assert resolved(folder, "latest:base").run.name != first
    assert resolved(folder, "latest:base", "run.name=mine").run.name == "mine"


def test_a_run_with_its_own_name_keeps_the_folder_it_began_from(folder):
    make_run(folder, "a", finished=10)
    mine = make_run(folder, "mine", must_match={"model.start_from": "runs/a/model"})
    make_run(folder, "b", finished=20)
    assert resolved(folder, "latest:base", "run.name=mine").model.start_from == "runs/b/model"  # no step was made yet
    checkpoint(mine, 1)
    assert resolved(folder, "latest:base", "run.name=mine").model.start_from == "runs/a/model"
    assert resolved(folder, "latest:base").model.start_from == "runs/b/model"


def test_an_unfinished_run_gives_its_newest_whole_checkpoint_and_is_not_touched(folder):
    run = make_run(folder, "training")
    whole, damaged = checkpoint(run, 5), checkpoint(run, 10)
    (damaged / "model.safetensors").write_bytes(b"")
    assert resolved(folder, "training").model.start_from == str(whole.relative_to(folder))
    assert damaged.is_dir()
    assert not (run / "quarantine").exists()


def test_a_checkpoint_stays_the_start_while_its_run_goes_on(folder):
    run = make_run(folder, "training")
    old = checkpoint(run, 5)
    checkpoint(make_run(folder, "mine", must_match={"model.start_from": str(old)}), 1)
    newer = checkpoint(run, 10)
    assert resolved(folder, "training", "run.name=mine").model.start_from == str(old)
    assert resolved(folder, "training", "run.name=next").model.start_from == str(newer.relative_to(folder))


def test_a_run_without_weights_is_refused(folder):
    make_run(folder, "training")
    with pytest.raises(InputMissingError, match="neither model/ nor a whole checkpoint"):
        resolved(folder, "training")


def test_a_folder_is_taken_as_it_is_and_a_hub_id_kept(folder):
    (folder / "weights").mkdir()
    assert resolved(folder, "weights").model.start_from == "weights"
    hub = resolved(folder, "openai-community/gpt2")
    assert hub.model.start_from == hub.tokenizer.path == "openai-community/gpt2"


SIZES = {
    "model_type": "tandem",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_kv_head": 4,
    "n_positions": 64,
    "smear": True,
}


@pytest.mark.parametrize("start", ["a", "latest:base", "runs/a/model"])
def test_sizes_of_the_weights_replace_those_of_an_extended_recipe(folder, start):
    make_run(folder, "a", finished=10, config=SIZES)
    (folder / "base.yaml").write_text(
        "model: {n_layer: 7, n_embd: 96, n_head: 6, preset: modern, options: {smear: false}}"
    )
    (folder / "sft.yaml").write_text("extends: base.yaml\n" + SFT.replace("START", start))
    recipe = read(["sft.yaml"], stage="sft")
    assert (recipe.model.n_layer, recipe.model.n_embd, recipe.model.n_head) == (2, 64, 4)
    saved = dump_recipe(recipe)
    assert "n_layer: 2" in saved
    assert "preset" not in saved
    assert "smear" not in saved
    (folder / "saved.yaml").write_text(saved)
    assert read(["saved.yaml"], stage="sft").model == recipe.model


def test_the_dial_scales_rates_by_the_width_of_the_weights(folder):
    make_run(folder, "a", finished=10, config=SIZES)
    (folder / "base.yaml").write_text(
        "model: {depth: 12}\ntokenizer: {vocab_size: 512}\noptimizer: {type: muon_adamw}\n"
    )
    (folder / "sft.yaml").write_text("extends: base.yaml\n" + SFT.replace("START", "latest:base"))
    recipe = read(["sft.yaml"], stage="sft")
    assert recipe.model.depth == 2
    assert recipe.optimizer.groups.embeddings.learning_rate == pytest.approx(0.3 * (768 / 64) ** 0.5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.n_layer=7", "model.n_layer: is 7, and what this run starts from has 2"),
        ("model.depth=3", "model.depth: is 3, and what this run starts from has 2"),
        ("model.options.smear=false", "model.options.smear: is smear: False, and what this run starts from has True"),
        ("tokenizer.vocab_size=4096", "tokenizer.vocab_size: is 4096, and what this run starts from has 300"),
        ("model.preset=modern_bigram", "bigram_embeddings: 4800, and what this run starts from has None"),
    ],
)
def test_what_the_recipe_itself_says_against_its_weights_is_refused(folder, override, said):
    run = make_run(folder, "a", finished=10, config=SIZES | {"vocab_size": 300, "bigram_embeddings": None})
    vocab = {f"t{i}": i for i in range(300)}
    (run / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    with pytest.raises(RecipeError) as refused:
        resolved(folder, "latest:base", override)
    assert said in str(refused.value)
    assert resolved(folder, "latest:base", "model.n_layer=2").model.n_layer == 2


def test_the_saved_recipe_of_a_run_begun_from_gpt2_reads_back(folder):
    make_run(folder, "a", finished=10, config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4})
    recipe = resolved(folder, "runs/a/model", "run.name=mine")
    assert recipe.model.n_kv_head == 4
    (folder / "saved.yaml").write_text(dump_recipe(recipe))
    again = read(["saved.yaml"], stage="sft")
    assert again.model == recipe.model
    for wrong in ("model.n_kv_head=2", "model.n_inner=100"):
        with pytest.raises(RecipeError, match="and what this run starts from has"):
            resolved(folder, "runs/a/model", wrong)


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (SIZES | {"window_pattern": "L", "vocab_size": 512}, TandemConfig),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}, GPT2Config),
    ],
    ids=["tandem", "gpt2"],
)
def test_a_horizon_in_flops_counts_the_architecture_of_the_weights(folder, config, made):
    config = made(**config).to_dict()
    make_run(folder, "a", finished=10, config=config)
    recipe = resolved(folder, "latest:base", "tokenizer.vocab_size=512")
    assert sizes_of(recipe) == sizes_from_config(made(**config), recipe.data.row_tokens)
    other = resolved(folder, "latest:base", "tokenizer.vocab_size=512", "train.max_steps=null", "run.flops=1e12")
    flops = sizes_from_config(made(**config), 64).flops_per_token("nanochat")
    assert other.train["max_steps"] == int(1e12 / flops) // 512


def test_too_long_a_row_is_refused_without_naming_an_absent_key(folder):
    make_run(folder, "a", finished=10, config=SIZES)
    with pytest.raises(RecipeError, match=r"more than model.n_positions \(64\). Make the rows shorter\.$"):
        resolved(folder, "latest:base", "data.row_tokens=128")


def test_a_fork_has_another_default_name_than_its_parent(folder):
    make_run(folder, "a", finished=10, config=SIZES)
    names = {
        resolved(folder, "runs/a/model", *more).run.name for more in ([], ["run.fork_from=x@5"], ["run.fork_from=x@6"])
    }
    assert len(names) == 3


def test_a_model_of_the_hub_is_compared_when_it_is_loaded(folder):
    (folder / "base.yaml").write_text("model: {n_layer: 7, n_embd: 96, n_head: 6, preset: modern}")
    (folder / "sft.yaml").write_text("extends: base.yaml\n" + SFT.replace("START", "somebody/model"))
    inherited = read(["sft.yaml"], stage="sft")
    assert inherited.model.n_layer is None
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4)
    check_sizes(inherited.model, config, where="sft.yaml")
    own = read(["sft.yaml", "model.n_layer=7"], stage="sft")
    with pytest.raises(RecipeError, match=r"model\.n_layer is 7, theirs 2"):
        check_sizes(own.model, config, where="own.yaml")


def test_an_option_that_gpt2_weights_do_not_name_is_compared_on_loading(folder):
    make_run(folder, "a", finished=10, config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4})
    recipe = resolved(folder, "latest:base", "model.options.smear=true")
    with pytest.raises(RecipeError, match="smear is True, theirs False"):
        check_sizes(recipe.model, TandemConfig(n_layer=2, n_embd=64, n_head=4), where="recipe.yaml")
