"""What preflight says will become of a model's tokenizer, template and vocabulary."""

import pytest
import yaml

from pipeline.hardware.device import device_info
from pipeline.plan.__main__ import plan_table
from pipeline.plan.plan import make_plan
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.start_from import resolve_start
from pipeline.run.checks import reading_findings
from tests.families import FAMILIES, save_model, tokenizer_of


@pytest.fixture
def recipe_from(tmp_path, chat_files, text_files):
    def read(folder, stage):
        files = chat_files if stage == "sft" else text_files
        recipe = {
            "run": {"stage": stage, "directory": str(tmp_path / "runs")},
            "data": {
                "sources": [{"files": str(files[0])}],
                "row_tokens": 128,
                "batch_tokens": 512,
                "cache_dir": str(tmp_path / "cache"),
            },
            "model": {"start_from": str(folder)},
            "optimizer": {"type": "trainer"},
            "train": {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
        }
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        return resolve_start(read_recipe([str(tmp_path / "r.yaml")], stage=stage))

    return read


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_a_model_with_a_template_is_named_by_type_and_kept_unchanged(tmp_path, recipe_from, stage):
    recipe = recipe_from(save_model("qwen2", tmp_path / "qwen2"), stage)
    assert "  qwen2 2 x 32, 2 heads" in plan_table([make_plan(recipe, device_info(), processes=1)])
    problems, lines = reading_findings(recipe, only=["tokenizer", "changes"])
    assert problems == []
    # Then that the class which transformers reads it as gives other ids than its tokenizer.json.
    assert "qwen2 keeps its chat template and its 405 ids; nothing is added. Qwen2Tokenizer" in lines[0]
    assert lines[-1] == "model: its 410 embeddings stay as they are; none is added"
    assert ("each with its end '<|im_end|>'" in " ".join(lines)) == (stage == "sft")


def test_each_change_to_a_base_model_without_a_template_is_said(tmp_path, recipe_from):
    recipe = recipe_from(save_model("gpt_neox", tmp_path / "gpt_neox"), "sft")
    problems, lines = reading_findings(recipe, only=["tokenizer", "changes"])
    assert problems == []
    said = "\n".join(lines)
    assert "eos_token of" in said
    assert "has no chat template and gets the built-in one; it lacks <|end|> <|system|>" in said
    assert "model: 9 embeddings are added for new tokens (402 -> 411)" in said


def test_an_untrainable_template_is_a_problem_before_step_1_for_sft(tmp_path, recipe_from):
    folder = save_model("qwen2", tmp_path / "qwen2")
    tokenizer_of(FAMILIES["qwen2"], template="{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(folder)  # fmt: skip
    (problem,), lines = reading_findings(recipe_from(folder, "sft"), only=["tokenizer", "changes"])
    assert isinstance(problem, RecipeError)
    assert "no control token" in str(problem)
    assert lines == []
    problems, lines = reading_findings(recipe_from(folder, "pretrain"), only=["tokenizer", "changes"])
    assert problems == []
    assert "stage sft could not train with this template" in lines[1]
