"""`python -m pipeline.sweep`: values as Hydra writes them, verdicts as the textbooks give them, and real runs that stop and go on."""

import json
import math
import os
import random
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
import yaml

from pipeline.hardware import device_without_torch
from pipeline.preflight.plan import make_plan
from pipeline.process.errors import RecipeError
from pipeline.process.storage import lock, write_json
from pipeline.recipe import read_recipe
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory, find_run
from pipeline.sweep import (
    PACKAGE,
    Axis,
    Figure,
    Job,
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
        [Figure("run", 42, "failed (status 76, DivergedError)")],
    ]
    found = judge_all(baseline, candidates, better="lower")
    assert [one["verdict"] for one in found] == ["better", "worse", "not shown", "not shown", "not comparable", "diverged (1 of 1)"]  # fmt: skip
    assert judge_all(baseline, candidates[:1], better="higher")[0]["verdict"] == "worse"
    p = found[0]["p"]
    assert found[0]["p_holm"] == pytest.approx(3 * p)
    many = judge_all(baseline, candidates[:1] * 20, better="lower")
    assert p < 0.05 < 20 * p
    assert {one["verdict"] for one in many} == {"not shown"}


def test_a_candidate_of_which_a_seed_diverged_is_not_judged_by_the_others():
    figures = [[Figure(f"{name}{seed}", seed, "finished", value + seed / 100) for seed in range(3)] for name, value in (("b", 2.0), ("c", 1.0))]  # fmt: skip
    assert judge_all(figures[0], figures[1:], better="lower")[0]["verdict"] == "better"
    figures[1][2] = Figure("c2", 2, "failed (status 76, DivergedError)")
    (verdict,) = judge_all(figures[0], figures[1:], better="lower")
    assert verdict["verdict"] == "diverged (1 of 3)"
    assert verdict["difference"] is None


def test_a_launcher_gets_the_command_as_words_or_as_one_word(tmp_path):
    job = Job(tmp_path / "runs" / "it's", 7, ("a.b=[1, 2]",), 10, "a")
    command = [sys.executable, str(PACKAGE / "launch" / "launch.py"), str(PACKAGE / "pretrain.py"), "r.yaml", "r.yaml", "a.b=[1, 2]", "train.seed=7", "run.name=it's"]  # fmt: skip

    def of(launcher):
        return Runs("r.yaml", "pretrain", metric="val/bpb", parallel=1, launcher=launcher, logs=tmp_path).command(job)

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
    runs = Runs("r.yaml", "pretrain", metric="val/bpb", parallel=1, launcher=launcher, logs=tmp_path / "logs")
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

    def attempt(values, count):
        if values["a"] == "y":
            raise RecipeError("recipe.yaml: a: is y, which does not fit.")
        return [1.0] * count

    options = Namespace(trials=6, seeds=1, sampler="RandomSampler", pruner="NopPruner", parallel=1, storage=None)
    search({"a": Axis(("x", "y"))}, attempt, options, name="n", folder=tmp_path, better="lower")
    trials = optuna.load_study(study_name="n", storage=f"sqlite:///{tmp_path / 'optuna.db'}").get_trials()
    assert [trial.state.name for trial in trials] == [
        "FAIL" if trial.params["a"] == "y" else "COMPLETE" for trial in trials
    ]
    assert {trial.state.name for trial in trials} == {"FAIL", "COMPLETE"}
    assert "a=y: refused and passed over: recipe.yaml: a: is y, which does not fit." in capsys.readouterr().out


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
        (["run.directory=a,b"], "run.directory: changes nothing that a run learns"),
        (["hub.strategy=end,checkpoint"], "hub.strategy: changes nothing that a run learns"),
        (["hub.id=me/model", "model.n_embd=16,64"], "hub.id: runs of a sweep are not published"),
        (["model.n_embd=16,64", "--metric", "sft/assistant_bpb"], "sft/assistant_bpb is not measured in pretrain"),
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


def test_values_that_are_written_in_two_ways_are_one_candidate(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(_options([str(recipe)]), [])
    key = "optimizer.groups.matrices.learning_rate"
    first, *others = (sweep.entry({key: value}) for value in ("0.5", ".50", "5e-1", "0.25"))
    assert [other is first for other in others] == [True, True, False]
    assert len(sweep.record["candidates"]) == 2


def test_runs_of_a_sweep_are_not_published_and_are_not_what_latest_means(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe.write_text(recipe.read_text() + "hub: {id: me/model}\n")
    sweep = Sweep(_options([str(recipe), "run.tags=[own]", "--name", "s"]), ["run.tags=[own]"])
    (job,) = sweep.jobs(sweep.record["baseline"], 1)
    made = read_recipe([str(recipe), *job.overrides])
    assert (made.hub.id, made.run.tags) == (None, ["own", "sweep:s"])
    for name, tags, finished in (("plain", ["own"], 1.0), ("trial", made.run.tags, 2.0)):
        RunDirectory(tmp_path / "runs" / name).update_manifest(name=name, recipe_name="tiny", tags=tags, finished=finished)  # fmt: skip
    assert find_run("latest:tiny", "runs").name == "plain"
    assert find_run("trial", "runs").name == "trial"


def test_all_runs_of_a_sweep_begin_from_the_base_that_was_the_latest_when_it_began(
    tmp_path, text_files, cache, chat_files, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, cache, text_files, chat_files)
    base = runner.train(runner.recipe("base", "gpt2", train={"max_steps": 2, "save_steps": 2})).directory
    recipe = runner.sft_recipe("chat", "gpt2")
    tree = yaml.safe_load(recipe.read_text()) | {"model": {"start_from": "latest:pretrain"}}
    del tree["tokenizer"]
    tree["data"]["row_tokens"] = 64
    recipe.write_text(yaml.safe_dump(tree))

    def bases(name, *fixed):
        sweep = Sweep(_options([str(recipe), *fixed, "--name", name]), list(fixed))
        sweep.update()
        sweep._held.close()
        jobs = [*sweep.jobs(sweep.record["baseline"], 2), *sweep.jobs(sweep.entry({"data.row_tokens": "32"}), 2)]
        return {word for job in jobs for word in job.overrides if word.startswith("model.start_from=")}

    before = bases("s")
    later = base.with_name("later")
    shutil.copytree(base, later)
    RunDirectory(later).update_manifest(name="later", finished=time.time() + 60)
    assert find_run("latest:pretrain", str(base.parent)).path.name == "later"
    assert bases("s") == before
    (named,) = bases("other", "model.start_from=latest:base")
    assert Path(named).name == "later"
    assert [Path(word.partition("=")[2]).name for word in before] == [base.name]


def test_finished_runs_of_another_baseline_under_the_same_name_are_not_taken_for_its_own(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = set()
    for fixed in ([], ["train.max_steps=7"]):
        sweep = Sweep(_options([str(recipe), *fixed, "--name", "s"]), fixed)
        paths.add(sweep.jobs(sweep.record["baseline"], 1)[0].path)
        sweep._held.close()
        (tmp_path / "sweeps").rename(tmp_path / f"lost-{len(paths)}")
    assert len(paths) == 2


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
