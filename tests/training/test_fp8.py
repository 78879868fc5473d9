"""train.fp8: what is converted, how far a step moves, and that nothing else does. On a CPU torchao imitates float8."""

import contextlib
import os
import re
import types

import pytest
import torch
from torch import nn

from pipeline.callbacks.samples import Samples
from pipeline.evals.bpb import compiled_nll, per_token_nll
from pipeline.hardware.accelerators import DeviceInfo
from pipeline.model.groups import parameter_group
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import with_values
from pipeline.run import checks
from pipeline.run.checks import kernel_problems
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import build_from_recipe
from pipeline.training.fp8 import convert_to_fp8, is_converted, without_fp8
from tests.model.tiny_models import random_ids, tiny
from tests.plan.test_memory import QUICKSTART, SMALL
from tests.runner import ROOT, Runner
from tests.training.test_embedding_dtype import Ids

FP8 = ["train.bf16=true", "train.fp8=true"]
CPU = DeviceInfo("cpu", "a CPU", 1, 16.0)
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def converted(model):
    pytest.importorskip("torchao")
    convert_to_fp8(model, torch.device("cpu"))
    return model


def float8_names(model):
    return {name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}


def blocks_matrices(model):
    parameters = dict(model.named_parameters())
    matrices = {name for name, p in parameters.items() if parameter_group(name, p) == "matrices"}
    return {name.removesuffix(".weight") for name in matrices if "gate" not in name}


def test_only_block_matrices_are_converted_and_weights_keep_their_names():
    model = tiny("modern", n_head=2, n_kv_head=2)
    before, matrices = dict(model.named_parameters()), blocks_matrices(model)
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert float8_names(converted(model)) == matrices
    assert len(matrices) == 6 * model.config.n_layer
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == types
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(before)


def test_widths_that_16_does_not_divide_gates_head_and_biased_matrices_stay():
    assert not any(is_converted(module) for module in tiny("gpt2").modules())
    matrix = nn.Linear(32, 24, bias=False)
    matrix.init_role = "hidden"
    assert not is_converted(matrix)
    head = nn.Linear(32, 32, bias=False)
    head.init_role = "head"
    assert not is_converted(head)
    assert not is_converted(nn.Linear(32, 32, bias=False))


def test_a_step_in_float8_is_near_one_in_bfloat16_but_different():
    ids = random_ids(2, 24)
    losses, gradients = [], []
    for model in (tiny("modern"), converted(tiny("modern"))):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autocast(**BF16):
                loss = model(ids, shift_labels=ids).loss
            loss.backward()
            gradients.append(model.transformer.h[0].mlp.c_fc.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert gradients[0].dtype == gradients[3].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(gradients[0].flatten(), gradients[3].flatten(), dim=0) > 0.98


def test_evaluations_equal_those_of_the_unconverted_model_even_when_compiled():
    plain, model = tiny("modern").eval(), converted(tiny("modern")).eval()
    ids = random_ids(2, 24)
    batch = {"input_ids": ids, "shift_labels": ids}
    with torch.no_grad():
        expected = per_token_nll(plain, batch, autocast_dtype=torch.bfloat16)
        in_float8 = per_token_nll(model, batch, autocast_dtype=torch.bfloat16)
        nll = compiled_nll(model, backend="aot_eager")
        with without_fp8(model):
            assert float8_names(model) == set()
            assert torch.equal(per_token_nll(model, batch, autocast_dtype=torch.bfloat16), expected)
            compiled = nll(model, batch, autocast_dtype=torch.bfloat16)
        assert torch.equal(
            compiled, compiled_nll(plain, backend="aot_eager")(plain, batch, autocast_dtype=torch.bfloat16)
        )
        assert not torch.equal(in_float8, expected)
        assert torch.equal(per_token_nll(model, batch, autocast_dtype=torch.bfloat16), in_float8)


def test_an_evaluation_that_fails_leaves_the_training_in_float8():
    model = converted(tiny("modern"))
    names = float8_names(model)
    with pytest.raises(ZeroDivisionError), without_fp8(model):
        _ = 1 / 0
    assert float8_names(model) == names != set()


def test_samples_are_made_without_float8(tmp_path):
    model, seen = converted(tiny("modern")), []

    def complete(model, prompts):
        seen.append(float8_names(model))
        return prompts

    meter = types.SimpleNamespace(pause=contextlib.nullcontext, tokens_at=int)
    given = {"every_steps": 1, "chat": False, "attempt": 1, "meter": meter, "writers": []}
    samples = Samples(RunDirectory(tmp_path), complete=complete, prompts=["a"], **given)
    samples.sample(types.SimpleNamespace(global_step=1, is_world_process_zero=True), model)
    assert seen == [set()]
    assert float8_names(model)


# On a CPU the refusal of preflight is in the way of trying the rest.
RUN = """
import sys
from pipeline.run_dir.failures import exit_with_status
from pipeline.run import checks
from pipeline.pretrain import main
checks.float8_problems = lambda model, device, where: []
exit_with_status(main)
"""


class Fp8Runner(Runner):
    def command(self, recipe, *overrides, **how):
        python, _, *rest = super().command(recipe, *overrides, **how)
        return [python, str(self.folder / "run_fp8.py"), *rest]


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, monkeypatch):
    pytest.importorskip("torchao")
    (tmp_path / "run_fp8.py").write_text(RUN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return Fp8Runner(tmp_path, cache, text_files, chat_files)


SHORT = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "bf16": True}


@pytest.mark.slow
def test_a_run_in_float8_resumes_exactly_and_is_scored_in_bfloat16(runner):
    recipe = runner.recipe("narrow", "modern", train=SHORT)
    uncut = runner.train(recipe, "run.name=uncut", "train.fp8=true", "samples.every_steps=3")
    assert re.search("^device: .*, float8, ", uncut.output, re.MULTILINE)
    losses, scores = uncut.values("train/loss"), uncut.values("val/bpb")
    begin = [f"model.start_from={uncut.directory}", "train.max_steps=1", "evals.bpb.at_start=true"]
    assert runner.train(recipe, "run.name=scored", *begin).values("val/bpb")[0] == scores[6]
    others = runner.train(recipe, "run.name=plain", "train.save_strategy=no").values("train/loss")
    assert losses[6] != others[6]
    assert losses[6] == pytest.approx(others[6], rel=2e-2)
    directory = runner.kill(recipe, "train.fp8=true", "samples.every_steps=3", name="cut", after_step=4)
    cut = runner.train(recipe, "run.name=cut", "train.fp8=true", "samples.every_steps=3")
    assert "going on from checkpoint-" in cut.output
    assert (cut.values("train/loss"), cut.values("val/bpb")) == (losses, scores)
    for file in ("checkpoints/checkpoint-6/model.safetensors", "model/model.safetensors"):
        assert (directory / file).read_bytes() == (uncut.directory / file).read_bytes()


def test_switching_for_evaluations_and_samples_compiles_nothing_again(runner):
    recipe = runner.recipe("compiled", "modern", train=SHORT)
    more = [
        "train.fp8=true",
        "train.torch_compile=true",
        "train.torch_compile_backend=aot_eager",
        "samples.every_steps=3",
    ]
    run = runner.train(recipe, *more, TORCH_LOGS="recompiles,graph_breaks,aot_graphs")
    assert len(run.values("val/bpb")) == 3
    assert len(set(re.findall(r"===== Forward graph (\d+) =====", run.output))) == 3  # steps, rows, documents
    assert "Recompiling" not in run.output
    assert "Graph break" not in run.output


def problems_of(recipe, device=CPU):
    problems = kernel_problems(recipe, device)
    assert all(": train.fp8: " in str(problem) for problem in problems), problems
    return [(type(problem), str(problem)) for problem in problems]


def test_float8_is_refused_without_the_gpu_the_package_or_matrices_for_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (gpu, package) = problems_of(read_recipe([QUICKSTART, *SMALL, *FP8]))
    assert gpu[0] is RecipeError
    assert "compute capability 8.9 (Ada, Hopper) or later, not a CPU" in gpu[1]
    assert package[0] is InputMissingError
    assert "needs the package torchao" in package[1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(checks, "has_capability", lambda device, least, amd=False: True)
    assert problems_of(read_recipe([QUICKSTART, *SMALL, *FP8])) == []
    adamw = ["optimizer.type=adamw", "optimizer.groups=null", "model.preset=gpt2"]
    assert "have biases, as GPT-2's" in problems_of(read_recipe([QUICKSTART, *SMALL, *FP8, *adamw]))[0][1]
    assert (
        "is for model.type tandem"
        in problems_of(read_recipe([QUICKSTART, *SMALL, *FP8, *adamw, "model.type=llama"]))[0][1]
    )


def test_capability_8_9_is_where_float8_begins(monkeypatch):
    gpu = DeviceInfo("cuda", "a GPU", 1, 80.0)
    for capability, has in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert checks.has_capability(gpu, (8, 9)) is has


def test_launcher_fp8_mixed_precision_is_refused_in_favour_of_our_key(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    ((_, sentence),) = problems_of(read_recipe([QUICKSTART, *SMALL]))
    assert "Write train.fp8: true and bf16: true, or mixed_precision: bf16 there." in sentence


@pytest.mark.parametrize("beside", [["train.bf16=false"], ["train.bf16=false", "train.fp16=true"]])
def test_float8_stands_beside_bfloat16_only(beside):
    with pytest.raises(RecipeError, match=r"train\.fp8: needs bf16"):
        read_recipe([QUICKSTART, *SMALL, "train.fp8=true", *beside])


def test_a_model_without_a_matrix_to_convert_is_refused_before_training():
    recipe = read_recipe([QUICKSTART, *SMALL, *FP8])
    small = {"model.n_embd": 24, "model.n_head": 2, "model.n_kv_head": 2, "model.n_inner": 40}
    recipe = with_values(recipe, small)
    with pytest.raises(RecipeError, match=r"train\.fp8: a TandemForCausalLM of these sizes has no matrix for it"):
        build_from_recipe(recipe, Ids())
