"""How long a run takes: what a probe, a finished run and arithmetic say of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.preflight import plan as durations
from pipeline.preflight.devices import ProductRates, device_without_torch, planned_device
from pipeline.preflight.plan import (
    CPU_MFU,
    Probe,
    Span,
    evaluation_tokens,
    evaluations_of,
    finished_runs,
    make_plan,
    plan_of_run,
    remember,
)
from pipeline.recipe import read_recipe
from pipeline.recipe.sizes import sizes_of
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart_pretrain.yaml")
KIND = ("train.bf16=false", "train.torch_compile=false")
PROBE = Probe(step_s=0.5, low_s=0.4, high_s=0.9, steps=9, first_step_s=7.0, peak_bytes=2**30, time=1.0)


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    rates = ProductRates(float32=1e11, bfloat16=2e11, time=0.0)
    monkeypatch.setattr(durations, "product_rates", lambda: rates)
    monkeypatch.setattr(durations, "physical_cores", lambda: 4)

    def make(*overrides, kind=KIND, hardware=None, scored_bytes=None, processes=1):
        recipe = read_recipe([QUICKSTART, f"data.cache_dir={tmp_path}", *kind, *overrides])
        device = replace(device_without_torch(), kind="cpu", name="A processor", peak_flops=None)
        device = planned_device(hardware) if hardware else device
        return make_plan(recipe, device, processes=processes, scored_bytes=scored_bytes)

    return make


def finish(plan, folder, *, run="before", step_s=0.4, **more):
    """Let a run of that plan have finished: ten steps, two evaluations of 2 s, a save of 0.1 s, and 20 s beside them, of which
    5 s compile the first evaluation."""
    directory = RunDirectory(folder / run)
    directory.update_manifest(name=run, peak_memory_bytes={"host": 2**30})
    whole_s = 10 * step_s + 2 * 2.0 + 0.1 + 20.0
    append_row(directory.metrics, {"event": "attempt", "attempt": 1, "step": 0, "time": 100.0})
    rows = {5: {"perf/eval_s": 7.0}, 10: {"perf/eval_s": 2.0, "ckpt/save_s": 0.1, **more}}
    for step, more in rows.items():
        append_row(directory.metrics, {"step": step, "attempt": 1, "time": 100 + whole_s * step / 10, "train/loss": 2.0, "perf/step_s": step_s} | more)  # fmt: skip
    remember(plan, directory)


def test_on_a_processor_the_range_is_a_share_of_its_measured_products(plan_of):
    step = plan_of("train.max_steps=100").duration.step
    flops = plan_of().sizes.flops_per_token("exact_causal") * 1024
    assert step.low == pytest.approx(flops / (CPU_MFU[1] * 4 * 1e11))
    assert step.high == pytest.approx(flops / (CPU_MFU[0] * 4 * 1e11))
    halved = plan_of("train.per_device_train_batch_size=2", processes=2)  # half the work on half the cores
    assert halved.duration.step.high == pytest.approx(step.high)


def test_narrow_models_are_not_promised_a_wide_ones_share_of_a_gpu(plan_of):
    spans = [plan_of(f"model.n_embd={width}", hardware="1xH100").duration.step for width in (256, 768, 1536)]
    assert [round(span.high / span.low, 2) for span in spans] == [round(0.55 / 0.15 * 9, 2), 3.67, 3.67]


def test_a_finished_run_of_this_machine_tells_the_next_ones_time_and_the_range_grows_with_the_distance(
    plan_of, tmp_path
):
    finish(plan_of(), tmp_path)
    plan = plan_of()
    assert plan.duration.step.value == pytest.approx(0.4)
    assert plan.duration.start.value == pytest.approx(20.0)
    assert plan.duration.evaluations.value == pytest.approx(2.0 * evaluations_of(plan.recipe, plan.steps))
    assert plan.duration.source.startswith("by run before of 20")
    larger = plan_of("model.n_embd=512", "model.n_head=8").duration.step
    assert larger.value > 2 * plan.duration.step.value
    assert larger.high / larger.low > plan.duration.step.high / plan.duration.step.low


def test_a_finished_run_tells_what_a_process_takes_beside_its_tensors(plan_of, tmp_path):
    before = plan_of().memory
    finish(plan_of(), tmp_path)
    finish(plan_of(), tmp_path)  # planned by the first one, it says the same
    plan = plan_of()
    assert plan.memory.total == 2**30
    assert plan.memory.activations == before.activations
    larger = plan_of("model.n_embd=512", "model.n_head=8")
    assert larger.memory.process == larger.least_memory.process == plan.memory.process != before.process
    assert plan_of(processes=2).memory.process == before.process


def test_a_run_that_scored_no_bytes_is_remembered_without_a_share(plan_of, tmp_path):
    finish(plan_of(scored_bytes=0), tmp_path)
    (run,) = finished_runs(plan_of().recipe)
    assert run.scored_token_share is None


def test_the_plan_of_a_run_counts_the_vocabulary_that_its_text_gave(plan_of, tmp_path):
    recipe, run = plan_of("tokenizer.vocab_size=4096").recipe, RunDirectory(tmp_path / "run")
    run.update_manifest(inputs={"tokenizer": {"identity": "x", "size": 3318}})
    plan = plan_of_run(recipe, run, micro_batch=2, processes=1)
    assert plan.facts()["parameters"] == sizes_of(recipe, 3318).parameters()["total"]
    assert plan.facts()["steps"] == recipe.train["max_steps"]


def test_benchmarks_of_a_finished_run_are_not_taken_for_its_start(plan_of, tmp_path):
    finish(plan_of(), tmp_path, **{"chat/eval_s": 3.0})
    assert plan_of().duration.start.value == pytest.approx(20.0 - 3.0)


@pytest.mark.parametrize(
    "other",
    [["train.bf16=true"], ["train.torch_compile=true"], ["optimizer.type=trainer", "optimizer.groups=null", "optimizer.schedule=null"]],
)  # fmt: skip
def test_a_finished_run_of_another_kind_says_nothing(plan_of, other, tmp_path):
    finish(plan_of(), tmp_path)
    assert plan_of().duration.source.startswith("by run before")
    mine = [setting for setting in KIND if setting.partition("=")[0] != other[0].partition("=")[0]]
    assert plan_of(kind=[*mine, *other]).duration.source.startswith("by arithmetic")
    assert plan_of(processes=2).duration.source.startswith("by arithmetic")


def test_a_probe_of_the_steps_counts_before_a_finished_run(plan_of, tmp_path):
    finish(plan_of(), tmp_path)
    duration = replace(plan_of(), probe=PROBE).duration
    assert (duration.source, duration.step.value) == ("as probed", 0.5)
    assert (duration.step.low, duration.step.high) == pytest.approx((0.5 / 1.15, 0.5 * 1.15))


def test_the_newest_of_equal_runs_counts_and_only_so_many_are_kept(plan_of, monkeypatch, tmp_path):
    monkeypatch.setattr(durations, "KEPT_RUNS", 3)
    for number in range(5):
        finish(plan_of(), tmp_path, run=f"run-{number}", step_s=0.1 * (1 + number))
    assert [run.run for run in finished_runs(plan_of().recipe)] == ["run-2", "run-3", "run-4"]
    assert plan_of().duration.step.value == pytest.approx(0.5)


def test_evaluations_and_saves_are_in_the_time(plan_of):
    assert evaluations_of(plan_of().recipe, 2400) == 1 + 3
    assert evaluations_of(plan_of("train.eval_strategy=no", "evals.bpb.at_start=false").recipe, 1900) == 1
    few, many = (plan_of(f"train.eval_steps={n}", scored_bytes=10**6).duration for n in (2400, 100))
    assert many.evaluations.value == pytest.approx(few.evaluations.value * 21 / 2)
    assert plan_of("train.save_strategy=no").duration.saves.high == 0 < few.saves.low
    parts = (few.start, few.steps, few.evaluations, few.benchmarks, few.saves)
    assert few.total.value == pytest.approx(sum(p.value for p in parts))


def test_core_and_chat_tasks_are_in_the_time_by_how_often_they_are_scored(plan_of):
    assert plan_of().duration.benchmarks == Span(0, 0, 0)
    core = [plan_of("evals.core.every_steps=600", *more).duration.benchmarks for more in ([], ["evals.core.max_s=1"])]
    once = plan_of("evals.core.every_steps=2400").duration.benchmarks
    assert core[0].value == pytest.approx(once.value * 4)
    assert core[1].high == pytest.approx(4)
    letters = ["evals.chat.every_steps=1200", "evals.chat.tasks=[mmlu]"]
    written = ["evals.chat.every_steps=1200", "evals.chat.tasks=[gsm8k]"]
    two, four = (plan_of(*letters, f"evals.chat.max_per_task={n}").duration.benchmarks for n in (100, 200))
    assert four.value == pytest.approx(2 * two.value)
    assert plan_of(*letters, "evals.chat.at_start=true").duration.benchmarks.value == pytest.approx(four.value * 1.5)
    assert plan_of(*written).duration.benchmarks.value > four.value
    assert plan_of(*written, "evals.chat.max_new_tokens=32").duration.benchmarks.value < plan_of(*written).duration.benchmarks.value  # fmt: skip


def test_what_is_scored_is_known_from_the_data_once_they_are_open(plan_of):
    # More than the quickstart's validation has, so that the range is one.
    recipe = plan_of("evals.bpb.tokens=131072", "evals.bpb.document_bytes=200000").recipe
    unknown, known = evaluation_tokens(recipe, None), evaluation_tokens(recipe, 350_000)
    assert known.value == pytest.approx(100_000)
    assert unknown.high == pytest.approx(131_072 + 200_000 / 3.5)
    assert unknown.low < unknown.value < unknown.high


def test_a_damaged_or_unwritable_table_of_finished_runs_is_left_aside(plan_of, tmp_path):
    (tmp_path / "finished_runs.json").write_text('{"runs": [{"run": 7}]}')
    assert finished_runs(plan_of().recipe) == []
    finish(plan_of(), tmp_path)
    assert len(finished_runs(plan_of().recipe)) == 1
    (tmp_path / "finished_runs.json").unlink()
    (tmp_path / "finished_runs.json").mkdir()
    finish(plan_of(), tmp_path)
    assert finished_runs(plan_of().recipe) == []
