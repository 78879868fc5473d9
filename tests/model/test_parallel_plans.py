"""transformers' own tensor parallelism and sharding of a saved model, on two gloo ranks."""

import os

import pytest
import torch
from tiny_models import GPT2, MODERN, NANOCHAT, random_ids, stirred
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FSDPModule
from transformers.distributed import DistributedConfig

from pipeline.model.build import build_model
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.model.saved import save_model
from tests.ranks import on_ranks

FORMS = {
    "all but value embeddings": MODERN | {"value_embeddings": False},
    "tied": NANOCHAT | {"tie_word_embeddings": True, "window_pattern": "SL", "sliding_window": 9},
}
SHARDED = {"modern": MODERN, "gpt2": GPT2 | {"final_logit_softcapping": 15.0}}
WITHOUT_PLAN = {"value embeddings": MODERN, "biases": GPT2 | {"final_logit_softcapping": 15.0}}
IDS = random_ids(2, 40)


def rank_main(rank, rendezvous, folder, sizes, out):
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        model = TandemForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
        seen = {"units": sorted(n for n, module in model.named_modules() if isinstance(module, FSDPModule))}
        seen["c_proj"] = model.transformer.h[0].mlp.c_proj.weight.to_local().shape
        with torch.no_grad():
            seen["logits"] = model.eval()(IDS).logits
            seen["tokens"] = model.generate(IDS[:1, :9], max_new_tokens=12, do_sample=False)
        loss = model.train()(IDS, labels=IDS).loss
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen["gradients"] = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
        seen["loss"] = loss.item()
    except ValueError as error:
        seen = {"error": str(error)}
    torch.save(seen, f"{out}/{rank}.pt")
    destroy_process_group()
    os._exit(0)  # a library's thread that outlives the interpreter would now and then end it by SIGABRT


def on_two_ranks(model, tmp_path, **sizes):
    """Return what each of two ranks sees of the saved model."""
    save_model(model, tmp_path / "model")
    given = (str(tmp_path / "rendezvous"), str(tmp_path / "model"), sizes, str(tmp_path))
    on_ranks(rank_main, *given)
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


def compare(model, seen):
    """Compare logits, greedy tokens, loss and every gradient with those of one process."""
    with torch.no_grad():
        assert (seen["logits"] - model.eval()(IDS).logits).abs().max() <= 1e-4
        assert torch.equal(seen["tokens"], model.generate(IDS[:1, :9], max_new_tokens=12, do_sample=False))
    loss = model.train()(IDS, labels=IDS).loss
    model.zero_grad()
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-5)
    ids = model.config.vocab_size
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(seen["gradients"]) == set(own)
    for name, gradient in own.items():
        theirs = seen["gradients"][name]
        assert (theirs - gradient[: len(theirs)]).abs().max() <= 1e-4 * max(1.0, gradient.abs().max()), name
        assert len(theirs) in (len(gradient), ids)


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_that_split_the_heads_compute_what_one_computes(form, tmp_path):
    model = stirred(build_model("tandem", FORMS[form], seed=1))
    for seen in on_two_ranks(model, tmp_path, tp_size=2):
        assert tuple(seen["c_proj"]) == (48, 96)
        compare(model, seen)


@pytest.mark.parametrize("form", WITHOUT_PLAN)
def test_a_model_whose_heads_cannot_be_split_is_refused(form, tmp_path):
    model = stirred(build_model("tandem", WITHOUT_PLAN[form], seed=1))
    for seen in on_two_ranks(model, tmp_path, tp_size=2):
        assert "has no `tp_plan`" in seen["error"]


@pytest.mark.parametrize("form", SHARDED)
def test_two_ranks_that_shard_by_blocks_compute_what_one_computes(form, tmp_path):
    model = stirred(build_model("tandem", SHARDED[form], seed=1))
    for seen in on_two_ranks(model, tmp_path, fsdp_size=2):
        table = [] if model.config.tie_word_embeddings else ["transformer.wte"]
        assert seen["units"] == ["", *(f"transformer.h.{i}" for i in range(4)), *table]
        compare(model, seen)
