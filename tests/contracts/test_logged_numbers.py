"""Every number of a logged row: in the registry, what its formula says, and after a cut what it is without one."""

import json
import math

import pytest

from pipeline.metrics import metric_of
from pipeline.run_dir.rows import read_rows
from tests.evals.chat_task_files import write_all

TRAIN = {"max_steps": 20, "per_device_train_batch_size": 4, "save_steps": 5, "eval_steps": 10, "seed": 7}


@pytest.fixture
def runner(runner):
    return runner


def mixed(files):
    """Two sources of unequal weight and name."""
    names = (("prose", 0.7), ("notes", 0.3))
    return [{"files": str(f), "name": name, "weight": w} for f, (name, w) in zip(files, names, strict=True)]


def data_of(runner):
    sources = mixed(runner.text_files[:2])
    held_out = [{"files": str(runner.text_files[2])}]
    return {"sources": sources, "validation": held_out, "row_tokens": 64, "batch_tokens": 512, "shard_rows": 32}


def names_of(run):
    return {name for row in run.rows() if "event" not in row for name in row}


def unknown(names):
    """Those of which the registry does not say what they are and in which unit."""
    metrics = {name: metric_of(name) for name in names}
    return {name for name, metric in metrics.items() if not (metric and metric.unit and metric.meaning)}


def test_every_number_of_a_mixture_is_registered_and_matches_its_formula(runner):
    data = data_of(runner) | {"cache_dir": str(runner.cache)}
    recipe = runner.recipe("numbers", "modern", data=data, train=TRAIN | {"logging_steps": 5, "max_grad_norm": 0.5})
    run = runner.train(recipe)
    assert unknown(names_of(run)) == set()
    new = {
        "train/perplexity",
        "train/bpb",
        "optim/clip_frac",
        "optim/param_norm",
        "optim/update_ratio",
        "optim/num_zeros_in_grad",
    }
    new |= {"optim/nonfinite_steps", "optim/skipped_steps", "data/documents", "data/bad_rows", "data/pad_frac"}
    new |= {f"data/source/{source}/{n}" for source in ("prose", "notes") for n in ("tokens", "samples", "documents")}
    new |= {"perf/goodput_pct", "perf/lost_steps", "ckpt/age_steps", "ckpt/last_good_step", "ckpt/bytes"}
    assert new - names_of(run) == set()
    logged = [row for row in run.rows() if "train/loss" in row]
    assert [row["step"] for row in logged] == [1, 5, 10, 15, 20]
    (first,) = [row for row in read_rows(run.directory / "metrics.jsonl") if row.get("event") == "attempt"]
    assert 0 <= first["time"] - first["began"] < 600
    for row in logged:
        assert row["train/perplexity"] == math.exp(row["train/loss"])
        for number in ("tokens", "samples", "documents"):
            of_sources = [row[f"data/source/{source}/{number}"] for source in ("prose", "notes")]
            assert sum(of_sources) == row[f"data/{number}"], number
        assert row["data/pad_frac"] == pytest.approx(1 - row["data/tokens"] / row["tokens"], abs=1e-12)
        assert ("optim/update_ratio" in row) == (row["step"] in (10, 20))  # at most every tenth step
        assert 0 < row.get("optim/update_ratio", 0.5) < 1
        assert row["perf/goodput_pct"] == pytest.approx(
            100 * row["perf/total_s"] / (row["time"] - first["began"]), rel=0.02
        )
        assert row["ckpt/age_steps"] == row["step"] - row.get("ckpt/last_good_step", 0)
    assert logged[-1]["data/source/notes/samples"] == pytest.approx(0.3 * 160, abs=1)
    last = run.directory / "checkpoints" / f"checkpoint-{logged[-1]['ckpt/last_good_step']}"
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    assert logged[-1]["ckpt/bytes"] == size


@pytest.mark.full
def test_clip_frac_is_the_share_of_clipped_steps_at_any_cadence(runner):
    recipe = runner.recipe("cadence", "modern", train=TRAIN | {"max_steps": 12})
    each = runner.train(recipe, "run.name=each", "train.logging_steps=1")
    norms = each.values("optim/grad_norm")
    clip = sorted(norms.values())[6]
    few = runner.train(recipe, "run.name=few", "train.logging_steps=4", f"train.max_grad_norm={clip}")
    all_few = runner.train(recipe, "run.name=all", "train.logging_steps=1", f"train.max_grad_norm={clip}")
    clipped = {step: norm > clip for step, norm in all_few.values("optim/grad_norm").items()}
    assert any(clipped.values())
    assert not all(clipped.values())
    intervals = {1: (1,), 4: (2, 3, 4), 8: (5, 6, 7, 8), 12: (9, 10, 11, 12)}
    expected = {last: sum(clipped[s] for s in steps) / len(steps) for last, steps in intervals.items()}
    assert few.values("optim/clip_frac") == expected
    often = all_few.values("data/documents")
    assert few.values("data/documents") == {step: often[step] for step in intervals}
    for name in ("optim/param_norm", "optim/update_ratio", "optim/num_zeros_in_grad"):
        often = all_few.values(name)
        assert set(often) == {10, 12}, name
        assert few.values(name) == {12: often[12]}, name


OF_THE_RUN = (
    "train/perplexity",
    "train/bpb",
    "optim/clip_frac",
    "optim/num_zeros_in_grad",
    "optim/param_norm",
    "optim/update_ratio",
    "optim/nonfinite_steps",
    "optim/skipped_steps",
    "data/tokens",
    "data/samples",
    "data/documents",
    "data/bad_rows",
    "data/pad_frac",
    "data/source/prose/tokens",
    "data/source/notes/samples",
    "data/source/notes/documents",
)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cut_run_logs_the_uncut_numbers_and_counts_its_losses(runner, ranks):
    data = data_of(runner) | {"cache_dir": str(runner.cache)}
    # The checkpoints lie between two logs, and half of the steps are clipped.
    train = TRAIN | {"logging_steps": 3, "max_grad_norm": 0.9}
    recipe = runner.recipe("cut", "modern", data=data, train=train)
    uncut = runner.train(recipe, "run.name=uncut", ranks=ranks)
    directory = runner.kill(recipe, name="cut", after_step=12, ranks=ranks)
    before = [row for row in read_rows(directory / "metrics.jsonl") if "train/loss" in row]
    cut = runner.train(recipe, "run.name=cut", ranks=ranks)
    assert "going on from checkpoint-10" in cut.output
    for name in OF_THE_RUN:
        assert cut.values(name) == uncut.values(name), name
    assert set(cut.values("optim/clip_frac").values()) - {0.0, 1.0}
    whole_inputs, cut_inputs = (
        json.loads((r.directory / "run_manifest.json").read_text())["inputs"] for r in (uncut, cut)
    )
    assert cut_inputs == whole_inputs
    assert cut_inputs["overlap"]["documents"] > 0
    lost = cut.values("perf/lost_steps")
    assert {step: lost[step] for step in (9, 12, 20)} == {9: 0, 12: 2, 20: 2}
    assert cut.values("ckpt/last_good_step")[12] == 10
    after = [row for row in cut.rows() if row["step"] == 12 and "train/loss" in row]
    walls = [row["perf/total_s"] / row["perf/goodput_pct"] for row in (before[-1], after[0])]
    assert walls[0] < walls[1]  # by the time between the attempts, and the steps made twice
    assert after[0]["attempt"] == 2


@pytest.mark.full
def test_every_number_of_a_chat_run_with_tasks_is_in_the_registry(runner):
    (runner.folder / "tasks").mkdir()
    write_all(runner.folder / "tasks", 6)
    chat = {"every_steps": 4, "tasks": ["arc_easy"], "data": "tasks", "max_per_task": 2, "max_new_tokens": 4}
    recipe = runner.sft_recipe(
        "chat",
        "gpt2",
        model={"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 512},
        train=TRAIN | {"max_steps": 8, "logging_steps": 2, "eval_steps": 4},
        evals={"bpb": {"tokens": 1024, "at_start": False}, "chat": chat},
    )
    lines = runner.chat_files[0].read_text().splitlines(keepends=True)
    halves = [runner.folder / "first.jsonl", runner.folder / "second.jsonl"]
    for number, path in enumerate(halves):
        path.write_text("".join(lines[number::2]))
    text = json.dumps(mixed(halves))
    run = runner.train(recipe, f"data.sources={text}", stage="sft")
    assert unknown(names_of(run)) == set()
    assert {
        "chat/arc_easy",
        "sft/assistant_bpb",
        "train/assistant_bpb",
        "data/source/notes/documents",
        "optim/clip_frac",
    } <= names_of(run)
    assert "optim/update_ratio" in names_of(run)
    (last,) = [row for row in run.rows() if row["step"] == 8 and "train/loss" in row]
    assert 0 < last["data/pad_frac"] < 1 - last["data/tokens"] / last["tokens"]  # what users write is no padding
