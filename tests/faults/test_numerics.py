"""NaN and inf in a loss, one rank's loss, one gradient, one parameter, one optimizer state, an evaluation: what the run does,
what it says, what it leaves on disk, and that the same command then ends bitwise as if nothing had happened.

The faults come in through run.callbacks (numeric_faults.py); the runs are forks of a warm interpreter (tests/warm_commands.py).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from faults import numeric_faults
from faults.numeric_faults import GRADIENT, PARAMETER
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, seal, take_lock
from pipeline.run_dir.rows import last_attempts, read_rows
from tests.runner import Runner
from tests.warm_commands import WarmCommands

RUN = {"callbacks": ["numeric_faults:Fault"]}
# Two micro-steps of two rows on two ranks; a checkpoint every second step, the fault in the fourth.
TRAIN = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "bf16": False}


class Runs:
    """The recipes of both models, run with and without a fault; what ran once is kept."""

    def __init__(self, folder, cache, text_files):
        shutil.copy(numeric_faults.__file__, folder)
        self.folder, self.warm = folder, WarmCommands(folder)
        runner = Runner(folder, cache, text_files, [])
        self.recipes = {model: runner.recipe(model, model, run=RUN, train=TRAIN) for model in ("gpt2", "modern")}
        self.uncut: dict[tuple, Path] = {}

    def train(self, model, name, *overrides, ranks=1, status=0, **environment) -> tuple[Path, str]:
        ended = self.warm.run(
            "pretrain", str(self.recipes[model]), f"run.name={name}", *overrides, ranks=ranks, **environment
        )
        assert ended.statuses == [status] * ranks, ended.output[-3000:]
        return self.folder / "runs" / name, ended.output

    def whole(self, model, ranks, *overrides) -> Path:
        key = model, ranks, *overrides
        if key not in self.uncut:
            self.uncut[key] = self.train(model, f"uncut-{len(self.uncut)}", *overrides, ranks=ranks)[0]
        return self.uncut[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache, text_files):
    runs = Runs(tmp_path_factory.mktemp("numerics"), cache, text_files)
    yield runs
    runs.warm.close()


def events(run: Path, kind: str) -> list[dict]:
    return [row for row in last_attempts(read_rows(run / "metrics.jsonl")) if row.get("event") == kind]


def values(run: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in last_attempts(read_rows(run / "metrics.jsonl")) if name in row}


def assert_finite_on_disk(run: Path) -> list[str]:
    """Every checkpoint is whole and holds finite numbers only; their names."""
    checkpoints = by_step(run / "checkpoints")
    for checkpoint in checkpoints:
        assert problems(checkpoint) == []
        for file in ("model.safetensors", "optimizer.safetensors"):
            bad = [name for name, tensor in load_file(checkpoint / file).items() if not tensor.isfinite().all()]
            assert bad == [], f"{checkpoint.name}/{file}"
    return [checkpoint.name for checkpoint in checkpoints]


def assert_same_end(run: Path, whole: Path) -> None:
    assert values(run, "train/loss") == values(whole, "train/loss")
    for file in ("model/model.safetensors", "checkpoints/checkpoint-6/optimizer.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file


# (where, of which rank) -> the tensor that is named, the ranks and micro-step that it is seen on.
NAMED = {
    ("loss", None): ("the loss is {value}", None, 1),
    ("loss", 1): ("the loss is {value}", [1], 1),
    ("gradient", None): (f"the gradient of {GRADIENT} is not finite", None, 0),
    ("gradient", 1): (f"the gradient of {GRADIENT} is not finite", [1], 0),
    ("parameter", None): (f"the parameter {PARAMETER} is not finite since the update of step 2", None, None),
}
QUICK = [
    ("loss", None, "nan", "gpt2", 1),
    ("loss", None, "inf", "modern", 2),
    ("loss", 1, "nan", "modern", 2),
    ("gradient", None, "inf", "modern", 1),
    ("gradient", 1, "nan", "gpt2", 2),
    ("parameter", None, "nan", "modern", 2),
    ("parameter", None, "inf", "gpt2", 1),
]
ALL = [
    (where, rank, value, model, ranks)
    for where, rank in NAMED
    for value in ("nan", "inf")
    for model in ("gpt2", "modern")
    for ranks in ((2,) if rank else (1, 2))
]


def marked(cells, quick):
    return [pytest.param(*cell, marks=[] if cell in quick else pytest.mark.slow) for cell in cells]


@pytest.mark.full
@pytest.mark.parametrize(("where", "rank", "value", "model", "ranks"), marked(ALL, QUICK))
def test_a_nonfinite_number_is_named_and_stops_all_ranks_before_updating(runs, where, rank, value, model, ranks):
    whole = runs.whole(model, ranks)
    name = f"{where}-{rank}-{value}-{model}-{ranks}"
    fault = f"{where} {value} 3" + (f" {rank}" if rank is not None else "")
    run, output = runs.train(model, name, ranks=ranks, status=76, FAULT=fault, SAW=str(runs.folder / "saw"))
    tensor, on_ranks, micro_step = NAMED[where, rank]
    failure = json.loads((run / "failure.json").read_text())
    assert failure["status"] == 76
    facts = failure["facts"]
    assert (facts["step"], facts["micro_step"]) == (3, micro_step)
    assert facts["tensor"] == tensor.format(value=value)
    assert facts["ranks"] == (on_ranks or list(range(ranks)))
    assert output.count(f"error: step 3: {facts['tensor']}") == 1
    source, file, group, row = facts["rows"][0]
    assert f"{source} {file} row group {group} row {row}" in output
    # Two rows of each rank in that micro-step; of a parameter all eight of the step whose update it went through.
    assert len(facts["rows"]) == (8 if where == "parameter" else 2 * len(facts["ranks"]))
    if where == "loss":
        saw = [ids for r in facts["ranks"] for ids in json.loads((runs.folder / f"saw{r}").read_text())]
        assert_rows_begin_with_the_documents(runs.recipes[model], run, saw, facts["rows"])
    (event,) = events(run, "nonfinite")
    assert (event["step"], event["action"], event["rows"]) == (4, "stop", facts["rows"])
    assert assert_finite_on_disk(run) == ["checkpoint-2"]
    assert not (run / "model").exists()
    runs.train(model, name, ranks=ranks)
    assert_same_end(run, whole)


def assert_rows_begin_with_the_documents(recipe, run, saw, rows) -> None:
    """The rows that the model saw, as text, begin with a piece of the documents that are named."""
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints" / "checkpoint-2")
    files = {Path(s["files"]).name: s["files"] for s in yaml.safe_load(recipe.read_text())["data"]["sources"]}
    for ids, (_, file, _, row) in zip(saw, rows, strict=True):
        document = json.loads(Path(files[file]).read_text().splitlines()[row])["text"]
        ends = ids.index(tokenizer.bos_token_id, 1) if tokenizer.bos_token_id in ids[1:] else len(ids)
        assert tokenizer.decode(ids[1:ends]) in document


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "value", "model", "ranks"),
    marked(
        [
            (w, v, m, r)
            for w in ("update", "optimizer")
            for v in ("nan", "inf")
            for m in ("gpt2", "modern")
            for r in (1, 2)
        ],
        [("update", "nan", "gpt2", 1), ("optimizer", "inf", "modern", 2)],
    ),
)
def test_a_parameter_or_state_that_an_update_spoils_is_not_saved(runs, where, value, model, ranks):
    whole = runs.whole(model, ranks)
    run, output = runs.train(
        model, f"{where}-{value}-{model}-{ranks}", ranks=ranks, status=76, FAULT=f"{where} {value} 3"
    )
    facts = json.loads((run / "failure.json").read_text())["facts"]
    assert facts["tensor"].startswith(PARAMETER) if where == "update" else "/" in facts["tensor"]
    assert f"after 4 steps: {facts['tensor']} is not finite, so checkpoint-4 was not written" in output
    assert assert_finite_on_disk(run) == ["checkpoint-2"]
    runs.train(model, run.name, ranks=ranks)
    assert_same_end(run, whole)


@pytest.mark.full
def test_without_saves_a_hidden_nonfinite_parameter_reaches_no_finished_model(runs):
    run, output = runs.train("modern", "unsaved", "train.save_strategy=no", status=76, FAULT="unseen nan 3")
    assert values(run, "val/loss").keys() == {6}
    assert "so the finished model was not written" in output
    assert not (run / "model").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("value", "model", "ranks"),
    marked(
        [(v, m, r) for v in ("nan", "inf") for m in ("gpt2", "modern") for r in (1, 2)],
        [("nan", "modern", 2), ("inf", "gpt2", 1)],
    ),
)
def test_a_nonfinite_evaluation_is_reported_and_recorded_and_training_goes_on(runs, value, model, ranks):
    name = f"evaluation-{value}-{model}-{ranks}"
    run, output = runs.train(model, name, ranks=ranks, FAULT=f"evaluation {value} 0")
    assert output.count("nonfinite: after 6 steps") == 1
    assert "though every parameter is finite" in output
    (event,) = events(run, "nonfinite")
    assert (event["step"], event["action"]) == (6, "warn")
    assert set(event["metrics"]) == {"val/bpb", "val/loss", "val/bpb_documents"}
    assert values(run, "val/loss") == {}
    assert "Status: finished" in (run / "report" / "report.md").read_text()
    assert_finite_on_disk(run)
    assert_same_end(run, runs.whole(model, ranks))


@pytest.mark.full
def test_a_skipped_step_uses_its_rows_and_advances_rates_without_an_update(runs):
    whole = runs.whole("modern", 2)
    run, output = runs.train(
        "modern", "skip", "monitor.on_nonfinite=skip", "train.save_steps=1", ranks=2, FAULT="loss nan 3,5 1"
    )
    assert "nonfinite: step 3 is skipped: the loss is nan on rank 1 in micro-step 1 (rows: " in output
    saved = {int(path.name.split("-")[1]): path for path in by_step(run / "checkpoints")}
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, after = ((saved[step] / file).read_bytes() for step in (5, 6))
        assert before == after != (whole / "checkpoints" / "checkpoint-6" / file).read_bytes()
    assert [json.loads((saved[s] / "scheduler.json").read_text())["schedule"]["next_step"] for s in (5, 6)] == [5, 6]
    assert json.loads((saved[6] / "position.json").read_text())["rows"]["step"] == 6
    losses = values(run, "train/loss")
    assert losses.keys() == {1, 2, 3, 5}  # a loss that is not a number is in no mean
    assert [losses[s] for s in (1, 2, 3)] == [values(whole, "train/loss")[s] for s in (1, 2, 3)]
    text = values(run, "train/bpb")
    assert text.keys() == losses.keys()
    assert [text[s] for s in (1, 2, 3)] == [values(whole, "train/bpb")[s] for s in (1, 2, 3)]
    assert all(torch.tensor([*text.values(), *values(run, "train/loss_ema").values()]).isfinite())
    assert values(run, "optim/skipped_steps") == values(run, "optim/nonfinite_steps") == {1: 0, 2: 0, 3: 0, 5: 1}
    assert [(e["step"], e["action"], e["ranks"]) for e in events(run, "nonfinite")] == [
        (4, "skip", [1]),
        (6, "skip", [1]),
    ]


def test_more_skipped_steps_than_the_recipe_allows_stop_the_run(runs):
    few = ["monitor.on_nonfinite=skip", "monitor.max_skips=2"]
    run, output = runs.train("gpt2", "few", *few, status=76, FAULT="gradient inf 1,3,4,5")
    assert "after 2 skipped steps of the last 1000 (monitor.max_skips is 2)" in output
    assert json.loads((run / "failure.json").read_text())["facts"]["step"] == 4
    assert [e["action"] for e in events(run, "nonfinite")] == ["skip", "skip", "stop"]
    assert assert_finite_on_disk(run) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.full
def test_a_nonfinite_parameter_stops_the_run_even_where_steps_are_skipped(runs):
    _, output = runs.train("gpt2", "lost", "monitor.on_nonfinite=skip", status=76, FAULT="parameter nan 3")
    assert "error: step 3: the parameter" in output


@pytest.mark.full
@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 1), ("modern", 2)])
def test_a_run_cut_between_skipped_steps_ends_bitwise_as_the_uncut_one(runs, model, ranks):
    """Spikes and losses that are not finite, skipped before and after the cut: what is usual is resumed to the last bit."""
    skip = ["monitor.on_nonfinite=skip", "monitor.on_spike=skip", "train.max_steps=32", "train.save_steps=6"]
    # Forty times the loss of one micro-step is far above what twenty steps have made usual.
    how = {"ranks": ranks, "FAULT": "loss 40 22,27; loss nan 5,25"}
    whole, output = runs.train(model, f"skips-{model}", *skip, **how)
    assert "spike: step 22 is skipped: " in output
    cut, _ = runs.train(model, f"cut-{model}", *skip, status=-9, CUT="26", **how)
    take_lock(cut / "checkpoints", wait_s=60).release()  # the writer outlives the run
    assert by_step(cut / "checkpoints")[-1].name == "checkpoint-24"
    runs.train(model, cut.name, *skip, **how)
    for kind in ("spike", "nonfinite"):
        a, b = ([{**e, "time": 0, "attempt": 0} for e in events(run, kind)] for run in (whole, cut))
        assert a == b
        assert {len(e["rows"]) for e in a} == ({8} if kind == "spike" else {2 * ranks})
        assert {e["step"] for e in a} >= ({23, 28} if kind == "spike" else {6, 26})
    assert values(cut, "train/loss") == values(whole, "train/loss")
    for name in ("optim/skipped_steps", "optim/nonfinite_steps", "optim/clip_frac"):
        assert values(cut, name) == values(whole, name), name
    assert values(whole, "optim/nonfinite_steps")[32] == 2
    assert values(whole, "optim/skipped_steps")[32] >= 4
    for file in ("model/model.safetensors", "checkpoints/checkpoint-32/optimizer.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.full
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_not_resumed(runs, file):
    run = runs.folder / "runs" / f"poisoned-{file.split('.')[0]}"
    shutil.copytree(runs.whole("gpt2", 1), run)
    manifest = json.loads((run / "run_manifest.json").read_text())
    del manifest["finished"]
    (run / "run_manifest.json").write_text(json.dumps(manifest))
    name = poison(run / "checkpoints" / "checkpoint-6", file)
    _, output = runs.train("gpt2", run.name, status=65)
    assert f"checkpoint-6: {name} holds a NaN or an infinity" in output


def poison(folder: Path, file: str) -> str:
    """One NaN in one tensor of the folder, sealed as if it had been written so; the tensor's name."""
    tensors = load_file(folder / file)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.ndim > 1)
    tensor.view(-1)[-1] = torch.nan
    save_file(tensors, folder / file, metadata={"format": "pt"})
    facts = {
        key: value for key, value in json.loads((folder / SEAL).read_text()).items() if key not in ("files", "sha256")
    }
    seal(folder, **facts)
    return name


def test_weights_that_are_not_finite_are_not_started_from(runs):
    weights = runs.folder / "weights"
    shutil.copytree(runs.whole("gpt2", 1) / "model", weights)
    name = poison(weights, "model.safetensors")
    _, output = runs.train("gpt2", "start", f"model.start_from={weights}", status=65)
    assert f"{name} holds a NaN or an infinity" in output
