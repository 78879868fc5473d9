"""The attention of a run: chosen by what it hides, after a trial, and said."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import NanoChatConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.hardware.accelerators import planned_device
from pipeline.model.build import build_model
from pipeline.plan.plan import make_plan
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import arithmetic_sizes
from pipeline.run import checks
from pipeline.run.attention import TOLERANCE, attention_line, choose_attention, difference_from_eager
from pipeline.run.checks import attention_needs, kernel_problems
from pipeline.training import build
from pipeline.training.model_checks import check_foreign

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = planned_device("H100")
CPU = replace(GPU, kind="cpu", name="a CPU")
WINDOWED = [
    "model.options={window_pattern: SSSL, sliding_window: 129}",
    "data.row_tokens=512",
    "data.batch_tokens=4096",
]
# Heads, windows and rows of a model; the other sizes play no part.
SIZES = arithmetic_sizes({"n_layer": 2, "n_embd": 128, "n_head": 4, "n_kv_head": 2, "vocab_size": 8, "n_positions": 400, "window_pattern": "SL", "sliding_window": 129}, "tandem", 400)  # fmt: skip


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch):
    monkeypatch.setattr("pipeline.run.attention.can_compile", lambda: True)


@pytest.fixture
def quickstart(tmp_path):
    def plan(*overrides):
        folders = [f"run.directory={tmp_path}/runs", f"data.cache_dir={tmp_path}/cache"]
        apart = (
            [] if any(o.startswith("data.isolate_documents") for o in overrides) else ["data.isolate_documents=false"]
        )
        whole = ["model.options.window_pattern=L"]  # where the recipe has windows
        given = [str(RECIPES / "quickstart_pretrain.yaml"), *folders, *apart, *whole, *overrides]
        return make_plan(read_recipe(given), CPU, processes=1)

    return plan


def close(implementation, sizes, *, isolated, dtype, device):
    return 1e-6


def broken(implementation, sizes, *, isolated, dtype, device):
    raise RuntimeError("out of resource: shared memory\nRequired: 1")


def chosen(plan, device=GPU, trial=close):
    return choose_attention(attention_needs(plan.recipe), device, plan.sizes, trial=trial)


def test_full_attention_is_sdpas(quickstart):
    implementation, why = chosen(quickstart("model.preset=gpt2", "model.attn_implementation=null"), trial=broken)
    assert (implementation, why) == ("sdpa", "every layer sees all of its row before it")


@pytest.mark.parametrize(
    ("overrides", "hidden"),
    [
        (WINDOWED, "windows of 129 in rows of 512 tokens"),
        (
            ["model.preset=gpt2", "data.isolate_documents=true", "model.options={attn_pdrop: 0}"],
            "documents that do not",
        ),
    ],
    ids=["windows", "documents"],
)
def test_hidden_keys_are_skipped_by_flex_attention_where_it_was_tried(quickstart, overrides, hidden):
    plan = quickstart(*overrides, "model.attn_implementation=null")
    implementation, why = chosen(plan)
    assert implementation == "flex_attention"
    assert hidden in why
    assert "1e-06" in why
    assert attention_line(implementation, why).startswith("attention: flex_attention (")
    implementation, why = chosen(plan, trial=broken)
    assert implementation == "sdpa"
    assert why.endswith("(RuntimeError: out of resource: shared memory)")
    implementation, why = chosen(plan, trial=lambda *given, **more: float("nan"))
    assert implementation == "sdpa"
    assert chosen(plan, device=CPU)[0] == "sdpa"


def test_dropout_in_attention_leaves_flex_attention_out(quickstart):
    overrides = ["model.preset=gpt2", "data.isolate_documents=true"]
    implementation, why = chosen(quickstart(*overrides, "model.attn_implementation=null"))
    assert implementation == "sdpa"
    assert "has no dropout" in why
    asked = quickstart(*overrides, "model.attn_implementation=flex_attention").recipe
    (problem,) = kernel_problems(asked, GPU)
    assert "flex_attention has no dropout" in str(problem)


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, "flex_attention"), (0.1, "sdpa")])
def test_a_start_from_transformers_nanochat_drops_attention_as_its_config_says(tmp_path, dropout, expected):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    NanoChatConfig(**sizes, num_key_value_heads=2, attention_dropout=dropout).save_pretrained(tmp_path / "start")
    (tmp_path / "sft.yaml").write_text(
        f"model: {{start_from: {tmp_path / 'start'}}}\n"
        "data: {sources: [{files: a.jsonl, format: messages}], row_tokens: 64, batch_tokens: 512}\n"
        "train: {max_steps: 10}\n"
    )
    plan = make_plan(read_recipe([str(tmp_path / "sft.yaml")], stage="sft"), CPU, processes=1)
    assert chosen(plan)[0] == expected
    flex = with_values(plan.recipe, {"model.attn_implementation": "flex_attention"})
    found = [str(problem) for problem in kernel_problems(flex, GPU)]
    assert len(found) == (expected == "sdpa")
    assert all(problem.endswith("Write sdpa.") for problem in found)  # a start's options are not the recipe's to set


def test_a_model_of_another_kind_keeps_transformers_choice(quickstart):
    plan = quickstart(
        "model.preset=gpt2", "model.type=llama", "data.isolate_documents=true", "model.attn_implementation=null"
    )
    assert chosen(plan)[0] is None


def test_a_named_attention_is_kept_when_it_works_and_refused_otherwise(quickstart):
    plan = quickstart(*WINDOWED, "model.attn_implementation=flash_attention_3")
    assert chosen(plan)[0] == "flash_attention_3"
    with pytest.raises(
        RecipeError, match=r"model\.attn_implementation: flash_attention_3 does not give .* \(RuntimeError"
    ):
        chosen(plan, trial=broken)
    assert chosen(quickstart(*WINDOWED, "model.attn_implementation=eager"), trial=broken) == (
        "eager",
        "as the recipe says",
    )


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_passes_right_attention_and_fails_a_slightly_short_window(dtype, isolated):
    def short(*given, **more):
        return sdpa_mask(*given, **more).logical_and(torch.ones(400, 400, dtype=torch.bool).triu(-127)[: more["q_length"], : more["kv_length"]])  # fmt: skip

    name = "short_window"
    ALL_ATTENTION_FUNCTIONS.register(name, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(name, short)
    given = {"isolated": isolated, "dtype": dtype, "device": "cpu"}
    assert difference_from_eager("sdpa", SIZES, **given) <= TOLERANCE[dtype] / 2
    assert difference_from_eager(name, SIZES, **given) > 2 * TOLERANCE[dtype]


def test_the_trial_of_flex_attention_runs_forward_and_backward_in_one_graph(monkeypatch):
    # Without a CUDA device the graph is run as it is; Triton's code for it is not.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile_(f, backend="aot_eager", **more))
    for isolated in (False, True):
        found = difference_from_eager("flex_attention", SIZES, isolated=isolated, dtype="float32", device="cpu")
        assert found <= TOLERANCE["float32"]


def test_the_choice_of_preflight_is_printed_and_built(quickstart, text_files, monkeypatch, capsys):
    sources = f"data.sources=[{{files: {text_files[0]}}}, {{files: {text_files[1]}}}]"
    recipe = quickstart(sources, *WINDOWED, "model.attn_implementation=null").recipe
    recipe = checks.check_before_training(recipe, processes=1)
    said = "attention: sdpa (windows of 129 in rows of 512 tokens, by a dense mask: flex_attention has no backward pass on cpu)"
    assert said in capsys.readouterr().out
    assert recipe.model.chosen_attention == "sdpa"
    recipe = with_values(recipe, {"model.chosen_attention": "flex_attention"})
    tokenizer = [0] * 300
    monkeypatch.setattr(build, "model_fields", lambda recipe, **ids: {"n_layer": 1, "n_embd": 32, "n_head": 2})
    monkeypatch.setattr(build, "_check_planned", lambda *_: None)
    tokenizer = type("Tokenizer", (list,), {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})(tokenizer)
    assert build.build_from_recipe(recipe, tokenizer).config._attn_implementation == "flex_attention"


@pytest.mark.parametrize(
    "overrides",
    [[], ["data.isolate_documents=true", "train.per_device_train_batch_size=auto"]],
    ids=["a number", "auto"],
)
def test_a_foreign_model_with_a_flash_kernel_is_refused_where_documents_mix(quickstart, overrides):
    recipe = quickstart("model.preset=gpt2", "model.type=llama", *overrides).recipe
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    model = build_model("llama", {"vocab_size": 40, **sizes}, seed=0)
    model.config._attn_implementation = "flash_attention_2"  # which no CPU runs
    with pytest.raises(RecipeError, match="batches of one row only, and this run has batches of"):
        check_foreign(model, None, where=recipe.where, isolated_rows=8)
