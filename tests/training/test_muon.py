"""Muon's update against a slow reference, for every orientation a matrix can have."""

import math

import pytest
import torch

from benchmarks.optimizer_step import count_calls, whole_optimizer
from pipeline.model.build import build_model
from pipeline.training.muon import (
    POLAR_EXPRESS,
    cautious_update_,
    equalise_,
    orthogonalised,
    polar_express,
    rate_factor,
    scale_neurons_,
)
from pipeline.training.optimizer import MuonAdamW

SHAPES = [(24, 24), (64, 16), (16, 64), (1, 12), (12, 1)]  # (out, in)


def muon(
    weights, *, outputs_first=True, lr=0.02, momentum=0.9, weight_decay=0.1, product_dtype="float32", backend=None
):
    settings = {"kind": "muon", "name": "matrices", "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    settings |= {"outputs_first": outputs_first, "product_dtype": product_dtype}
    return MuonAdamW([{"params": weights, **settings}], backend=backend)


def random_weights(shape, count=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def gradients(shape, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


class Reference:
    """One (out, in) matrix in float64, each published step in its own line."""

    def __init__(self, weight, *, lr, momentum, weight_decay):
        self.weight = weight.detach().double()
        self.lr, self.beta, self.weight_decay = lr, momentum, weight_decay
        self.average = torch.zeros_like(self.weight)
        self.variance = 0.0

    def step(self, gradient):
        gradient = gradient.double()
        outputs, inputs = gradient.shape
        self.average = self.beta * self.average + (1 - self.beta) * gradient
        g = self.beta * self.average + (1 - self.beta) * gradient  # Nesterov
        mean_row_norm = g.norm() / math.sqrt(outputs)
        g = g * (mean_row_norm / g.norm(dim=1, keepdim=True))  # MuonEq
        g = g / (1.01 * g.norm())
        for a, b, c in POLAR_EXPRESS:
            g = a * g + b * (g @ g.T @ g) + c * (g @ g.T @ g @ g.T @ g)
        orthogonal_norm = math.sqrt(min(outputs, inputs))
        g = g * (orthogonal_norm / g.norm())  # Muon+
        mean_square = g.square().mean(dim=1 if outputs >= inputs else 0, keepdim=True)  # NorMuon
        self.variance = 0.9 * self.variance + 0.1 * mean_square
        g = g / self.variance.sqrt()
        g = g * (orthogonal_norm / g.norm())
        decay = torch.where(g * self.weight >= 0, self.weight_decay * self.weight, 0.0)  # cautious
        self.weight = self.weight - self.lr * math.sqrt(max(1.0, outputs / inputs)) * (g + decay)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("outputs_first", [True, False])
def test_muon_makes_the_reference_update_in_both_storage_orders(shape, outputs_first):
    (weight,) = random_weights(shape)
    reference = Reference(weight, lr=0.02, momentum=0.9, weight_decay=0.1)
    stored = torch.nn.Parameter(weight.detach().clone() if outputs_first else weight.detach().T.contiguous())
    optimizer = muon([stored], outputs_first=outputs_first)
    for gradient in gradients(shape, steps=4):
        stored.grad = gradient.clone() if outputs_first else gradient.T.contiguous()
        optimizer.step()
        reference.step(gradient)
    result = stored.detach() if outputs_first else stored.detach().T
    torch.testing.assert_close(result.double(), reference.weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conv1d_matrix_moves_like_the_linear_one_it_transposes(shape):
    linear, conv1d = random_weights(shape)[0], torch.nn.Parameter(random_weights(shape)[0].detach().T.contiguous())
    optimizers = muon([linear]), muon([conv1d], outputs_first=False)
    for gradient in gradients(shape, steps=3):
        linear.grad, conv1d.grad = gradient, gradient.T.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(linear.detach(), conv1d.detach().T, rtol=0, atol=2e-6)


def test_the_rate_grows_with_the_outputs_per_input_only():
    assert rate_factor((64, 16), output_dim=-2) == 2
    assert rate_factor((16, 64), output_dim=-2) == 1
    assert rate_factor((16, 64), output_dim=-1) == 2
    assert rate_factor((64, 16), output_dim=-1) == 1


def test_polar_express_maps_each_singular_value_and_keeps_the_singular_vectors():
    left, right = (torch.linalg.qr(matrix)[0] for matrix in gradients((64, 64), steps=2))
    values = torch.logspace(-4, 0, 64) / 1.01
    result = polar_express((left @ torch.diag(values) @ right)[None])[0]
    expected = values.double()
    for a, b, c in POLAR_EXPRESS:
        expected = a * expected + b * expected**3 + c * expected**5
    torch.testing.assert_close((left.T @ result @ right.T).double(), torch.diag(expected), rtol=0, atol=1e-4)
    # Directions within a factor of 1000 of the strongest come out at full size.
    assert expected[values > 1e-3].min() > 0.85
    assert expected.max() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_are_nearly_orthogonal_and_of_exactly_an_orthogonal_matrix_s_norm(dtype):
    x_MRC = torch.stack(gradients((32, 96), steps=3))
    x_MRC = orthogonalised(x_MRC, output_dim=-2, product_dtype=dtype).float()
    directions = scale_neurons_(x_MRC, torch.zeros(3, 96), output_dim=-2, beta2=0.9)
    assert directions.dtype == torch.float32
    torch.testing.assert_close(directions.norm(dim=(-2, -1)), torch.full((3,), math.sqrt(32)), rtol=1e-5, atol=0)
    # Columns were put to one size each, which moves the singular values a little away from 1.
    singular = torch.linalg.svdvals(directions)
    assert singular.min() > 0.7
    assert singular.max() < 1.4


@pytest.mark.parametrize("dim", [-2, -1])
def test_equalising_gives_equal_output_norms_and_a_whole_below_one(dim):
    x_MRC = torch.stack(gradients((8, 12), steps=2)) * torch.logspace(-3, 3, 12)
    rows = equalise_(x_MRC, output_dim=dim).norm(dim=-1 if dim == -2 else -2)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((2,), 1 / 1.01), rtol=1e-5, atol=0)


def test_stacked_matrices_move_as_each_would_alone():
    shapes = [(24, 24), (24, 24), (64, 16), (24, 24), (64, 16), (16, 64)]
    weights = [random_weights(shape, seed=i)[0] for i, shape in enumerate(shapes)]
    alone = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizers = [muon(weights), *(muon([weight]) for weight in alone)]
    for step in range(3):
        for i, (one, other) in enumerate(zip(weights, alone, strict=True)):
            one.grad = gradients(one.shape, steps=1, seed=10 * step + i)[0]
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(weights, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_scale_of_the_loss_does_not_change_the_update():
    results = []
    for scale in (1.0, 2.0**-16, 2.0**16):
        (weight,) = random_weights((16, 48))
        optimizer = muon([weight])
        for gradient in gradients((16, 48), steps=3):
            weight.grad = gradient * scale
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_gradient_of_zeros_moves_nothing_but_the_decay():
    (weight,) = random_weights((16, 48))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    muon([weight], weight_decay=0.0).step()
    assert torch.equal(weight, before)


def test_a_single_row_of_zeros_stays_where_it_is():
    (weight,) = random_weights((16, 48))
    before = weight.detach().clone()
    weight.grad = gradients((16, 48), steps=1)[0]
    weight.grad[3] = 0
    muon([weight], weight_decay=0.0).step()
    assert torch.equal(weight[3], before[3])
    assert weight.isfinite().all()


def test_weight_decay_shrinks_only_what_the_update_shrinks_too():
    weight = torch.tensor([[2.0, -2.0, 2.0, 0.0]])
    cautious_update_(weight, torch.tensor([[1.0, 1.0, 0.0, 1.0]]), rate=0.5, weight_decay=0.1)
    torch.testing.assert_close(weight, torch.tensor([[2 - 0.5 * 1.2, -2 - 0.5, 2 - 0.5 * 0.2, -0.5]]))


def test_a_matrix_without_a_gradient_is_left_out_of_its_stack():
    first, second = random_weights((16, 48), count=2)
    before = second.detach().clone()
    first.grad = gradients((16, 48), steps=1)[0]
    optimizer = muon([first, second])
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


def several(seed=0):
    """Matrices of three shapes with gradients."""
    shapes = [(24, 24), (24, 24), (64, 16), (16, 64), (64, 16)]
    weights = [random_weights(shape, seed=seed + i)[0] for i, shape in enumerate(shapes)]
    for i, weight in enumerate(weights):
        (weight.grad,) = gradients(weight.shape, steps=1, seed=10 + i)
    return weights


def flat(weights, optimizer):
    states = [optimizer.state[weight][name] for weight in weights for name in ("momentum", "variance")]
    return torch.cat([tensor.detach().flatten() for tensor in [*weights, *states]])


@pytest.mark.full  # compiles
@pytest.mark.parametrize("outputs_first", [True, False])
def test_a_compiled_step_makes_the_update_of_the_eager_one_and_keeps_its_layout(outputs_first):
    ways = {backend: several() for backend in (None, "inductor")}
    optimizers = {way: muon(weights, outputs_first=outputs_first, backend=way) for way, weights in ways.items()}
    for way, optimizer in optimizers.items():
        optimizer.step()
        # As a schedule changes them: the graphs take other numbers.
        optimizer.param_groups[0].update(lr=0.01, momentum=0.95, weight_decay=0.05)
        optimizer.step()
        assert all(weight.is_contiguous() for weight in ways[way])
    eager, compiled = (flat(ways[way], optimizers[way]) for way in ways)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    # Either form's state is read by the other, and both go on alike.
    for saved, reader in ((None, "inductor"), ("inductor", None)):
        weights = [torch.nn.Parameter(weight.detach().clone()) for weight in ways[saved]]
        for weight, other in zip(weights, ways[saved], strict=True):
            weight.grad = other.grad.clone()
        resumed = muon(weights, outputs_first=outputs_first, backend=reader)
        resumed.load_state_dict(optimizers[saved].state_dict())
        assert torch.equal(flat(weights, resumed), flat(ways[saved], optimizers[saved]))
        resumed.step()
        optimizers[saved].step()
        torch.testing.assert_close(flat(weights, resumed), flat(ways[saved], optimizers[saved]), rtol=0, atol=1e-6)


@pytest.mark.full  # compiles
def test_measuring_a_compiled_update_changes_nothing_and_gives_the_norms_of_the_changes():
    plain, measured = several(), several()
    before = [weight.detach().clone() for weight in measured]
    norms = []
    one, other = muon(plain, backend="inductor"), muon(measured, backend="inductor")
    other.measure_next_update(norms)
    one.step()
    other.step()
    assert torch.equal(flat(plain, one), flat(measured, other))
    assert len(norms) == len(measured)
    change = {id(weight): (weight - old).norm() for weight, old in zip(measured, before, strict=True)}
    for weight, norm in norms:
        assert norm.item() == pytest.approx(change[id(weight)].item(), rel=1e-5)


@pytest.mark.full  # compiles
def test_a_compiled_step_of_depth_12_makes_at_most_60_calls_of_torch():
    eager = count_calls(whole_optimizer(layers=12, backend=None))
    compiled = count_calls(whole_optimizer(layers=12, backend="inductor"))
    assert eager["calls"] > 500  # the counter sees what a step does
    assert compiled["calls"] <= 60
    assert compiled["graphs"] == 8  # two of each of four shapes


@pytest.mark.full  # compiles
def test_losses_with_a_compiled_step_are_those_of_the_eager_one():
    fields = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64, "use_bias": False}
    fields |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
    losses = {}
    for backend in (None, "inductor"):
        model = build_model("tandem", fields, seed=0)
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
        optimizer = muon(matrices, outputs_first=False, backend=backend)
        losses[backend] = []
        for step in range(20):
            input_ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(input_ids=input_ids, labels=input_ids).loss
            loss.backward()
            optimizer.step()
            losses[backend].append(loss.item())
    assert losses["inductor"] == pytest.approx(losses[None], rel=1e-4)
    assert losses[None][-1] != losses[None][0]
