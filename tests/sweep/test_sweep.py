"""`python -m pipeline.sweep`: values as Hydra writes them, verdicts as the textbooks give them, and real runs that stop and go on."""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from pipeline.hardware.accelerators import device_without_torch
from pipeline.preflight.plan import make_plan
from pipeline.process.errors import RecipeError, TandemError
from pipeline.process.storage import lock, write_json
from pipeline.recipe import read_recipe
from pipeline.run_dir.checkpoints import whole_folder
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sweep import (
    PACKAGE,
    Axis,
    Figure,
    Job,
    RefusedError,
    Runs,
    Sweep,
    _options,
    _Started,
    _step,
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


def test_values_are_read_as_hydra_writes_them():
    fixed, axes = read_space(
        ["a.x=1", "a.l=[1,2]", "a.b=[0.8,0.9],[0.9,0.95]", "a.c=choice(relu)", "a.q='x,y',z", "a.r=range(2,8,2)",
         "a.i=interval(0.1, 2)", "a.g=tag(log, interval(1e-3,1e-1))", "a.n=int(tag(log, interval(2,64)))"]
    )  # fmt: skip
    assert fixed == ["a.x=1", "a.l=[1,2]"]
    assert axes == {
        "a.b": Axis(("[0.8,0.9]", "[0.9,0.95]")),
        "a.c": Axis(("relu",)),
        "a.q": Axis(("'x,y'", "z")),
        "a.r": Axis(("2", "4", "6")),
        "a.i": Axis(low=0.1, high=2.0),
        "a.g": Axis(low=1e-3, high=1e-1, is_log=True),
        "a.n": Axis(low=2.0, high=64.0, is_int=True, is_log=True),
    }
    assert grid({"a": Axis(("1", "2")), "b": Axis(("x", "y"))})[1:3] == [{"a": "1", "b": "y"}, {"a": "2", "b": "x"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.x=1,,2"], "empty value"),
        (["a.x=interval(2,1)"], "no interval to search"),
        (["a.x=tag(log, interval(0,1))"], "no interval to search"),
        (["a.x=1,2", "a.x=3,4"], "given twice"),
        (["a.x=1", "a.x=3,4"], "for every run and a list"),
    ],
)
def test_values_that_mean_nothing_are_refused(words, message):
    with pytest.raises(RecipeError, match=message):
        read_space(words)


def test_an_interval_needs_a_search():
    with pytest.raises(RecipeError, match="--trials N"):
        grid({"a": Axis(low=1, high=2)})


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


def test_a_launcher_gets_the_command_as_words_or_as_one_word(tmp_path):
    job = Job(tmp_path / "runs" / "it's", 7, ("a.b=[1, 2]",), 10, "a")
    command = [sys.executable, str(PACKAGE / "launch" / "launch.py"), str(PACKAGE / "pretrain.py"), "r.yaml", "r.yaml", "a.b=[1, 2]", "train.seed=7", "run.name=it's", 'run.tags=["mine", "sweep:n"]', "hub.id=null"]  # fmt: skip

    def of(launcher):
        return Runs("r.yaml", "pretrain", metric="val/bpb", parallel=1, launcher=launcher, logs=tmp_path, tags=["mine", "sweep:n"]).command(job)  # fmt: skip

    assert of(None) == command
    assert of("srun -n 1 {command}") == ["srun", "-n", "1", *command]
    submitted = of("sbatch --job-name {name} --wrap={command}")
    assert submitted[:3] == ["sbatch", "--job-name", "it's"]
    assert subprocess.run(["sh", "-c", f"printf '%s|' {submitted[3].removeprefix('--wrap=')}"], capture_output=True, text=True).stdout == "".join(f"{word}|" for word in command)  # fmt: skip
    with pytest.raises(RecipeError, match="nothing would be started"):
        of("sbatch")


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_run_that_another_process_trains_is_waited_for(comes_first, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    run = RunDirectory(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    write_json(run.manifest, {"name": "r", "status": "running"})
    started, taken = tmp_path / "started", tmp_path / "taken"

    def train_elsewhere():
        while not comes_first and not started.exists():
            time.sleep(0.05)
        with lock(run.lock):
            taken.touch()
            time.sleep(1.0)
            write_json(run.failure, {"status": 76, "class": "DivergedError", "message": "m"})

    (other := threading.Thread(target=train_elsewhere)).start()
    while comes_first and not taken.exists():
        time.sleep(0.05)
    script = f"touch {started}; until [ -e {taken} ]; do sleep 0.05; done; echo in use; exit 73"
    launcher = shlex.join(["sh", "-c", script, "{command}"])
    runs = Runs("r.yaml", "pretrain", metric="val/bpb", parallel=1, launcher=launcher, logs=tmp_path / "logs", tags=[])
    ended = []
    runs.make([Job(run.path, 42, (), None, "a")], when_ended=lambda: ended.append(time.monotonic()))
    other.join()
    printed = capsys.readouterr().out
    assert len(ended) == 1
    assert started.exists() is not comes_first
    assert "another process trains it; waiting for that" in printed
    assert "a, seed 42: failed (status 76, DivergedError) (" in printed


def test_the_step_of_a_run_is_that_of_its_last_attempt_read_from_the_end_of_its_metrics(tmp_path):
    job = Job(tmp_path, 42, (), None, "a")
    assert _step(_Started(job, 0, None, 0.0)) == 0
    rows = [{"step": n, "loss": 1.0, "text": "x" * 500} for n in range(1, 1001)]
    rows += [
        {"event": "attempt", "attempt": 2, "step": 950},
        {"step": 951, "loss": 1.0},
        {"event": "saved", "step": 940},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "not read\n" + "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 95'
    )
    assert _step(_Started(job, 0, None, 0.0)) == 951


def test_a_search_that_was_interrupted_proposes_what_the_uncut_one_does(tmp_path):
    pytest.importorskip("optuna")

    axes = {"a": Axis(low=1e-3, high=1.0, is_log=True), "b": Axis(("x", "y")), "c": Axis(low=1, high=9, is_int=True)}
    options = Namespace(trials=12, seeds=3, sampler="TPESampler", pruner="MedianPruner", parallel=1, storage=None)

    def proposals(name, *, dies_at):
        (tmp_path / name).mkdir()
        tried, left = [], iter(dies_at)
        dies = next(left, None)

        def attempt(values, count):
            nonlocal dies
            if len(tried) == dies:
                dies = next(left, None)
                raise KeyboardInterrupt
            if (values, count) not in tried:  # what an interrupted trial has is made again in no time
                tried.append((values, count))
            return [abs(math.log10(float(values["a"])) + 2) + int(values["c"]) / 10 + n / 100 for n in range(count)]

        for _ in range(len(dies_at) + 1):
            try:
                search(axes, attempt, options, name=name, folder=tmp_path / name, better="lower")
            except KeyboardInterrupt:
                continue
        return tried

    uncut = proposals("uncut", dies_at=[])
    assert any(count == 1 and after[1] == 1 for (_, count), after in pairwise(uncut)), "none was pruned"
    assert max(count for _, count in uncut) == 3
    assert proposals("cut", dies_at=[5, 15]) == uncut


def test_a_proposal_that_is_refused_is_a_failed_trial_and_the_search_goes_on(tmp_path, capsys):
    optuna = pytest.importorskip("optuna")
    axes = {"a": Axis(low=1, high=4, is_int=True)}
    options = Namespace(trials=6, seeds=2, sampler="RandomSampler", pruner="NopPruner", parallel=1, storage=None)

    def attempt(values, count):
        if values["a"] in "13":
            raise RefusedError(f"a={values['a']}: does not divide 32.\nMore.")
        return [1.0] * count

    search(axes, attempt, options, name="n", folder=tmp_path, better="lower")
    trials = optuna.load_study(study_name="n", storage=f"sqlite:///{tmp_path / 'optuna.db'}").get_trials()
    states = [("FAIL" if trial.params["a"] in (1, 3) else "COMPLETE") for trial in trials]
    assert [trial.state.name for trial in trials] == states
    assert set(states) == {"FAIL", "COMPLETE"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == states.count("FAIL")
    assert all(re.fullmatch(r"trial \d: a=[13]: does not divide 32\.", line) for line in lines)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "GridSampler"}, "--sampler: GridSampler .* RandomSampler, TPESampler"),
        ({"pruner": "ThresholdPruner"}, "--pruner: ThresholdPruner .* NopPruner, SuccessiveHalvingPruner"),
        ({"pruner": "PercentilePruner"}, "--pruner: PercentilePruner"),
        ({"sampler": "nsgaii"}, "--sampler: nsgaii"),
        ({"sampler": "BruteForceSampler"}, "a: Optuna's BruteForceSampler chooses no value"),
        ({"storage": "x"}, "--storage: x cannot be opened"),
        ({"b": ("x", "z")}, "b: Optuna's TPESampler chooses no value .* another --name"),
    ],
)
def test_a_search_that_optuna_refuses_ends_in_a_sentence(changed, message, tmp_path):
    pytest.importorskip("optuna")

    def run(*, trials, b=("x", "y"), **changed):
        axes = {"a": Axis(low=1e-3, high=1.0), "b": Axis(b)}
        options = {"seeds": 1, "sampler": "TPESampler", "pruner": "MedianPruner", "parallel": 1, "storage": None}
        options = Namespace(**options | changed, trials=trials)
        search(axes, lambda values, count: [1.0] * count, options, name="n", folder=tmp_path, better="lower")

    run(trials=1)
    with pytest.raises(RecipeError, match=message):
        run(trials=2, **changed)


def test_without_optuna_a_search_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RecipeError, match=r"tandem-llm\[sweep\]"):
        search({}, lambda values, count: [], Namespace(), name="n", folder=Path(), better="lower")


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
        (["train.learning_rate=interval(1e-4,1e-1)", "--trials", "2"], "train.learning_rate: is not used"),
        (["model.n_embd=16,64", "--metric", "optim/lr"], "no number of which more or less is better"),
        (["train.num_train_epochs=1", "model.n_embd=16,64", "--equal", "flops"], "in epochs"),
        (["model.n_embd=32,30", "model.n_head=2,4"], "^model.n_embd=30, model.n_head=4: .* not a multiple"),
        (["run.directory=a,b"], "run.directory: is the same for all runs"),
        (["run.resume=auto,never", "hub.private=true,false"], "hub.private, run.resume: is the same for all runs"),
        (["hub.id=me/model", "model.n_embd=16,64"], "hub.id: .* push RUN"),
        (["model.n_embd=16,64", "--metric", "sft/assistant_bpb"], "of SFT, and this recipe is a pretraining"),
        (["model.n_embd=16,64", "--metric", "core/v1"], "evals.core.every_steps"),
        (["model.n_embd=16,64", "--metric", "chat/gsm8k"], "evals.chat.every_steps"),
        (["model.n_embd=16,64", "--metric", "text/bpb_documents"], "not by a run"),
        (["evals.bpb.document_bytes=0", "model.n_embd=16,64", "--metric", "val/bpb_documents"], "document_bytes"),
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
def test_a_candidate_that_begins_with_smaller_batches_gets_as_much_in_more_steps(recipe, equal, steps):
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
    assert "model.n_embd=64" in (tmp_path / "sweeps" / "s" / "sweep.html").read_text()
    files = [tmp_path / "sweeps" / "s" / name for name in ("sweep.json", "sweep.md")]
    before = [file.read_bytes() for file in files]
    again = (done := sweep(tmp_path, *command)).communicate(timeout=100)[0]
    assert done.returncode == 0, again
    assert "0 of them to make" in again
    assert [file.read_bytes() for file in files] == before


def test_finished_runs_of_another_baseline_under_the_same_name_are_not_taken_for_its_own(
    recipe, tmp_path, monkeypatch
):
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
    monkeypatch.setattr("pipeline.sweep.write_page", lambda record, runs, folder: folder / "sweep.html")
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
    command = [str(recipe), "model.n_head=3,5,4,8", "--seeds", "1", "--sampler", "RandomSampler", "--name", "s"]
    main([*command, "--trials", "6"])
    record = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    assert {one["values"]["model.n_head"] for one in record["candidates"]} == {"4", "8"}
    assert re.search(r"trial \d: model.n_head=[35]: .* not a multiple of model.n_head", capsys.readouterr().out)
    table = (tmp_path / "sweeps" / "s" / "sweep.md").read_bytes()
    main([*command, "--trials", "6"])
    assert (tmp_path / "sweeps" / "s" / "sweep.md").read_bytes() == table


def test_a_search_of_which_every_corner_is_refused_trains_nothing(recipe, tmp_path, monkeypatch, trained):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.n_head=5: .* not a multiple"):
        main([str(recipe), "model.n_head=3,5", "--trials", "2"])
    assert not trained


def test_a_baseline_of_which_a_seed_diverged_ends_the_sweep_in_a_sentence(recipe, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("name", [[], ["--name", "s"]])
def test_a_base_that_ends_while_a_sweep_is_made_changes_none_of_its_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(
        "model: {start_from: 'latest:base'}\ntrain: {max_steps: 10}\n"
        "data: {sources: [{files: a.jsonl, format: messages}], row_tokens: 64, batch_tokens: 512}\n"
    )
    base(tmp_path, "a", finished=32)
    found = []
    for _ in range(2):
        sweep = Sweep(_options(["sft.yaml", *name]), [])
        entries = [sweep.record["baseline"], sweep.entry({"train.max_grad_norm": "2"})]
        entries.append(sweep.entry({"model.start_from": "latest:pretrain"}))
        sweep.update()
        assert sweep.record["start_from"] == dict.fromkeys(("latest:base", "latest:pretrain"), "runs/a/model")
        assert sweep.recipe.model.n_embd == 32
        found.append([(sweep.folder, job) for entry in entries for job in sweep.jobs(entry, 1)])
        sweep._held.release()
        base(tmp_path, f"later-{len(found)}", finished=64)
    assert found[0] == found[1]
    for _, job in found[0]:
        assert [word for word in job.overrides if word.startswith("model.start_from=")] == ["model.start_from=runs/a/model"]  # fmt: skip


def test_a_sweep_from_a_run_that_still_trains_is_refused(tmp_path, monkeypatch):
    tmp_path = tmp_path / "checkpoints"  # where some people keep their runs
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    base(tmp_path, "a", finished=32)
    run = RunDirectory(tmp_path / "runs" / "a")
    with whole_folder(run.checkpoint(5), step=5, run="a") as folder:
        shutil.copyfile(run.model / "config.json", folder / "config.json")
    shutil.rmtree(run.model)
    write_json(run.manifest, {"recipe_name": "base", "stage": "pretrain"})
    (tmp_path / "sft.yaml").write_text(
        "model: {start_from: a}\ntrain: {max_steps: 10}\n"
        "data: {sources: [{files: a.jsonl, format: messages}], row_tokens: 64, batch_tokens: 512}\n"
    )
    with pytest.raises(RecipeError, match=r"model\.start_from: a has not finished, and the checkpoint"):
        Sweep(_options(["sft.yaml", "--name", "unfinished"]), [])
    shutil.copytree(run.checkpoint(5), run.model)
    write_json(run.manifest, {"recipe_name": "base", "stage": "pretrain", "finished": 1.0})
    # By its whole path, in which that name stands.
    fixed = [f"model.start_from={run.path}"]
    assert Sweep(_options(["sft.yaml", *fixed, "--name", "finished"]), fixed).starts == {str(run.path): str(run.model)}


def kill_all(process):
    """SIGKILL for the sweep and everything below it, in one go."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in below:
        one.kill()
    process.communicate()


@pytest.mark.slow
def test_a_sweep_of_12_runs_killed_at_random_moments_twice_ends_with_the_table_of_the_uncut_one(
    recipe, tmp_path, capsys
):
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
