"""The examples of docs/extending.md, taken from the page and used the way the page says."""

import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerControl

from pipeline.evals.tasks import load_tasks, score_tasks
from pipeline.model.build import build_model
from pipeline.process.errors import RecipeError
from pipeline.process.user_code import import_attribute
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields
from pipeline.sources.open import open_sources
from pipeline.training.build import build_optimizer

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py: [^\n]*\n(.*?)```", PAGE, re.S))
IDS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe's folder with all examples beside the recipe."""
    for name, code in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def recipe_in(folder, **sections):
    """A recipe that names the examples by the very strings that the page shows."""
    strings = dict(re.findall(r"# (my_\w+)\.py: ([^\n]+)", PAGE))
    (folder / "train.jsonl").write_text(
        '{"question": " Why? ", "answer": "So."}\n{"question": "x", "answer": " "}\n' * 40
    )
    base = f"""
run: {{stage: {sections.pop("stage", "pretrain")}, {strings["my_callback"].removeprefix("run: {").removesuffix("}")}}}
data:
  row_tokens: 32
  batch_tokens: 64
  cache_dir: {folder}/cache
  sources: [{{files: train.jsonl, {sections.pop("source", "text_column: question")}}}]
model: {{{strings["my_model"].removeprefix("model.")}, n_layer: 2, n_embd: 32, n_head: 2}}
optimizer: {{{strings["my_optimizer"].removeprefix("optimizer.")}}}
evals: {strings["my_task"].removeprefix("evals: ")}
train: {{max_steps: 2}}
"""
    (folder / "recipe.yaml").write_text(base)
    return read_recipe([str(folder / "recipe.yaml")], stage=None)


def test_every_point_has_an_example_of_at_most_a_dozen_lines():
    assert sorted(EXAMPLES) == ["my_callback", "my_format", "my_model", "my_optimizer", "my_task"]
    for name, code in EXAMPLES.items():
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 12, f"{name} has {len(lines)} lines"


def test_the_model_example_trains_with_the_optimizer_example(folder):
    recipe = recipe_in(folder)
    own = import_attribute(recipe.model.type, recipe.code)
    model = build_model(own, model_fields(recipe.model, vocab_size=258, **IDS), seed=1)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 2
    optimizer = build_optimizer(model, recipe)
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "rest"]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-3, 3e-4]
    ids = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_format_example_reads_conversations_and_passes_over_empty_answers(folder):
    line = re.search(r"# my_format\.py: (format: [^\n]+)", PAGE)[1]
    recipe = recipe_in(folder, stage="sft", source=line)
    train, validation = open_sources(recipe.source_settings())
    items = [item for source in train + validation for block in source.read() for item in block.items]
    assert len(items) == 40
    assert items[0].messages == [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<b>": 256, "<e>": 257}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<b>", eos_token="<e>")


def test_the_evaluation_example_gives_a_share_and_leaves_the_model_training(folder, tokenizer):
    recipe = recipe_in(folder)
    own = import_attribute(recipe.model.type, recipe.code)
    model = build_model(own, model_fields(recipe.model, vocab_size=258, **IDS), seed=1).train()
    tasks = load_tasks(recipe.evals.tasks, folder=str(folder), where="evals.tasks")
    numbers = score_tasks(tasks, model, tokenizer)
    assert list(numbers) == ["copying/accuracy"]
    assert 0 <= numbers["copying/accuracy"] <= 1
    assert model.training


def test_the_callback_example_stops_when_the_figure_is_reached(folder):
    recipe = recipe_in(folder)
    callback = import_attribute(recipe.run.callbacks[0], str(folder))()
    control = TrainerControl()
    callback.on_log(None, None, control, logs={"val/bpb": 0.9})
    assert not control.should_training_stop
    callback.on_log(None, None, control, logs={"val/bpb": 0.7})
    assert control.should_training_stop


def test_evaluations_that_are_missing_or_give_no_numbers_are_refused(folder, tokenizer):
    with pytest.raises(RecipeError, match=r"(?s)my_task:nothing cannot be imported.*no_such:x cannot be imported"):
        load_tasks(["my_task:nothing", "no_such:x"], folder=str(folder), where="evals.tasks")
    model = torch.nn.Linear(1, 1)
    for given in (None, {"accuracy": 0.5}, {"a/b": "high"}):
        with pytest.raises(RecipeError, match=r"evals\.tasks: own gave"):
            score_tasks({"own": lambda model, tokenizer, given=given: given}, model, tokenizer)
