"""The plan's bytes of a sharded model against what real ranks hold."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from pipeline.hardware.accelerators import planned_device
from pipeline.model.build import build_model
from pipeline.plan.plan import make_plan, workload_of
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields, sizes_of
from pipeline.training.build import build_optimizer
from pipeline.training.norms import local
from pipeline.training.sharding import shard_model
from tests.ranks import on_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
MUON = "optimizer.type=muon_adamw"
ADAMW = ["optimizer.type=adamw", "optimizer.groups={matrices: {learning_rate: 0.001}}"]
# Five layers, and heads of 20: odd numbers of rows, that ranks cut unequally.
SMALL = ["tokenizer.vocab_size=1024", "model.n_layer=5", "model.n_embd=120", "model.n_head=6", "data.row_tokens=64", "data.batch_tokens=65536", "train.per_device_train_batch_size=1"]  # fmt: skip
CASES = [
    [MUON],
    ADAMW,
    [*ADAMW, "model.preset=gpt2", "model.options={}"],
    [MUON, "model.options={bigram_embeddings: 1000}"],
]  # recipes of a model that two ranks share


def recipe_of(*more):
    return read_recipe([str(RECIPES / "quickstart_pretrain.yaml"), *SMALL, *more])


def rank_main(rank, world, rendezvous, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.save([one_step(more) for more in CASES], f"{out}/{rank}.pt")
    os._exit(0)  # a thread that outlives the interpreter would now and then end it by SIGABRT


def one_step(more):
    """Return the bytes of weights and optimizer state that the rank holds after a step."""
    recipe = recipe_of(*more)
    fields = model_fields(recipe.model, vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = build_model("tandem", fields, seed=0).train()
    os.environ |= {"FSDP_VERSION": "2", "WORLD_SIZE": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"}
    shard_model(model)
    optimizer = build_optimizer(model, recipe)
    ids = torch.randint(3, 1024, (1, 64))
    model(ids, shift_labels=ids).loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "weights": sum(local(p).nbytes for p in model.parameters()),
        "optimizer": sum(local(value).nbytes for value in states),
    }


def test_ranks_that_share_a_model_hold_the_bytes_of_the_plan(tmp_path):
    on_ranks(rank_main, 2, str(tmp_path / "rendezvous"), str(tmp_path), ranks=2)
    ranks = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    for more, *seen in zip(CASES, *ranks, strict=True):
        recipe = recipe_of(*more)
        sizes = sizes_of(recipe)
        workload = workload_of(recipe, sizes, half=False, compiled=False, processes=2, shards=2)
        memory = workload.memory(1)
        held = max(rank["weights"] for rank in seen)
        assert memory.weights - workload.gathered_bytes == pytest.approx(held, rel=0.03)
        assert memory.optimizer == pytest.approx(max(rank["optimizer"] for rank in seen), rel=0.03)


def test_the_plan_of_a_training_shares_the_model_as_its_launcher_does(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "16")
    recipe, device = read_recipe([str(RECIPES / "fineweb_d24.yaml")]), planned_device("2x8xH100")
    for replicas in (1, 2):
        monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", str(replicas))
        plan = make_plan(recipe, device, processes=16)
        assert plan.shards == 16 // replicas
        assert plan.memory == make_plan(recipe, device, processes=16, shards=16 // replicas).memory
