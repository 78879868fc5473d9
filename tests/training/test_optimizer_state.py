"""State as named tensors and back, for our optimizer and for torch's own."""

import json

import pytest
import torch
from safetensors.torch import load, save

from pipeline.process.errors import DataError
from pipeline.training.optimizer import MuonAdamW
from pipeline.training.optimizer_state import load_optimizer_state, optimizer_settings, optimizer_tensors


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(6, 8, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(16, 8, generator=generator))
        self.down = torch.nn.Parameter(torch.randn(8, 16, generator=generator))
        self.scale = torch.nn.Parameter(torch.randn(8, generator=generator))


class PlainAverage(torch.optim.Optimizer):
    """Keeps Python numbers beside a tensor, as optimizers from elsewhere do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p] or {"count": 0, "rate": 1.0, "seen": False, "average": torch.zeros_like(p)}
                state = {**state, "count": state["count"] + 1, "rate": state["rate"] * 0.9, "seen": True}
                state["average"].lerp_(p.grad, 1 / state["count"])
                self.state[p] = state
                p.sub_(state["average"], alpha=group["lr"] * state["rate"])


def ours(network):
    adamw = {"kind": "adamw", "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01}
    muon = {"kind": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    muon |= {"outputs_first": True, "product_dtype": "float32"}
    return MuonAdamW(
        [
            {"params": [network.embedding], "name": "embeddings", **adamw},
            {"params": [network.up, network.down], "name": "matrices", **muon},
            {"params": [network.scale], "name": "scalars", **adamw},
        ]
    )


OPTIMIZERS = {
    "muon_adamw": ours,
    "adamw_torch_fused": lambda network: torch.optim.AdamW(network.parameters(), lr=0.01, fused=True),
    "adamw_torch": lambda network: torch.optim.AdamW(network.parameters(), lr=0.01, amsgrad=True, foreach=True),
    "sgd": lambda network: torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9),
    "adafactor": lambda network: torch.optim.Adafactor(network.parameters(), lr=0.01),
    "python_numbers": lambda network: PlainAverage(network.parameters(), lr=0.01),
}


def step(network, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in network.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_through_safetensors_and_json_the_next_steps_are_bitwise_the_same(name):
    network, other = Network(), Network()
    optimizer = OPTIMIZERS[name](network)
    step(network, optimizer, range(3))
    file = save(optimizer_tensors(optimizer, network))
    settings = json.loads(json.dumps(optimizer_settings(optimizer)))
    step(network, optimizer, range(3, 6))

    step(other, OPTIMIZERS[name](other), range(3))
    restored = OPTIMIZERS[name](other)
    load_optimizer_state(restored, other, load(file), settings)
    step(other, restored, range(3, 6))
    assert torch.equal(weights(network), weights(other))


def test_keys_are_parameter_and_state():
    network = Network()
    optimizer = ours(network)
    step(network, optimizer, [0])
    keys = set(optimizer_tensors(optimizer, network))
    assert {"embedding/step", "embedding/exp_avg", "embedding/exp_avg_sq", "up/momentum", "up/variance"} <= keys
    assert len(keys) == 2 * 3 + 2 * 2


def test_state_finds_its_parameter_by_name_whatever_the_order_of_the_groups():
    network, other = Network(), Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    step(network, optimizer, range(3))
    tensors = optimizer_tensors(optimizer, network)
    step(other, torch.optim.AdamW(other.parameters(), lr=0.01), range(3))
    turned = torch.optim.AdamW(reversed(list(other.parameters())), lr=0.01)
    load_optimizer_state(turned, other, tensors)
    step(network, optimizer, range(3, 6))
    step(other, turned, range(3, 6))
    assert torch.equal(weights(network), weights(other))


def test_loaded_state_is_a_copy():
    network, other = Network(), Network()
    optimizer, restored = ours(network), ours(other)
    step(network, optimizer, [0])
    load_optimizer_state(restored, other, optimizer_tensors(optimizer, network))
    before = optimizer.state[network.up]["momentum"].clone()
    step(other, restored, [1])
    assert torch.equal(optimizer.state[network.up]["momentum"], before)


def test_settings_come_from_the_checkpoint_only_when_they_are_given():
    network = Network()
    optimizer = ours(network)
    step(network, optimizer, [0])
    tensors, settings = optimizer_tensors(optimizer, network), optimizer_settings(optimizer)
    settings[1]["lr"] = 0.5
    load_optimizer_state(optimizer, network, tensors)
    assert optimizer.param_groups[1]["lr"] == 0.02
    load_optimizer_state(optimizer, network, tensors, settings)
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)


def test_a_parameter_without_any_gradient_has_no_state_after_loading():
    network, other = Network(), Network()
    optimizer, restored = ours(network), ours(other)
    network.down.requires_grad_(False)
    step(network, optimizer, [0])
    optimizer.state.pop(network.down)
    tensors = load(save(optimizer_tensors(optimizer, network)))
    assert tensors["down/none"].numel() == 0
    load_optimizer_state(restored, other, tensors)
    assert other.down not in restored.state
    assert other.up in restored.state


def test_missing_and_extra_names_are_all_named():
    network = Network()
    optimizer = ours(network)
    step(network, optimizer, [0])
    tensors = optimizer_tensors(optimizer, network)
    for key in ("embedding/step", "embedding/exp_avg", "embedding/exp_avg_sq"):
        del tensors[key]
    tensors["side/momentum"] = torch.zeros(2)
    with pytest.raises(DataError) as error:
        load_optimizer_state(optimizer, network, tensors)
    for problem in ("embedding is missing", "side is not a parameter here"):
        assert problem in str(error.value)


def test_state_that_is_no_tensor_and_no_number_is_refused():
    network = Network()
    optimizer = torch.optim.LBFGS(network.parameters())
    optimizer.state[network.up]["old_dirs"] = [torch.zeros(2)]
    with pytest.raises(TypeError, match="up/old_dirs is a list"):
        optimizer_tensors(optimizer, network)
