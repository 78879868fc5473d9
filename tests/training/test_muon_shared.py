"""Muon's products shared by two gloo ranks that hold the same matrices, as data-parallel training does, or rows of each (FSDP2)."""

import os

import pytest
import torch
from torch.distributed import all_gather_object, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.training import muon as muon_step
from pipeline.training.optimizer import MuonAdamW
from tests.ranks import on_ranks

pytestmark = pytest.mark.full

SHAPES = [(24, 24)] * 3 + [(64, 16)] * 4 + [(16, 64)] + [(1, 9)]  # the last has no row for the second rank


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that an operation of this rank returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
            self.numel = max(self.numel, result.numel())
        return result


def assert_no_rank_holds_a_stack(mesh):
    """Of four matrices a rank holds two whole, and its part of all four."""
    for shape, placement in (((64, 16), Shard(0)), ((16, 64), Shard(1))):
        matrices = [torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement])) for _ in range(4)]
        settings = {"kind": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "outputs_first": True}
        optimizer = MuonAdamW([{"params": matrices, "name": "matrices", "product_dtype": "float32", **settings}])
        for matrix in matrices:
            matrix.grad = distribute_tensor(torch.randn(shape), mesh, [placement])
        with LargestTensor() as largest:
            optimizer.step()
        variances = 4 * 64
        assert 2 * 64 * 16 <= largest.numel <= 2 * 64 * 16 + variances


def trained(product_dtype, *, shared_from, cut=lambda whole: whole, backend=None, **more):
    """The matrices after four steps, and how many were orthogonalised by this rank in each call."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(cut(torch.randn(shape, generator=generator))) for shape in SHAPES]
    settings = {"kind": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "outputs_first": True, **more}
    group = {"params": matrices, "name": "matrices", "product_dtype": product_dtype, **settings}
    optimizer = MuonAdamW([group], backend=backend)
    made, whole = [], muon_step.orthogonalised

    def counted(x_MRC, **how):
        made.append(len(x_MRC))
        return whole(x_MRC, **how)

    muon_step.SHARED_FROM, muon_step.orthogonalised = shared_from, counted
    for _ in range(4):
        for matrix in matrices:
            matrix.grad = cut(torch.randn(matrix.shape, generator=generator))
        optimizer.step()
    muon_step.orthogonalised = whole
    state = [optimizer.state[m][name] for m in matrices for name in ("momentum", "variance")]
    found = [m.full_tensor() if isinstance(m, DTensor) else m for m in [*matrices, *state]]
    return torch.cat([m.detach().flatten() for m in found]), made


def rank_main(rank, rendezvous, product_dtype):
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    alone, made_alone = trained(product_dtype, shared_from=1 << 60)
    shared, made_shared = trained(product_dtype, shared_from=0)
    assert made_alone == [3, 4, 1, 1] * 4
    assert made_shared == ([2, 2, 1, 1] if rank == 0 else [1, 2, 1, 1]) * 4
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-6)
    of_ranks = [None, None]
    all_gather_object(of_ranks, shared)
    assert torch.equal(*of_ranks)
    mesh = init_device_mesh("cpu", (2,))
    in_rows, made_in_rows = trained(
        product_dtype, shared_from=0, cut=lambda whole: distribute_tensor(whole, mesh, [Shard(0)])
    )
    # Each matrix is made whole by one rank, and the stacks begin with the ranks in turn.
    assert made_in_rows == ([2, 2, 1] if rank == 0 else [1, 2, 1]) * 4
    torch.testing.assert_close(in_rows, alone, rtol=0, atol=1e-6)
    more = {"outputs_first": False}  # along rows, and across the ranks that hold them
    whole, _ = trained(product_dtype, shared_from=0, **more)
    cut, _ = trained(
        product_dtype, shared_from=0, cut=lambda whole: distribute_tensor(whole, mesh, [Shard(0)]), **more
    )
    torch.testing.assert_close(cut, whole, rtol=0, atol=2e-6)
    for way in ({}, {"cut": lambda whole: distribute_tensor(whole, mesh, [Shard(0)])}):
        compiled, _ = trained(product_dtype, shared_from=0, backend="aot_eager", **way)
        torch.testing.assert_close(compiled, alone, rtol=0, atol=1e-6)
    assert_no_rank_holds_a_stack(mesh)
    os._exit(0)  # not through the interpreter's end, where a thread of gloo may make the process abort


@pytest.mark.parametrize("product_dtype", ["float32", "bfloat16"])
def test_two_ranks_share_the_products_and_move_every_matrix_as_one_does(tmp_path, product_dtype):
    on_ranks(rank_main, str(tmp_path / "rendezvous"), product_dtype)
