"""The plan's bytes under DDP, FSDP2 and HSDP against a step of real ranks, and of hundreds that torch's `fake` process group imagines."""

import os
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.model.build import build_model
from pipeline.preflight.__main__ import deepest, main
from pipeline.preflight.capacity import find_notes
from pipeline.preflight.devices import LINKS, planned_device
from pipeline.preflight.memory import (
    FP32,
    MUON_SHARED_FROM,
    Collective,
    _exchanged,
    collectives,
    fsdp_units,
    gathered_bytes,
    memory_of,
    muon_flops,
    muon_stacks,
)
from pipeline.preflight.plan import make_plan
from pipeline.recipe import read_recipe
from pipeline.recipe.sizes import model_fields, sizes_of
from pipeline.training import muon
from pipeline.training.muon import local
from pipeline.training.optimizer import build_optimizer, product_dtype
from pipeline.training.sharding import shard_model
from tests.ranks import on_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
MUON = "optimizer.type=muon_adamw"
ADAMW = ["optimizer.type=adamw", "optimizer.groups={matrices: {learning_rate: 0.001}}"]
# Five layers, and heads of 20: odd numbers of rows, that ranks cut unequally.
SMALL = ["tokenizer.vocab_size=1024", "model.n_layer=5", "model.n_embd=120", "model.n_head=6", "data.row_tokens=64", "data.batch_tokens=65536", "train.per_device_train_batch_size=1"]  # fmt: skip
CASES = {
    2: [
        (2, [MUON]),
        (2, ADAMW),
        (2, [*ADAMW, "model.preset=gpt2", "model.options={}"]),
        (2, [MUON, "model.options={bigram_embeddings: 1000}"]),
        (1, [MUON]),
    ],
    512: [(512, [MUON]), (8, [MUON])],
}  # by ranks: those that share a model, and the recipe
OPS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce", "alltoall_base_": "all-to-all"}  # fmt: skip


class Bytes(TorchDispatchMode):
    """Counts calls and bytes of collectives as the plan does: what is gathered, reduced, or handed over."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = defaultdict(int), defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = OPS[func._opname]
            whole = (
                args[0] if kind in ("all-gather", "all-reduce") else args[1]
            )  # the output of a gathering, else what is given
            self.add(kind, whole[0] if isinstance(whole, list) else whole)
        return func(*args, **(kwargs or {}))

    def add(self, kind, tensor):
        self.calls[kind] += 1
        self.bytes[kind] += tensor.nbytes

    def all_to_all(self, received, given, *sizes, async_op, group):
        """Stand in for the fake group's, which refuses what NCCL and gloo take: a rank that hands nothing over and gets its rows."""
        self.add("all-to-all", given)
        received.zero_()
        return Done() if async_op else None


class Done:
    def wait(self):
        pass


def recipe_of(*more):
    return read_recipe([str(RECIPES / "quickstart_pretrain.yaml"), *SMALL, *more])


def rank_main(rank, world, rendezvous, out):
    torch.set_num_threads(1)
    if world == 2:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.save([one_step(world, shards, more) for shards, more in CASES[world]], f"{out}/{rank}.pt")
    os._exit(0)  # a thread that outlives the interpreter would now and then end it by SIGABRT


def one_step(world, shards, more):
    """Return what a step of this rank hands to the collectives, and what the rank holds behind it."""
    recipe, counted = recipe_of(*more), Bytes()
    fields = model_fields(recipe, vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = trained = build_model("tandem", fields, seed=0).train()
    if shards > 1:
        os.environ |= {
            "FSDP_VERSION": "2",
            "WORLD_SIZE": str(world),
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(world // shards),
        }
        shard_model(model)
    else:
        trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = build_optimizer(model, recipe)
    if world > 2:
        muon.dist.all_to_all_single = counted.all_to_all
    ids = torch.randint(3, 1024, (1, 64))
    with counted:
        trained(ids, shift_labels=ids).loss.backward()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "calls": dict(counted.calls),
        "bytes": dict(counted.bytes),
        "weights": sum(local(p).nbytes for p in model.parameters()),
        "optimizer": sum(local(value).nbytes for value in states),
    }


@pytest.mark.parametrize("world", CASES)
def test_a_step_sends_and_holds_the_bytes_of_the_plan(world, tmp_path):
    on_ranks(rank_main, world, str(tmp_path / "rendezvous"), str(tmp_path), ranks=2 if world == 2 else 1)
    ranks = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    for (shards, more), *seen in zip(CASES[world], *ranks, strict=True):
        recipe = recipe_of(*more)
        sizes, half = sizes_of(recipe), product_dtype(recipe) == "bfloat16"
        shape = {"processes": world, "hosts": world // 8 or 1, "shards": shards, "micro_steps": 1}
        planned = {one.kind: one for one in collectives(recipe, sizes, half=half, **shape) if one.size}
        assert set(seen[0]["bytes"]) <= set(planned)
        for kind, one in planned.items():
            if kind == "all-to-all" and world > 2:  # the plan's is the busiest rank's, and this is the first one
                assert seen[0]["bytes"][kind] == FP32 * _exchanged(muon_stacks(recipe, sizes), shards)[0]
            elif kind == "all-to-all":
                assert max(rank["bytes"][kind] for rank in seen) == one.size
            else:
                assert [rank["bytes"][kind] for rank in seen] == [one.size] * len(seen), kind
            if shards > 1:
                assert seen[0]["calls"][kind] == one.calls, kind
        if shards > 1:
            memory = memory_of(recipe, sizes, processes=world, half=False, compiled=False, shards=shards)
            assert memory.weights - gathered_bytes(fsdp_units(sizes)) == max(rank["weights"] for rank in seen)
            assert memory.optimizer == pytest.approx(max(rank["optimizer"] for rank in seen), rel=0.005)


def test_the_plan_of_muon_under_ddp_shares_stacks_as_muon_does():
    assert MUON_SHARED_FROM == muon.SHARED_FROM


def layouts_of(*given, hardware="64x8xH100"):
    device = planned_device(hardware)
    processes = device.hosts * device.count
    make = partial(make_plan, read_recipe([str(RECIPES / "fineweb_d52.yaml"), *given]), device, processes=processes)
    return {plan.layout: plan for plan in (make(shards=n) for n in (1, device.count, processes))}


def test_seven_billion_parameters_fit_a_host_of_gpus_and_no_single_one():
    plans = layouts_of()
    assert {name: plan.row_fits for name, plan in plans.items()} == {"DDP": False, "HSDP": True, "FSDP": True}
    for name, plan in plans.items():
        for depth, fits in ((deepest(plan), True), (deepest(plan) + 1, False)):
            assert layouts_of(f"model.depth={depth}")[name].row_fits is fits
    # A host's GPUs repeat what those of other hosts orthogonalise; a checkpoint is written in parts as large as the largest tensor.
    stacks = muon_stacks(plans["FSDP"].recipe, plans["FSDP"].sizes)
    assert sum(stacks.values()) == 6 * 52 + 26
    assert muon_flops(stacks, 8) > 20 * muon_flops(stacks, 512) == 20 * 5 * (4 * 3328**2 * 13312 + 2 * 3328**3)
    assert plans["DDP"].save.high == pytest.approx(plans["DDP"].checkpoint_bytes / 2e8)
    assert plans["FSDP"].save.high == pytest.approx(plans["FSDP"].checkpoint_bytes / 2e9)
    # Only the rest of HSDP's gradients leaves a host: an eighth of them, twice round 64 hosts.
    between = [one.sent()[1] for one in plans["HSDP"].collectives]
    assert sum(between) == pytest.approx(FP32 * plans["HSDP"].sizes.parameters()["total"] / 8 * 2 * 63 / 64, rel=0.01)


def test_the_plan_of_a_training_shares_the_model_as_its_launcher_does(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "16")
    recipe, device = read_recipe([str(RECIPES / "fineweb_d24.yaml")]), planned_device("2x8xH100")
    for replicas, layout in ((1, "FSDP"), (2, "HSDP")):
        monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", str(replicas))
        plan = make_plan(recipe, device, processes=16)
        assert (plan.shards, plan.layout) == (16 // replicas, layout)
        assert plan.memory == make_plan(recipe, device, processes=16, shards=16 // replicas).memory


def test_a_ring_over_hosts_sends_every_device_s_part_once_and_crosses_between_hosts_once():
    links = LINKS["H100"]
    gathered = Collective("all-gather", 1, 512 * 10**9, 512, 64)
    assert gathered.sent() == pytest.approx((511e9 * 7 / 8, 511e9 / 8))
    assert gathered.seconds(links) == pytest.approx(511e9 / 8 / (0.8 * links.between_bytes_s), rel=0.01)
    inside = Collective("all-reduce", 1, 8 * 10**9, 8, 1)
    assert inside.sent() == pytest.approx((14e9, 0))
    assert Collective("all-to-all", 1, 16 * 10**9, 16, 2).sent() == pytest.approx((7e9, 8e9))
    # Replicas that span two hosts each are on fewer hosts than there are.
    *_, last = collectives(recipe_of(), sizes_of(recipe_of()), processes=8, hosts=4, shards=4, micro_steps=1, half=True)
    assert (last.kind, last.ranks, last.hosts) == ("all-reduce", 2, 2)
    assert Collective("all-gather", 1000, 0, 512, 64).seconds(links) == pytest.approx(
        2.41, rel=0.01
    )  # 63 hosts and 448 devices on


def test_benchmarks_of_a_shared_model_are_made_by_all_devices_alike():
    plans = layouts_of("evals.core.every_steps=1000")
    one, shared = (plans[name].duration.benchmarks.value / plans[name].duration.step.value for name in ("DDP", "HSDP"))
    assert shared == pytest.approx(512 * one)


def test_widths_that_ranks_cannot_share_evenly_and_links_that_a_step_waits_for_are_noted():
    wide = layouts_of("model.depth=26")["FSDP"]  # 1664 rows for 512 ranks, a quarter of a row too few
    assert any("they hold and send 8 % more than the model" in note for note in find_notes(wide))
    assert not any("hold and send" in note for note in find_notes(layouts_of("model.depth=24")["FSDP"]))
    few = layouts_of("data.batch_tokens=1048576", "train.per_device_train_batch_size=1")["FSDP"]
    assert any("the devices wait" in note for note in find_notes(few))
    assert few.duration.step.low == few.duration.step.value == pytest.approx(few.links_s)


def test_the_command_plans_many_hosts_in_the_first_layout_that_fits(capsys):
    assert main([str(RECIPES / "fineweb_d52.yaml")]) == 0
    text = capsys.readouterr().out
    assert "layouts on 64 hosts of 8 H100" in text
    assert "planned as HSDP (accelerate_configs/hsdp.yaml)" in text
    assert re.search(r"largest model.depth that fits +\d+ +\d+ +\d+\n", text)
    assert re.search(r"preparing the data: .* on one host; as parts on 64 hosts", text)
    assert (
        main([str(RECIPES / "fineweb_d24.yaml"), "run.hardware=2x8xRTX4090", "train.per_device_train_batch_size=1"])
        == 0
    )
    text = capsys.readouterr().out
    assert "n/a: seconds of the links, since no published rates" in text
    assert "planned as HSDP" in text
