"""Contract 2: a run that was cut goes on bitwise as if it had not been; on other shapes no row is repeated or skipped."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.run_dir.checkpoints import by_step, step_of

# GPT-2's own dropout: the random state must survive too.
WITH_DROPOUT = {"model": {"n_layer": 4, "n_embd": 32, "n_head": 2, "options": {}}}
# What is off by default and changes how a Tandem learns under Muon, all at once; the cut falls where each is at work.
CANDIDATES = [
    "optimizer.schedule.batch_warmup_steps=14",
    "optimizer.schedule.batch_halvings=2",
    "model.options.bigram_embeddings=2560",
    "model.options.resid_pdrop=0.1",
    "optimizer.decay_scale=10",
]


def assert_same_end(cut, uncut):
    """Every loss after the cut and every byte of the final weights."""
    assert cut.values("train/loss") == uncut.values("train/loss")
    assert cut.values("train/loss_ema") == uncut.values("train/loss_ema")
    assert cut.values("val/loss") == uncut.values("val/loss")
    a, b = (load_file(run.directory / "model" / "model.safetensors") for run in (cut, uncut))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()] == []


@pytest.mark.full_except("pretrain-gpt2-1-more1", "pretrain-modern-2-more2")
@pytest.mark.parametrize(
    ("stage", "model", "ranks", "more"),
    [
        pytest.param("pretrain", "gpt2", 1, ["train.bf16=false"], marks=pytest.mark.slow),
        ("pretrain", "gpt2", 1, ["train.bf16=false", "train.logging_steps=3"]),  # the checkpoints lie between two logs
        ("pretrain", "modern", 2, ["train.bf16=false"]),
        (
            "pretrain",
            "modern",
            1,
            ["train.bf16=true", *CANDIDATES],
        ),
        ("sft", "gpt2", 2, ["train.bf16=false"]),
        pytest.param("sft", "modern", 1, ["train.bf16=false"], marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_the_middle_ends_bitwise_as_the_uncut_one(runner, stage, model, ranks, more):
    make = runner.recipe if stage == "pretrain" else runner.sft_recipe
    recipe = make("resume", model, **(WITH_DROPOUT if model == "gpt2" else {}))
    how = {"stage": stage, "ranks": ranks}
    uncut = runner.train(recipe, "run.name=uncut", *more, **how)
    directory = runner.kill(recipe, *more, name="cut", after_step=12, **how)
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, "run.name=cut", *more, **how)
    assert f"going on from {newest}" in cut.output
    assert_same_end(cut, uncut)


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt2", "modern"])
def test_samples_and_evaluations_do_not_move_the_training(runner, model):
    recipe = runner.recipe("watched", model, **(WITH_DROPOUT if model == "gpt2" else {}))
    short = ["train.max_steps=6"]
    plain = runner.train(recipe, "run.name=plain", *short)
    samples = [
        "samples.every_steps=2",
        "samples.prompts=[The, A]",
        "samples.max_new_tokens=4",
        "samples.temperature=1.0",
    ]
    watched = runner.train(recipe, "run.name=watched", "train.eval_steps=2", *samples, *short)
    assert (watched.directory / "samples.jsonl").read_text().count("\n") == 6
    assert len(watched.values("val/bpb")) == 3
    assert watched.values("train/loss") == plain.values("train/loss")
    a, b = ((run.directory / "model" / "model.safetensors").read_bytes() for run in (watched, plain))
    assert a == b


def positions(directory: Path) -> dict[int, dict]:
    return {
        int(p.name.split("-")[1]): json.loads((p / "position.json").read_text())
        for p in by_step(directory / "checkpoints")
    }


@pytest.mark.full
@pytest.mark.parametrize(("model", "close"), [pytest.param("gpt2", 1e-5, marks=pytest.mark.slow), ("modern", 1e-4)])
def test_changing_the_number_of_ranks_neither_repeats_nor_skips_rows(runner, model, close):
    recipe = runner.recipe("elastic", model)
    whole = runner.train(recipe, "run.name=whole", ranks=2)
    directory = runner.kill(recipe, name="elastic", after_step=6, ranks=2)
    runner.kill(recipe, name="elastic", after_step=11, ranks=1)
    assert [step_of(checkpoint) for checkpoint in by_step(directory / "checkpoints")] == [5, 10]
    elastic = runner.train(recipe, ranks=2)
    # Rows are a pure function of the step: equal losses of each step to rounding mean equal rows of each step.
    assert elastic.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=close)
    assert positions(elastic.directory)[20]["rows"] == positions(whole.directory)[20]["rows"]


@pytest.mark.full
def test_a_batch_set_by_accumulation_is_kept_when_the_ranks_change(runner):
    recipe = runner.recipe(
        "kept",
        "gpt2",
        data={"batch_tokens": None},
        train={"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "max_steps": 20, "save_steps": 5},
    )
    whole = runner.train(recipe, "run.name=whole", ranks=2)
    runner.kill(recipe, name="kept", after_step=6, ranks=2)
    kept = runner.train(recipe, ranks=1)
    assert "would make a step of 256 tokens on 1 processes, and this run began with 512, which it keeps" in kept.output
    assert kept.values("data/tokens") == whole.values("data/tokens")
    assert kept.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=1e-5)


@pytest.mark.full
def test_an_evaluation_missed_by_a_kill_is_made_after_resuming(runner):
    recipe = runner.recipe(
        "owed",
        "gpt2",
        train={
            "max_steps": 12,
            "save_steps": 6,
            "eval_steps": 6,
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
        },
    )
    uncut = runner.train(recipe, "run.name=uncut")
    # Cut the rows behind step 6's checkpoint, as a kill between the save and the evaluation would.
    cut = runner.train(recipe, "run.name=cut").directory
    rows = [
        line
        for line in (cut / "metrics.jsonl").read_text().splitlines()
        if json.loads(line).get("step", 0) <= 6 and "val/bpb" not in line
    ]
    (cut / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    manifest = json.loads((cut / "run_manifest.json").read_text())
    del manifest["finished"]
    (cut / "run_manifest.json").write_text(json.dumps(manifest))
    for path in (cut / "checkpoints" / "checkpoint-12", cut / "model"):
        path.rename(runner.folder / path.name)
    again = runner.train(recipe, "run.name=cut")
    assert again.values("val/bpb") == uncut.values("val/bpb")
    assert set(again.values("val/bpb")) == {6, 12}
