"""model.embedding_dtype: embeddings in bfloat16 through optimizer, clipping, checkpoints, ranks and the finished model."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from pipeline.model.groups import parameter_group, store_embeddings
from pipeline.plan.plan import workload_of
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.identity import default_name, differences, resume_keys
from pipeline.recipe.model_sizes import sizes_of
from pipeline.training.build import build_from_recipe, build_optimizer
from pipeline.training.norms import total_norm
from tests.model.tiny_models import random_ids, tiny
from tests.plan.test_memory import QUICKSTART, SMALL
from tests.runner import WarmRunner

pytestmark = pytest.mark.full

BF16 = "model.embedding_dtype=bfloat16"
TABLES = {
    "transformer.wte.weight",
    "transformer.bigram_embedding.weight",
    "transformer.h.1.attn.value_embedding.weight",
    "transformer.h.3.attn.value_embedding.weight",
}


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


def bf16_names(tensors):
    return {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}


def test_embeddings_alone_are_stored_in_bfloat16_and_computing_stays_in_float32():
    model, ids = tiny("bigrams"), random_ids(2, 20)
    rounded = tiny("bigrams")
    store_embeddings(model, torch.bfloat16)
    assert bf16_names(model.state_dict()) == TABLES
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name in TABLES:
                parameter.copy_(parameter.bfloat16())
    logits = model(ids).logits
    assert logits.dtype == torch.float32
    assert torch.equal(logits, rounded(ids).logits)
    learned = tiny("gpt2", tie_word_embeddings=False)
    store_embeddings(learned, torch.bfloat16)
    assert bf16_names(learned.state_dict()) == {"transformer.wte.weight"}


@pytest.mark.parametrize("kind", ["adamw", "muon_adamw", "trainer"])
def test_memory_is_planned_as_it_is_taken(kind):
    plain = ["optimizer.groups=null", "optimizer.schedule=null"] if kind == "trainer" else []
    if kind == "adamw":
        plain = ["optimizer.groups.matrices={learning_rate: 0.003}"]
    plain += ["model.options.bigram_embeddings=5120"]
    recipe = read_recipe([QUICKSTART, *SMALL, f"optimizer.type={kind}", *plain, BF16])
    model = build_from_recipe(recipe, Ids())
    optimizer = (
        torch.optim.AdamW(model.parameters(), fused=True) if kind == "trainer" else build_optimizer(model, recipe)
    )
    batch = random_ids(2, 64, vocab_size=1024)
    model(batch, shift_labels=batch).loss.backward()
    optimizer.step()
    sizes = sizes_of(recipe)
    workload = workload_of(recipe, sizes, half=True, compiled=False)
    planned = workload.memory(recipe.micro_batch_rows)
    assert planned.weights == sum(p.nbytes for p in model.parameters())
    assert planned.gradients == sum(p.grad.nbytes for p in model.parameters())
    states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    assert workload.optimizer_bytes == pytest.approx(sum(t.nbytes for t in states), rel=0.01)
    for name, parameter in model.named_parameters():
        table = parameter_group(name, parameter) in ("embeddings", "value_embeddings")
        dtypes = {t.dtype for key, t in optimizer.state[parameter].items() if key != "step"}
        assert dtypes == {torch.bfloat16 if table else torch.float32}, name


class Ids:
    """As much of a tokenizer as building a model asks for."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __len__(self):
        return 1024


def test_the_norm_of_mixed_gradients_has_the_bits_of_float32():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(300, 70, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    exact = torch.cat([g.flatten().double() for g in gradients]).norm()
    assert total_norm(gradients).dtype == torch.float32
    assert total_norm(gradients).item() == pytest.approx(exact.item(), rel=1e-5)  # bfloat16's own is off by up to 4e-3
    assert torch.equal(total_norm(gradients[1:]), torch.nn.utils.get_total_norm(gradients[1:]))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_with_bfloat16_embeddings_resumes_exactly_and_loads_in_float32(runner, ranks):
    short = {"max_steps": 8, "save_steps": 2, "bf16": True, "max_grad_norm": 0.5}
    recipe = runner.recipe("narrow", "modern", train=short)
    uncut = runner.train(recipe, "run.name=uncut", BF16, ranks=ranks)
    directory = runner.kill(recipe, BF16, name="cut", after_step=5, ranks=ranks)
    cut = runner.train(recipe, "run.name=cut", BF16, ranks=ranks)
    assert "going on from checkpoint-" in cut.output
    assert cut.values("train/loss") == uncut.values("train/loss")
    newest = "checkpoints/checkpoint-8"
    for file in (f"{newest}/model.safetensors", f"{newest}/optimizer.safetensors", "model/model.safetensors"):
        assert (directory / file).read_bytes() == (uncut.directory / file).read_bytes()
    tables = TABLES - {"transformer.bigram_embedding.weight"}
    assert bf16_names(load_file(directory / newest / "model.safetensors")) == tables
    states = bf16_names(load_file(directory / newest / "optimizer.safetensors"))
    assert states == {f"{name}/{state}" for name in tables for state in ("exp_avg", "exp_avg_sq")}
    assert bf16_names(load_file(directory / "model" / "model.safetensors")) == set()
    from transformers import AutoModelForCausalLM

    for folder in (directory / newest, directory / "model"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    if ranks == 1:  # and back: a run in float32 may start from it, and the other way round
        wide = runner.train(recipe, "run.name=wide", "train.max_steps=3", f"model.start_from={directory}")
        assert bf16_names(load_file(wide.directory / "checkpoints/checkpoint-3/model.safetensors")) == set()


def test_the_key_must_match_and_its_default_leaves_older_runs_their_names():
    wide, narrow = read_recipe([QUICKSTART, *SMALL]), read_recipe([QUICKSTART, *SMALL, BF16])
    assert "model.embedding_dtype" not in resume_keys(
        wide
    )  # as in the manifests of runs that were begun before the key
    assert differences(resume_keys(wide), resume_keys(narrow)) == ['model.embedding_dtype: "float32" -> "bfloat16"']
    assert default_name(wide) != default_name(narrow)


def test_bfloat16_embeddings_are_refused_for_tied_heads_and_foreign_models(tmp_path):
    def refusal(*overrides):
        with pytest.raises(RecipeError) as caught:
            read_recipe([QUICKSTART, *SMALL, BF16, *overrides])
        return str(caught.value)

    tied = refusal("model.preset=gpt2", "optimizer.type=adamw", "optimizer.groups=null")
    assert "model.embedding_dtype: is bfloat16, and the head is tied to the token embedding" in tied
    foreign = refusal("model.preset=gpt2", "model.type=llama", "optimizer.type=adamw", "optimizer.groups=null")
    assert "model.embedding_dtype: is for model.type tandem, and this model is a llama" in foreign
    for start in ([], ["model.start_from=someone/model", "model.preset=gpt2"]):
        fp16 = refusal("train.bf16=false", "train.fp16=true", *start)
        assert "model.embedding_dtype: is bfloat16, and train.fp16 is" in fp16
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    recipe = read_recipe([QUICKSTART, *SMALL, BF16])
    config = tiny("gpt2").config
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(
            recipe.model,
            start_from=str(tmp_path / "gpt2"),
            preset="gpt2",
            options={},
            n_layer=config.n_layer,
            n_embd=config.n_embd,
            n_head=config.n_head,
            n_kv_head=None,
        ),
    )
    with pytest.raises(RecipeError, match="with a tied head"):
        build_from_recipe(recipe, Ids())
