"""The optimizer over parameters that FSDP2 cut among gloo ranks, HSDP among those of each copy, or tensor parallelism by rows and by columns."""

import os

import pytest
import torch
from torch.distributed import all_gather_object, destroy_process_group, get_world_size, init_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.model.build import build_model
from pipeline.process.errors import DataError, RecipeError
from pipeline.recipe.schema import Group, Groups, Optimizer, Recipe, Schedule
from pipeline.training.build import build_optimizer
from pipeline.training.checkpoint_parts import own_part
from pipeline.training.guard import refuse_nonfinite
from pipeline.training.norms import local
from pipeline.training.optimizer_state import load_optimizer_state, optimizer_settings, optimizer_tensors
from pipeline.training.schedules import apply_schedule
from pipeline.training.sharding import shard_model, whole_on_rank_0
from tests.ranks import on_ranks

FIELDS = {
    "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64, "use_bias": False,
    "normalization": "rms_norm", "position_embedding": "rope", "value_embeddings": True, "residual_lambdas": True, "bigram_embeddings": 70,
    "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


QWEN3 = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": False}  # fmt: skip
NEOX = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


def recipe(eps=1e-8, decay=0.2, **more):
    adamw = Group(learning_rate=0.01, betas=[0.8, 0.95], eps=eps, weight_decay=0.01)
    names = ("embeddings", "value_embeddings", "head", "scalars", "x0_lambdas", "gates")
    groups = Groups(
        matrices=Group(learning_rate=0.02, momentum=0.95, weight_decay=decay),
        **dict.fromkeys(names, adamw),
    )
    return Recipe(optimizer=Optimizer(type="muon_adamw", groups=groups, **more))


def model_and_optimizer(*, sharded=False, model_type="tandem", **more):
    model = build_model(model_type, FIELDS if model_type == "tandem" else QWEN3, seed=0)
    if sharded:
        shard_model(model)
    return model, build_optimizer(model, recipe(**more))


def train(model, optimizer, steps):
    for step in steps:
        input_ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        apply_schedule(optimizer, Schedule(warmup_steps=1), step, 8)
        optimizer.step()


def own_bytes(model, optimizer):
    """Bytes that this rank holds of parameters, gradients and optimizer states."""
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.ndim
    ]
    return sum(local(t).nbytes for p in model.parameters() for t in (p, p.grad)) + sum(local(t).nbytes for t in states)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_what_one_rank_alone_sees_is_refused(sharded, rank):
    if rank == 1:
        with torch.no_grad():
            local(sharded.lm_head.weight).fill_(torch.nan)
    with pytest.raises(DataError, match=r"^here: lm_head\.weight holds a NaN"):
        refuse_nonfinite(sharded.state_dict(), where="here", instead="")


def assert_the_head_of_a_foreign_model_is_no_group_of_its_own():
    """The chunked loss never calls the head, and torch waits for every module of a group."""
    for tied in (False, True):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = build_model("llama", {"vocab_size": 64, "tie_word_embeddings": tied, **sizes}, seed=0)
        shard_model(model)
        groups = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        own = {"model.layers.0", "model.layers.1"} | (set() if tied else {"model.embed_tokens"})
        assert groups == own | {""}


def assert_the_ranks_parts_are_all_tensors_whole(tensors, expected):
    """Each of them once, and about as many bytes on every rank."""
    parts = [None] * get_world_size()
    all_gather_object(parts, own_part(tensors))
    assert sorted(name for part in parts for name in part) == sorted(expected)
    for name, tensor in [item for part in parts for item in part.items()]:
        assert torch.equal(tensor, expected[name]), name
        assert tensor.device.type == "cpu"
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in expected.values())


def rank_main_of_layers(rank, rendezvous, ranks):
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "PARALLELISM_CONFIG_TP_SIZE": str(ranks)}
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    # Half of each layer and of the table; the head stays whole. Sums over ranks round otherwise: with a small eps AdamW
    # makes a whole step of a gradient that is nothing but rounding, and Muon's decay asks for the sign of each direction.
    share, kind = 0.5 * 1.15, {"model_type": "qwen3", "eps": 1e-3, "decay": 0.0}
    sharded = assert_sharded_moves_as_whole(rank, share, **kind)
    placements = {
        name.split(".")[-2]: str(getattr(p, "placements", "whole")) for name, p in sharded.named_parameters()
    }
    rows, columns = "(Shard(dim=0),)", "(Shard(dim=1),)"
    assert placements == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens"), rows
    ) | dict.fromkeys(("o_proj", "down_proj"), columns) | dict.fromkeys(
        ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm", "lm_head"), "whole"
    )
    with pytest.raises(RecipeError, match=r"GPTNeoXForCausalLM has gpt_neox.layers.0.attention.dense.bias as R"):
        shard_model(build_model("gpt_neox", NEOX, seed=0))
    destroy_process_group()
    os._exit(0)


def rank_main(rank, rendezvous, ranks, replicas):
    torch.set_num_threads(1)
    os.environ |= {"FSDP_VERSION": "2", "WORLD_SIZE": str(ranks)}
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(replicas)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    share = replicas / ranks
    sharded = assert_sharded_moves_as_whole(rank, share)
    assert_the_head_of_a_foreign_model_is_no_group_of_its_own()
    assert_what_one_rank_alone_sees_is_refused(sharded, rank)
    destroy_process_group()
    # Not through the interpreter's end, where a thread of gloo that wants the interpreter's lock makes the process abort; every
    # entry of the pipeline leaves like this too.
    os._exit(0)


def assert_sharded_moves_as_whole(rank, share, **more):
    model, optimizer = model_and_optimizer(**more)
    sharded, sharded_optimizer = model_and_optimizer(sharded=True, **more)
    if more.get("model_type") is None:
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
    train(model, optimizer, range(4))
    train(sharded, sharded_optimizer, range(4))
    for (name, one), other in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            whole(other.detach()), one.detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )

    assert own_bytes(sharded, sharded_optimizer) <= 1.15 * share * own_bytes(model, optimizer)
    own = optimizer_tensors(sharded_optimizer, sharded)
    of_rank_0 = whole_on_rank_0(own)
    tensors = {key: whole(value).clone() for key, value in own.items()}
    assert tensors.keys() == optimizer_tensors(optimizer, model).keys()
    assert of_rank_0.keys() == (tensors.keys() if rank == 0 else set())
    assert all(torch.equal(value, tensors[key]) for key, value in of_rank_0.items())
    assert_the_ranks_parts_are_all_tensors_whole(own, tensors)
    weights = sharded.state_dict()
    assert_the_ranks_parts_are_all_tensors_whole(weights, {key: whole(value) for key, value in weights.items()})
    fresh = build_optimizer(sharded, recipe(**{name: value for name, value in more.items() if name != "model_type"}))
    assert_the_ranks_parts_are_all_tensors_whole(
        state := optimizer_tensors(fresh, sharded), state
    )  # not cut: there is none
    before = [p.detach().clone() for p in sharded.parameters()]
    load_optimizer_state(fresh, sharded, tensors, optimizer_settings(sharded_optimizer))
    train(sharded, sharded_optimizer, [4])
    uncut = [whole(p.detach()).clone() for p in sharded.parameters()]
    with torch.no_grad():
        for p, start in zip(sharded.parameters(), before, strict=True):
            p.copy_(start)
    train(sharded, fresh, [4])
    for p, expected in zip(sharded.parameters(), uncut, strict=True):
        assert torch.equal(whole(p.detach()), expected)
    return sharded


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_sharded_parameters_move_as_whole_ones_and_their_state_survives_the_file(tmp_path, ranks, replicas):
    on_ranks(rank_main, str(tmp_path / "rendezvous"), ranks, replicas, ranks=ranks)


def test_parameters_of_layers_that_ranks_compute_together_move_as_whole_ones(tmp_path):
    on_ranks(rank_main_of_layers, str(tmp_path / "rendezvous"), 2)


def test_a_model_whose_parameters_are_merged_when_it_is_saved_is_refused():
    """A rank that writes a part of them would have to have the others whole."""
    config = AutoConfig.for_model("hrm_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.fsdp_plan = {"model.layers.*": "free_full_weight"}
    with pytest.raises(RecipeError, match="saves a HrmTextForCausalLM with several parameters merged into one"):
        shard_model(model)
