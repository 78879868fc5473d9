"""One optimizer for AdamW and Muon: its groups, its arithmetic, and its life under Accelerate and Trainer."""

import sys
from copy import deepcopy

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.model.build import build_model
from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder
from pipeline.recipe.dial import MATRIX_GROUP
from pipeline.recipe.schema import Group, Groups, Optimizer, Recipe, Schedule, with_values
from pipeline.training import build
from pipeline.training import optimizer as module
from pipeline.training.build import build_optimizer
from pipeline.training.optimizer import OPTIMIZERS, MuonAdamW, cache_lomo_check
from pipeline.training.schedules import StepSchedule, apply_schedule

MODERN = {
    "n_layer": 4, "n_embd": 32, "n_head": 4, "n_kv_head": 2, "n_positions": 32, "vocab_size": 64, "use_bias": False,
    "normalization": "rms_norm", "position_embedding": "rope", "value_embeddings": True, "residual_lambdas": True,
    "backout": True, "smear": True, "tie_word_embeddings": False, "qk_norm": True, "activation_function": "relu2",
    "initialization": "nanochat", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
RATES = {"embeddings": 0.3, "value_embeddings": 0.15, "head": 0.008, "scalars": 0.005, "x0_lambdas": 0.5, "gates": 0.2}


def recipe(optimizer_type="muon_adamw", *, rate_scale=1.0, train=None, code_folder=None):
    def adamw(rate):
        return Group(learning_rate=rate, betas=[0.8, 0.95], eps=1e-10, weight_decay=0.01)

    matrices = adamw(3e-3)
    if optimizer_type == "muon_adamw":
        matrices = Group(learning_rate=0.02, momentum=0.97, weight_decay=0.28)
    groups = Groups(matrices=matrices, **{name: adamw(rate) for name, rate in RATES.items()})
    made = Recipe(optimizer=Optimizer(type=optimizer_type, rate_scale=rate_scale, groups=groups), train=train or {})
    made.code = CodeFolder(code_folder or ".")
    return made


def modern():
    return build_model("tandem", MODERN, seed=0)


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def rows_of(seed, count=4):
    """Rows that count up by 3 from anywhere, modulo the vocabulary: learnt within tens of steps."""
    first = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (first + 3 * torch.arange(32)) % 64


def loss_of(model, seed):
    input_ids = rows_of(seed)
    return model(input_ids=input_ids, labels=input_ids).loss


def train(model, optimizer, seeds):
    for seed in seeds:
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def names_by_group(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}


def test_each_optimizer_of_groups_has_default_settings_and_a_class():
    assert OPTIMIZERS.keys() == MATRIX_GROUP.keys()


def test_every_parameter_is_in_one_group_with_its_group_s_rate():
    model = modern()
    optimizer = build_optimizer(model, recipe(rate_scale=0.5))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {name: 0.5 * rate for name, rate in RATES.items()} | {"matrices": 0.01}
    assert {group["name"] for group in optimizer.param_groups if group["kind"] == "muon"} == {"matrices"}
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)


@pytest.mark.parametrize(("kind", "train", "backend"), [
    ("cuda", {"torch_compile": True}, "inductor"),
    ("cuda", {"torch_compile": True, "torch_compile_backend": "aot_eager"}, "aot_eager"),
    ("cuda", {"torch_compile": False}, None),
    ("cpu", {"torch_compile": True}, None),
])  # fmt: skip
def test_the_step_is_compiled_with_the_model_but_not_on_a_cpu(monkeypatch, kind, train, backend):
    monkeypatch.setattr(build, "device_info", lambda: DeviceInfo(kind, "any", 1, 16.0))
    assert build_optimizer(modern(), recipe(train=train)).backend == backend


def test_type_adamw_is_the_same_groups_all_updated_by_adamw():
    model = modern()
    optimizer = build_optimizer(model, recipe("adamw"))
    assert {group["kind"] for group in optimizer.param_groups} == {"adamw"}
    assert {group["name"] for group in optimizer.param_groups} == {*RATES, "matrices"}


def test_gpt2_s_conv1d_matrices_are_known_to_be_stored_in_out():
    optimizer = build_optimizer(gpt2(), recipe())
    by_name = {group["name"]: group for group in optimizer.param_groups}
    assert by_name["matrices_conv1d"]["outputs_first"] is False
    assert len(by_name["matrices_conv1d"]["params"]) == 8
    assert "matrices" not in by_name


def test_a_linear_matrix_is_known_to_be_stored_out_in():
    by_name = {group["name"]: group for group in build_optimizer(modern(), recipe()).param_groups}
    assert by_name["matrices"]["outputs_first"] is True
    assert "matrices_conv1d" not in by_name


def test_a_tied_head_is_updated_once_and_frozen_parameters_not_at_all():
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    groups = names_by_group(model, build_optimizer(model, recipe()))
    assert groups["embeddings"] == {"transformer.wte.weight"}
    assert "head" not in groups


def test_an_adamw_group_moves_bitwise_as_torch_s_fused_adamw():
    ours, theirs = gpt2(), gpt2()
    settings = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    train(ours, MuonAdamW([{"params": list(ours.parameters()), "name": "all", "kind": "adamw", **settings}]), range(5))
    train(theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **settings), range(5))
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("make", [modern, gpt2])
def test_both_models_learn_under_muon(make):
    model = make()
    optimizer = build_optimizer(model, recipe(rate_scale=0.3))
    before = loss_of(model, 99).item()
    train(model, optimizer, range(40))
    assert loss_of(model, 99).item() < 0.5 * before


@pytest.mark.parametrize("make", [modern, gpt2])
def test_a_state_dict_round_trip_gives_bitwise_the_same_next_steps(make):
    model, copy = make(), make()
    optimizer = build_optimizer(model, recipe())
    train(model, optimizer, range(3))
    copy.load_state_dict(model.state_dict())
    restored = build_optimizer(copy, recipe())
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    train(copy, restored, range(3, 6))
    assert torch.equal(weights(model), weights(copy))


def test_decay_scale_multiplies_the_decay_of_every_group_under_the_schedule():
    model = modern()
    plain, scaled = (recipe(), with_values(recipe(), {"optimizer.decay_scale": 10.0}))
    groups = [build_optimizer(model, one).param_groups for one in (plain, scaled)]
    for one, ten in zip(*groups, strict=True):
        assert ten["weight_decay"] == 10 * one["weight_decay"]
        assert ten["lr"] == one["lr"]
    optimizer = build_optimizer(model, scaled)
    apply_schedule(optimizer, Schedule(), 50, 100)
    muon = [
        (now, before) for now, before in zip(optimizer.param_groups, groups[0], strict=True) if now["kind"] == "muon"
    ]
    assert all(now["weight_decay"] == pytest.approx(10 * 0.5 * before["weight_decay"]) for now, before in muon)


def test_under_accelerate_with_clipping_the_schedule_still_reaches_every_group():
    from accelerate import Accelerator

    plain, prepared = modern(), modern()
    reference = build_optimizer(plain, recipe())
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(prepared, build_optimizer(prepared, recipe()))
    schedule = StepSchedule(optimizer, Schedule(), 100)
    for step in range(4):
        apply_schedule(reference, Schedule(), step, 100)
        loss_of(plain, step).backward()
        accelerator.backward(loss_of(model, step))
        for parameters in (plain.parameters(), prepared.parameters()):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        assert schedule.get_last_lr() == [group["lr"] for group in reference.param_groups]
        schedule.step()
    assert torch.equal(weights(plain), weights(prepared))


def test_parameters_replaced_in_the_groups_are_the_ones_that_move():
    # Accelerate's FSDP2 does this after the optimizer was built.
    model = modern()
    before = weights(model).clone()
    optimizer = build_optimizer(model, recipe())
    for group in optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
    replaced = [p for group in optimizer.param_groups for p in group["params"]]
    starts = [p.detach().clone() for p in replaced]
    for p in replaced:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    assert torch.equal(weights(model), before)
    assert not any(torch.equal(p, start) for p, start in zip(replaced, starts, strict=True))


def test_the_loss_scaler_skips_infinite_gradients_and_unscales_the_others():
    plain, scaled = modern(), modern()
    reference, optimizer = build_optimizer(plain, recipe()), build_optimizer(scaled, recipe())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = weights(scaled).clone()
    scaler.scale(loss_of(scaled, 0)).backward()
    next(scaled.parameters()).grad.view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(scaled), start)
    optimizer.zero_grad()
    loss_of(plain, 1).backward()
    reference.step()
    scaler.scale(loss_of(scaled, 1)).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-4, atol=1e-5)


def test_trainer_steps_the_groups_and_the_schedule(tmp_path):
    class OurTrainer(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = self.optimizer or build_optimizer(self.model, recipe())
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = StepSchedule(self.optimizer, Schedule(warmup_steps=2), num_training_steps)
            return self.lr_scheduler

    rows = [{"input_ids": (ids := torch.randint(0, 64, (32,))), "labels": ids} for _ in range(16)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    model = modern()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = OurTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    logged = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    peak = trainer.optimizer.param_groups[0]["initial_lr"]
    assert logged[:2] == pytest.approx([0.5 * peak, peak])
    # Half of every pair of layers has no value embedding and gates of zeros; all else must have moved.
    still = [name for name, p in model.named_parameters() if torch.equal(before[name], p)]
    assert still == []


def test_products_are_bfloat16_only_where_the_training_and_the_hardware_are(monkeypatch):
    def dtype(train, fast):
        monkeypatch.setattr(module, "bf16_is_fast", lambda: fast)
        groups = build_optimizer(modern(), recipe(train=train)).param_groups
        return next(group["product_dtype"] for group in groups if group["kind"] == "muon")

    assert dtype({"bf16": True}, True) == "bfloat16"
    assert dtype({"bf16": True}, False) == "float32"
    assert dtype({"bf16": False}, True) == "float32"
    assert dtype({"fp16": True}, True) == "float32"
    assert dtype({}, True) == "float32"


@pytest.mark.parametrize("make", [modern, gpt2])
def test_in_float32_the_micro_batch_does_not_change_twenty_steps_under_muon(make):
    def losses(micro_batch):
        model, result = make(), []
        optimizer = build_optimizer(model, recipe(rate_scale=0.3))
        for step in range(20):
            total = 0.0
            for rows in rows_of(step, count=8).split(micro_batch):
                loss = model(input_ids=rows, labels=rows).loss * len(rows) / 8
                loss.backward()
                total += loss.item()
            apply_schedule(optimizer, Schedule(warmup_steps=4), step, 40)
            optimizer.step()
            optimizer.zero_grad()
            result.append(total)
        return torch.tensor(result)

    whole = losses(8)
    assert whole[-1] < whole[0] - 0.5
    for micro_batch in (4, 1):
        assert ((losses(micro_batch) - whole).abs() / whole).max() < 1e-4


def test_an_optimizer_of_the_user_is_called_with_model_and_recipe(tmp_path):
    (tmp_path / "own_sgd.py").write_text(
        "import torch\n\ndef sgd(model, recipe):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    path = list(sys.path)
    optimizer = build_optimizer(gpt2(), recipe("own_sgd:sgd", code_folder=str(tmp_path)))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    apply_schedule(optimizer, Schedule(warmup_steps=2), 0, 100)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert sys.path == [*path, str(tmp_path)]  # last: it hides no library


def test_an_optimizer_that_is_not_there_is_refused_by_name():
    with pytest.raises(RecipeError, match="nowhere:sgd cannot be imported"):
        build_optimizer(gpt2(), recipe("nowhere:sgd"))


def test_muon_refuses_stacked_experts_and_names_them():
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.up_proj = torch.nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(RecipeError, match=r"experts.up_proj has shape \(2, 4, 4\).*Use optimizer.type: adamw"):
        build_optimizer(model, recipe())
    assert build_optimizer(model, recipe("adamw")).param_groups[0]["name"] == "matrices"


def test_an_accelerated_step_searches_the_disk_for_no_package(monkeypatch):
    Accelerator()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.1))
    cache_lomo_check()
    optimizer.step()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest.fail(f"searches for {name}"))
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(0.9)
