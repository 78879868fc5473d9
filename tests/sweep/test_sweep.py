"""`python -m pipeline.sweep`: values to try, verdicts as the textbooks give them, and real runs that stop and go on."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from pipeline.hardware.accelerators import device_without_torch
from pipeline.plan.plan import make_plan
from pipeline.process.errors import RecipeError, TandemError
from pipeline.process.storage import write_json
from pipeline.recipe import read_recipe
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sweep import (
    Figure,
    RefusedError,
    Runs,
    Sweep,
    _options,
    distributions,
    grid,
    holm,
    judge_all,
    main,
    paired,
    read_space,
    search,
)
from tests.runner import Runner

ROOT = Path(__file__).parents[2]


def test_several_values_and_distributions_are_tried_and_single_values_fixed():
    fixed, space = read_space(
        ["a.x=1", "a.l=[1,2]", "a.b=[0.8,0.9],[0.9,0.95]", "a.c=2,4,6",
         "a.i=FloatDistribution(0.1, 2)", "a.n=IntDistribution(2, 64, log=True)"]
    )  # fmt: skip
    assert fixed == ["a.x=1", "a.l=[1,2]"]
    assert space == {
        "a.b": ["[0.8,0.9]", "[0.9,0.95]"],
        "a.c": ["2", "4", "6"],
        "a.i": ["FloatDistribution(0.1, 2)"],
        "a.n": ["IntDistribution(2, 64, log=True)"],
    }
    assert grid({"a": ["1", "2"], "b": ["x", "y"]})[1:3] == [{"a": "1", "b": "y"}, {"a": "2", "b": "x"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.x=1,,2"], "empty value"),
        (["a.x=1,2", "a.x=3,4"], "given twice"),
        (["a.x=1", "a.x=3,4"], "for every run and a list"),
    ],
)
def test_values_that_mean_nothing_are_refused(words, message):
    with pytest.raises(RecipeError, match=message):
        read_space(words)


@pytest.mark.parametrize("text", ["FloatDistribution(2,1)", "FloatDistribution(0, 1, log=True)", "IntDistribution(x)", "FloatDistribution(1 2)"])  # fmt: skip
def test_a_distribution_that_optuna_refuses_ends_in_a_sentence(text):
    pytest.importorskip("optuna")
    with pytest.raises(RecipeError, match=r"^command line: a\.x: Optuna does not take .* Write FloatDistribution"):
        distributions({"a.x": [text]})


def test_a_distribution_needs_a_search():
    with pytest.raises(RecipeError, match="--trials N"):
        grid({"a": ["FloatDistribution(1, 2)"]})


def test_the_paired_test_is_that_of_the_textbook():
    # Student's sleep data (1908): t = 4.0621, 9 degrees of freedom, p = 0.002833, interval 0.70 to 2.46 (R's t.test).
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    other = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired([b - a for a, b in zip(first, other, strict=True)])
    assert test["difference"] == pytest.approx(1.58)
    assert test["p"] == pytest.approx(0.00283289, rel=1e-4)
    assert test["interval"] == pytest.approx([0.7001142, 2.4598858], rel=1e-5)
    # With 2 degrees of freedom p = 1 - t / sqrt(2 + t^2).
    t = 2.0 / (1.0 / math.sqrt(3))
    assert paired([1.0, 2.0, 3.0])["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-4)


def test_one_seed_and_equal_differences_have_no_chance():
    assert paired([0.5])["p"] is None
    assert paired([0.0, 0.0, 0.0])["p"] is None


def test_holm_corrects_as_his_paper_does():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def figures(*values, protocol="p"):
    return [Figure("run", 42 + n, "finished", value, protocol) for n, value in enumerate(values)]


def test_a_verdict_goes_by_pairs_direction_correction_and_protocol():
    baseline = figures(1.0, 2.0, 3.0)
    candidates = [
        figures(0.9, 1.91, 2.89),  # the seeds differ by far more than the pairs
        figures(1.1, 2.09, 3.11),
        figures(0.5, 2.4, 2.9),
        figures(0.9),
        figures(0.9, 1.9, 2.9, protocol="q"),
        [Figure("run", 42, "failed (status 70, HangError)")],
    ]
    found = judge_all(baseline, candidates, better="lower")
    assert [one["verdict"] for one in found] == ["better", "worse", "not shown", "not shown", "not comparable", "failed (status 70, HangError)"]  # fmt: skip
    assert judge_all(baseline, candidates[:1], better="higher")[0]["verdict"] == "worse"
    p = found[0]["p"]
    assert found[0]["p_holm"] == pytest.approx(3 * p)
    many = judge_all(baseline, candidates[:1] * 20, better="lower")
    assert p < 0.05 < 20 * p
    assert {one["verdict"] for one in many} == {"not shown"}


def test_a_candidate_of_which_a_seed_diverged_is_never_better():
    diverged = Figure("run", 44, "failed (status 76, DivergedError)")
    baseline, survivors = figures(1.0, 2.0, 3.0), figures(0.9, 1.91)
    found = judge_all(baseline, [[*survivors, diverged], figures(0.9, 1.91, 2.89)], better="lower")
    assert [one["verdict"] for one in found] == ["diverged (1 of 3)", "better"]
    assert found[0]["p"] is None
    assert found[1]["p_holm"] == found[1]["p"]  # corrected for what could be tested


def test_a_search_that_was_interrupted_proposes_what_the_uncut_one_does(tmp_path):
    pytest.importorskip("optuna")

    space = {"a": ["FloatDistribution(1e-3, 1.0, log=True)"], "b": ["x", "y"], "c": ["IntDistribution(1, 9)"]}

    def proposals(name, *, dies_at):
        (tmp_path / name).mkdir()
        tried, left = [], iter(dies_at)
        dies = next(left, None)

        def attempt(values):
            nonlocal dies
            if len(tried) == dies:
                dies = next(left, None)
                raise KeyboardInterrupt
            tried.append(values)
            return [abs(math.log10(float(values["a"])) + 2) + int(values["c"]) / 10 + n / 100 for n in range(3)]

        for _ in range(len(dies_at) + 1):
            try:
                file = tmp_path / name / "optuna.db"
                search(space, attempt, trials=12, study=name, file=file, better="lower")
            except KeyboardInterrupt:
                continue
        return tried

    uncut = proposals("uncut", dies_at=[])
    assert len(uncut) == 12
    assert proposals("cut", dies_at=[5, 9]) == uncut


def test_a_refused_proposal_is_a_failed_trial_and_the_search_goes_on(tmp_path, capsys):
    optuna = pytest.importorskip("optuna")
    space = {"a": ["IntDistribution(1, 4)"]}

    def attempt(values):
        if values["a"] in "13":
            raise RefusedError(f"a={values['a']}: does not divide 32.\nMore.")
        return [1.0, 2.0]

    search(space, attempt, trials=6, study="n", file=tmp_path / "optuna.db", better="lower")
    trials = optuna.load_study(study_name="n", storage=f"sqlite:///{tmp_path / 'optuna.db'}").get_trials()
    states = [("FAIL" if trial.params["a"] in (1, 3) else "COMPLETE") for trial in trials]
    assert [trial.state.name for trial in trials] == states
    assert set(states) == {"FAIL", "COMPLETE"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == states.count("FAIL")
    assert all(re.fullmatch(r"trial \d: a=[13]: does not divide 32\.", line) for line in lines)


def test_a_search_with_other_values_than_its_study_began_with_is_refused(tmp_path):
    pytest.importorskip("optuna")

    def run(trials, values):
        file = tmp_path / "optuna.db"
        search({"b": values}, lambda values: [1.0], trials=trials, study="n", file=file, better="lower")

    run(1, ["x", "y"])
    with pytest.raises(RecipeError, match="give another --name"):
        run(2, ["x", "z"])


def test_without_optuna_a_search_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RecipeError, match=r"tandem-llm\[sweep\]"):
        distributions({"a": ["1", "2"]})


@pytest.fixture
def recipe(tmp_path, text_files, cache, chat_files):
    return Runner(tmp_path, cache, text_files, chat_files).recipe("tiny", "gpt2", run={"stage": "pretrain"})


def sweep(folder, *arguments):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.sweep", *map(str, arguments)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.max_steps=10,20"], "--equal none"),
        (["train.seed=1,2"], "--seeds"),
        (["run.name=x", "model.n_embd=16,64"], "--name"),
        (["model.n_embd=16,wide"], "model.n_embd"),
        (["train.learning_rate=FloatDistribution(1e-4,1e-1)", "--trials", "2"], "train.learning_rate: is not used"),
        (["model.n_embd=16,64", "--metric", "optim/lr"], "no number of which more or less is better"),
        (["train.num_train_epochs=1", "model.n_embd=16,64", "--equal", "flops"], "in epochs"),
        (["model.n_embd=32,30", "model.n_head=2,4"], "^model.n_embd=30, model.n_head=4: .* not a multiple"),
        (["run.directory=a,b"], "run.directory: is the same for all runs"),
        (["run.resume=auto,never", "hub.private=true,false"], "hub.private, run.resume: is the same for all runs"),
        (["hub.id=me/model", "model.n_embd=16,64"], "hub.id: .* push RUN"),
    ],
)
def test_a_sweep_that_cannot_mean_what_it_says_starts_no_run(recipe, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=message):
        main([str(recipe), *words])
    assert not (tmp_path / "runs").exists()


def test_a_number_of_processes_that_is_none_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC", "x")
    with pytest.raises(RecipeError, match="NPROC is 'x'; it must be a whole number, 1 or more"):
        main([str(recipe), "model.n_embd=16,64"])


@pytest.mark.parametrize(("equal", "steps"), [("tokens", 35), ("flops", 35), ("time", 25), ("none", 20)])
def test_a_candidate_with_smaller_first_batches_gets_as_much_in_more_steps(recipe, equal, steps):
    def plan_of(*overrides):
        return make_plan(read_recipe([str(recipe), *overrides]), device_without_torch(), processes=1)

    base, small = plan_of(), plan_of("optimizer.schedule.batch_warmup_steps=24")  # 12 of 2 rows and 12 of 4, then of 8
    asked = Namespace(options=Namespace(equal=equal), plan=base, record={"baseline": {"step_s": 1.0}})
    step_s = 2.0 if equal == "time" else None  # of a whole batch, twice as slow
    assert Sweep._steps(asked, small, step_s) == steps
    assert Sweep._steps(asked, base, step_s) == (10 if equal == "time" else 20)


def test_a_candidates_time_is_measured_beside_the_baselines(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measured = iter([1.0, 3.0, 2.0])  # the baseline, then the candidate on a machine that takes twice as long now
    monkeypatch.setattr(Sweep, "_step_s", lambda self, overrides: next(measured))
    sweep = Sweep(_options([str(recipe), "--equal", "time"]), [])
    entry = sweep.entry({"model.n_embd": "64"})
    assert (entry["step_s"], entry["steps"]) == (1.5, sweep.plan.steps * 2 // 3)


def test_a_sweep_judges_ordinary_runs_and_makes_none_of_them_again(recipe, tmp_path):
    command = [recipe, "train.max_steps=4", "train.seed=7", "model.n_embd=64,32", "--seeds", "1", "--parallel", "2", "--equal", "flops", "--name", "s"]  # fmt: skip
    output = (done := sweep(tmp_path, *command)).communicate(timeout=300)[0]
    assert done.returncode == 0, output
    record = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    (candidate,) = record["candidates"]  # 32 is the recipe's own
    assert candidate["values"] == {"model.n_embd": "64"}
    assert 1 <= candidate["steps"] < 4
    assert candidate["verdict"] == "not shown"
    for entry in (record["baseline"], candidate):
        (run,) = entry["runs"]
        assert run["seed"] == 7
        rows = read_rows(Path(run["run"]) / "metrics.jsonl")
        assert [row["val/bpb"] for row in rows if "val/bpb" in row] == [run["value"]]
        assert max(row["step"] for row in rows) == entry["steps"]
    assert record["complete"]
    assert "model.n_embd=64" in (tmp_path / "sweeps" / "s" / "sweep.md").read_text()
    files = [tmp_path / "sweeps" / "s" / name for name in ("sweep.json", "sweep.md")]
    before = [file.read_bytes() for file in files]
    again = (done := sweep(tmp_path, *command)).communicate(timeout=100)[0]
    assert done.returncode == 0, again
    assert "0 of them to make" in again
    assert [file.read_bytes() for file in files] == before


def test_finished_runs_of_another_baseline_with_the_same_name_are_not_reused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = set()
    for fixed in ([], ["train.max_steps=7"]):
        sweep = Sweep(_options([str(recipe), *fixed, "--name", "s"]), fixed)
        paths.add(sweep.jobs(sweep.record["baseline"], 1)[0].path)
        sweep._held.release()
        (tmp_path / "sweeps").rename(tmp_path / f"lost-{len(paths)}")
    assert len(paths) == 2


@pytest.fixture
def trained(monkeypatch):
    """What was trained, in order: stands in for the runs, which finish at once."""
    trained = []

    def make(self, jobs, *, when_ended):
        for job in jobs:
            run = RunDirectory(job.path)
            if not run.manifest.exists():
                trained.append(job)
                run.path.mkdir(parents=True)
                write_json(run.manifest, {"name": run.name, "status": "finished"})
                numbers = {"step": 4, "val/bpb": 1.0 + job.seed / 10, "val/loss": 2.0 + job.seed / 10}
                run.metrics.write_text(json.dumps(numbers) + "\n")
            when_ended()

    monkeypatch.setattr(Runs, "make", make)
    return trained


def test_spellings_of_one_recipe_are_one_candidate(recipe, tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    main([str(recipe), "train.max_grad_norm=0.50,.5,5e-1,1.0,2", "--seeds", "2", "--name", "s"])
    record = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    assert [one["values"] for one in record["candidates"]] == [{"train.max_grad_norm": text} for text in ("0.50", "2")]
    assert len(trained) == len(set(trained)) == 6  # 1.0 is the recipe's own
    main([str(recipe), "train.max_grad_norm=.50,2.0", "--seeds", "2", "--name", "s"])
    assert len(trained) == 6


def test_another_metric_judges_the_same_runs(recipe, tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    for name in ([], ["--name", "s"]):
        command = [str(recipe), "train.max_grad_norm=0.5,2", "--seeds", "2", *name]
        trained.clear()
        for metric in ("val/bpb", "val/loss"):
            main([*command, "--metric", metric])
            (file,) = (tmp_path / "sweeps").glob("s/sweep.json" if name else "tiny-*/sweep.json")
            record = json.loads(file.read_text())
            assert record["metric"] == metric
            first = record["baseline"]["runs"][0]
            assert first["value"] == (1.7 if metric == "val/bpb" else 2.7)
        assert len(trained) == 6


def test_a_search_goes_on_after_a_proposal_that_the_recipe_refuses(recipe, tmp_path, monkeypatch, trained, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    command = [str(recipe), "model.n_head=4,3,5,8", "--seeds", "1", "--name", "s"]
    main([*command, "--trials", "10"])
    record = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    assert {one["values"]["model.n_head"] for one in record["candidates"]} == {"4", "8"}
    assert re.search(r"trial \d: model.n_head=[35]: .* not a multiple of model.n_head", capsys.readouterr().out)
    table = (tmp_path / "sweeps" / "s" / "sweep.md").read_bytes()
    main([*command, "--trials", "10"])
    assert (tmp_path / "sweeps" / "s" / "sweep.md").read_bytes() == table


def test_a_search_whose_first_values_are_refused_trains_nothing(recipe, tmp_path, monkeypatch, trained):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.n_head=3: .* not a multiple"):
        main([str(recipe), "model.n_head=3,5", "--trials", "2"])
    assert not trained


def test_a_baseline_with_a_diverged_seed_ends_the_sweep_in_a_sentence(recipe, tmp_path, monkeypatch):
    def make(self, jobs, *, when_ended):
        for job in jobs:
            run = RunDirectory(job.path)
            run.path.mkdir(parents=True)
            write_json(run.manifest, {"name": run.name, "status": "running" if job.seed == 8 else "finished"})
            run.metrics.write_text(json.dumps({"step": 4, "val/bpb": 1.0}) + "\n")
            if job.seed == 8:
                write_json(run.failure, {"status": 76, "class": "DivergedError", "message": "m"})
        when_ended()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Runs, "make", make)
    with pytest.raises(
        TandemError, match=r"-s8: failed .*; the baseline diverged \(1 of 3\), .* Make the recipe stable"
    ):
        main([str(recipe), "model.n_embd=16,64", "--name", "s"])
    assert "baseline, diverged (1 of 3)" in (tmp_path / "sweeps" / "s" / "sweep.md").read_text()


def base(folder, name, *, finished):
    """A finished run of the recipe `base`, as far as a later stage looks at it."""
    model = folder / "runs" / name / "model"
    model.mkdir(parents=True)
    write_json(model / "config.json", {"model_type": "gpt2", "n_layer": 2, "n_embd": finished, "n_head": 2, "n_positions": 64, "vocab_size": 512})  # fmt: skip
    write_json(model.parent / "run_manifest.json", {"recipe_name": "base", "stage": "pretrain", "finished": float(finished)})  # fmt: skip


def test_a_base_finished_during_a_sweep_changes_none_of_its_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(
        "model: {start_from: 'latest:base'}\ntrain: {max_steps: 10}\n"
        "data: {sources: [{files: a.jsonl, format: messages}], row_tokens: 64, batch_tokens: 512}\n"
    )
    base(tmp_path, "a", finished=32)
    found = []
    for _ in range(2):
        sweep = Sweep(_options(["sft.yaml"]), [])
        entries = [sweep.record["baseline"], sweep.entry({"train.max_grad_norm": "2"})]
        sweep.update()
        assert sweep.recipe.model.n_embd == 32
        found.append([(sweep.folder, job) for entry in entries for job in sweep.jobs(entry, 1)])
        sweep._held.release()
        base(tmp_path, f"later-{len(found)}", finished=64)
    assert found[0] == found[1]
    for _, job in found[0]:
        assert f"model.start_from={tmp_path / 'runs' / 'a' / 'model'}" in job.overrides


def kill_all(process):
    """SIGKILL for the sweep and everything below it, in one go."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in below:
        one.kill()
    process.communicate()


@pytest.mark.slow
def test_a_sweep_killed_twice_at_random_ends_with_the_same_table(recipe, tmp_path, capsys):
    values = ["optimizer.groups.matrices.learning_rate=0.001,0.01,0.03", "--parallel", "2", "--name", "s"]
    begun = time.monotonic()
    uncut = (done := sweep(tmp_path, recipe, f"run.directory={tmp_path / 'runs'}", *values)).communicate()[0]
    assert done.returncode == 0, uncut
    took = time.monotonic() - begun
    tables = [(tmp_path / "sweeps" / "s" / name).read_bytes() for name in ("sweep.md", "sweep.json")]
    (tmp_path / "runs").rename(tmp_path / "uncut")
    (tmp_path / "sweeps").rename(tmp_path / "uncut_sweeps")
    moments = [random.uniform(0.1, 0.45) * took for _ in range(2)]
    for moment in moments:
        process = sweep(tmp_path, recipe, f"run.directory={tmp_path / 'runs'}", *values)
        time.sleep(moment)
        assert process.poll() is None
        kill_all(process)
    cut = (done := sweep(tmp_path, recipe, f"run.directory={tmp_path / 'runs'}", *values)).communicate()[0]
    assert done.returncode == 0, cut
    with capsys.disabled():
        print(f"\nuncut in {took:.0f} s; killed after {moments}\n{uncut[-3000:]}\n{cut[-3000:]}")
    assert len(json.loads(tables[1])["candidates"]) == 3
    assert [(tmp_path / "sweeps" / "s" / name).read_bytes() for name in ("sweep.md", "sweep.json")] == tables
