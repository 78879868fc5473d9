"""The plan's numbers, and the command that prints them without GPU, network or torch."""

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.hardware.accelerators import device_without_torch, planned_device
from pipeline.hardware.rates import ProductRates
from pipeline.plan import plan as planning
from pipeline.plan.__main__ import main
from pipeline.plan.plan import CPU_MFU, evaluation_tokens, make_plan, num_evaluations, plan_of_run
from pipeline.plan.probe import Probe
from pipeline.plan.table import plan_table, why_unknown
from pipeline.process.errors import CannotWriteError
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import sizes_of
from pipeline.recipe.schema import Bpb
from pipeline.run_dir.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
FINEWEB = str(ROOT / "recipes" / "fineweb_d24.yaml")
QUICKSTART = str(ROOT / "recipes" / "quickstart_pretrain.yaml")


def plan_of(*arguments, hardware="8xH100", processes=8):
    return make_plan(read_recipe(list(arguments)), planned_device(hardware), processes=processes)


def preflight(*arguments, torch=True):
    """The command's result; torch=False makes any import of torch fail."""
    block = "" if torch else "import sys; sys.modules['torch'] = None; "
    code = f"{block}import runpy, sys; sys.argv = ['preflight', *sys.argv[1:]]; runpy.run_module('pipeline.preflight', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


def line(text, label):
    return next(row for row in text.splitlines() if row.strip().startswith(label)).strip()[len(label) :].strip()


def test_the_command_prints_the_published_numbers_of_depth_24_without_torch():
    done = preflight(FINEWEB, torch=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert line(text, "parameters ") == "1,384.1M"
    assert line(text, "value embeddings") == "604.0M"
    assert line(text, "scaling parameters (matrices + head)") == "729.8M"
    assert line(text, "FLOPs a token, nanochat's formula") == "4.775e9"
    assert line(text, "FLOPs a token, exact-causal") == "4.641e9"
    assert line(text, "steps") == "5,568 of 1,048,576 tokens"
    assert line(text, "FLOPs, nanochat's formula") == "2.79e19"
    assert line(text, "hardware") == "8 x H100"
    assert "not checked: the data of HuggingFaceFW/fineweb-edu, which need the network" in text


@pytest.mark.parametrize("more", ["train.torch_compile=auto", "train.torch_compile=true"])
def test_a_run_on_this_machine_is_planned_and_checked_without_torch(tmp_path, more):
    done = preflight(QUICKSTART, f"run.directory={tmp_path}", more, torch=False)
    assert done.returncode == 0, done.stderr
    assert "not checked: callbacks, tasks and the options of the model, which need torch" in done.stdout
    assert "nothing was found that would stop this run" in done.stdout


def test_depths_are_planned_side_by_side_from_each_depths_own_dial():
    done = preflight(FINEWEB, "--depths", "16,20,24", torch=False)
    assert done.returncode == 0, done.stderr
    assert line(done.stdout, "parameters ").split() == ["536.9M", "896.5M", "1,384.1M"]
    assert re.findall(r"([\d,]+) of ([\d,]+) tokens", line(done.stdout, "steps")) == [
        ("3,584", "524,288"),
        ("3,320", "1,048,576"),
        ("5,568", "1,048,576"),
    ]


def test_an_override_changes_the_plan():
    done = preflight(FINEWEB, "train.max_steps=100", "run.hardware=2xA100", "run.gpu_hour_cost=2.5", torch=False)
    assert line(done.stdout, "steps") == "100 of 1,048,576 tokens"
    assert line(done.stdout, "processes x rows x micro-steps") == "2 x 16 x 16"
    assert float(line(done.stdout, "cost (run.gpu_hour_cost)")) > 0


def test_time_energy_and_cost_follow_from_the_peak_and_a_named_mfu():
    plan = plan_of(FINEWEB, "run.gpu_hour_cost=3")
    flops = plan.sizes.flops_per_token("exact_causal") * plan.tokens
    assert flops / (plan.duration.steps * 989.5e12 * 8) == pytest.approx(plan.duration.mfu)
    assert f"h, at an assumed MFU of {plan.duration.mfu:.0%}" in plan_table([plan])
    assert plan.duration.total > plan.duration.steps
    assert plan.device_hours == pytest.approx(8 * plan.duration.total / 3600)
    assert plan.energy_kwh == pytest.approx(plan.device_hours * 0.7)
    assert plan.cost == pytest.approx(3 * plan.device_hours)
    # fp32 without TF32 has a fifteenth of the peak.
    slow = plan_of(FINEWEB, "train.bf16=false")
    assert slow.duration.steps == pytest.approx(plan.duration.steps * 989.5 / 67)
    narrow = plan_of(FINEWEB, "model.n_embd=256", "model.n_head=2")
    assert narrow.duration.mfu == pytest.approx(plan.duration.mfu / 3)


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """Plans of the quickstart on a processor of 4 cores whose products are known."""
    monkeypatch.setattr(planning, "product_rates", lambda: ProductRates(float32=1e11, bfloat16=2e11, time=0.0))
    monkeypatch.setattr(planning, "physical_cores", lambda: 4)

    def make(*overrides, scored_bytes=None, processes=1):
        given = [QUICKSTART, f"data.cache_dir={tmp_path}", "train.bf16=false", "train.torch_compile=false", *overrides]
        device = replace(device_without_torch(), kind="cpu", name="A processor", peak_flops=None)
        return make_plan(read_recipe(given), device, processes=processes, scored_bytes=scored_bytes)

    return make


def test_on_a_processor_the_peak_is_its_measured_products(on_cpu):
    plan = on_cpu("train.max_steps=100")
    flops = plan.sizes.flops_per_token("exact_causal") * plan.tokens
    assert plan.duration.steps == pytest.approx(flops / (CPU_MFU * 4 * 1e11))
    halved = on_cpu("train.max_steps=100", "train.per_device_train_batch_size=2", processes=2)
    assert halved.duration.steps == pytest.approx(plan.duration.steps)  # half the work on half the cores


def test_a_probe_of_the_steps_counts_before_arithmetic(on_cpu):
    plan = replace(on_cpu(), probe=Probe(step_s=0.5, steps=9, first_step_s=7.0, peak_bytes=2**30))
    assert plan.duration.source == "as probed"
    assert plan.duration.steps == pytest.approx(0.5 * plan.tokens / plan.batch_tokens)
    assert line(plan_table([plan]), "memory a process, as probed") == "1.0 GiB"


def test_evaluations_and_saves_are_in_the_time(on_cpu):
    assert num_evaluations(on_cpu().recipe.train, 2400, at_start=True) == 1 + 3
    assert num_evaluations(on_cpu("train.eval_strategy=no").recipe.train, 1900, at_start=False) == 1
    few, many = (on_cpu(f"train.eval_steps={n}", scored_bytes=10**6).duration for n in (2400, 100))
    assert many.evaluations == pytest.approx(few.evaluations * 21 / 2)
    assert on_cpu("train.save_strategy=no").duration.saves == 0 < few.saves
    assert few.total == pytest.approx(few.start + few.steps + few.evaluations + few.saves)


def test_the_plan_of_a_run_counts_the_vocabulary_that_its_text_gave(on_cpu, tmp_path):
    recipe, run = on_cpu("tokenizer.vocab_size=4096").recipe, RunDirectory(tmp_path / "run")
    run.update_manifest(inputs={"tokenizer": {"identity": "x", "size": 3318}})
    plan = plan_of_run(recipe, run, micro_batch=2, processes=1)
    assert plan.facts()["parameters"] == sizes_of(recipe, 3318).parameters()["total"]
    assert plan.facts()["steps"] == recipe.train["max_steps"]


def test_a_model_that_one_device_does_not_hold_is_planned_sharded(capsys, monkeypatch):
    assert main([str(ROOT / "recipes" / "fineweb_d52.yaml")]) == 0
    assert line(capsys.readouterr().out, "layout") == "FSDP2, a model on 512 devices"
    whole = plan_of(FINEWEB).memory.weights
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    launched = plan_of(FINEWEB)
    assert launched.shards == 8
    assert launched.memory.weights < whole / 3


def test_what_is_unknown_is_printed_as_such_and_never_as_zero(tmp_path):
    recipe = read_recipe([QUICKSTART, "run.hardware=null", f"data.cache_dir={tmp_path}"])
    unknown = replace(device_without_torch(), kind="cuda", name="NVIDIA Nonesuch", peak_flops=None)
    plan = make_plan(recipe, unknown, processes=1)
    assert plan.duration is None
    for label in ("time, without preparing data and benchmarks", "device hours", "cost (run.gpu_hour_cost)"):
        assert line(plan_table([plan]), label) == "n/a"
    assert any(reason.startswith("time, since the peak of NVIDIA Nonesuch") for reason in why_unknown(plan))


def test_a_plan_in_epochs_of_local_text_estimates_its_steps_and_time(text_files, tmp_path, capsys):
    sources = f"data.sources=[{{files: {text_files[0]}}}]"
    given = ["own_text", sources, f"data.validation=[{{files: {text_files[2]}}}]", f"data.cache_dir={tmp_path}"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(r"about \d+ of 4,096 tokens", line(text, "steps"))
    assert "at an assumed MFU of" in line(text, "time, without preparing data and benchmarks")
    assert "the run has" in text  # fewer steps than train.save_steps


def test_a_plan_in_epochs_counts_nothing_it_would_fetch_or_cannot_keep(
    text_files, chat_files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "pipeline.tokenizer.load.ready_tokenizer", lambda recipe: pytest.fail("a tokenizer is fetched")
    )
    (tmp_path / "file").touch()
    text = ["own_text", f"data.sources=[{{files: {text_files[0]}}}]", f"data.validation=[{{files: {text_files[2]}}}]"]
    chat = [
        "own_chat",
        *(
            f"data.{name}=[{{files: {path}}}]"
            for name, path in zip(("sources", "validation"), chat_files, strict=False)
        ),
    ]
    for given in (
        [*chat, "model.start_from=owner/name", f"data.cache_dir={tmp_path}"],
        [*text, "tokenizer.path=gpt2", f"data.cache_dir={tmp_path}"],
        [*text, f"data.cache_dir={tmp_path}/file/cache"],
    ):
        with suppress(CannotWriteError):  # what the checks say of a folder that cannot be made
            main(given)
        assert "n/a" in line(capsys.readouterr().out, "steps"), given


def test_epoch_plans_count_their_text_once_for_all_depths(text_files, tmp_path, capsys, monkeypatch):
    counted = []
    monkeypatch.setattr(
        "pipeline.data.estimate.about_tokens", lambda settings, *_, **__: counted.append(settings) or (1e6, 1000)
    )
    sources = [f"data.sources=[{{files: {text_files[0]}}}]", f"data.validation=[{{files: {text_files[2]}}}]"]
    assert main(["own_text", *sources, f"data.cache_dir={tmp_path}", "--depths", "2,3"]) == 0
    assert len(counted) == 1
    assert re.findall(r"about [\d,]+ of", line(capsys.readouterr().out, "steps")) == ["about 244 of"] * 2


def test_an_unknown_optimizer_has_no_checkpoint_size():
    plan = plan_of(
        QUICKSTART,
        "optimizer.type=trainer",
        "optimizer.groups=null",
        "optimizer.schedule=null",
        "train.optim=adafactor",
    )
    assert plan.checkpoint_bytes is None
    assert plan.memory.total is None
    assert line(plan_table([plan]), "checkpoint") == "n/a"


@pytest.mark.parametrize(
    ("processes", "rows", "micro_steps", "padding"),
    [(8, 16, 4, 0.0), (7, 16, 5, 1 - 512 / 560), (3, 10, 18, 1 - 512 / 540)],
)
def test_padding_micro_steps_are_counted_for_any_number_of_processes(processes, rows, micro_steps, padding):
    plan = plan_of(FINEWEB, f"train.per_device_train_batch_size={rows}", processes=processes)
    assert plan.micro_steps == micro_steps
    assert plan.padding_share == pytest.approx(padding)


def test_a_batch_given_by_accumulation_follows_the_processes():
    plan = plan_of(QUICKSTART, "data.batch_tokens=null", "train.gradient_accumulation_steps=4", processes=2)
    assert plan.batch_tokens == 2 * 4 * 4 * 256
    assert plan.padding_share == 0


def test_hardware_that_nobody_knows_is_refused_with_the_known_names():
    done = preflight(FINEWEB, "run.hardware=8xH9", torch=False)
    assert done.returncode == 64
    assert "run.hardware: '8xH9' is no hardware we know" in done.stderr
    assert "H100" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["no_such.yaml"], [FINEWEB, "model.depht=3"], [FINEWEB, "--depths", "0"]])
def test_a_wrong_command_line_is_reported_without_a_traceback(arguments):
    done = preflight(*arguments, torch=False)
    assert done.returncode != 0
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_scored_is_known_from_the_data_once_they_are_open():
    limits = Bpb(tokens=131_072, document_bytes=200_000)
    assert evaluation_tokens(limits, 350_000) == pytest.approx(100_000)
    assert 2 * 200_000 / 3.5 < evaluation_tokens(limits, None) < 131_072 + 200_000 / 3.5
