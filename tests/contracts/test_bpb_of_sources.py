"""Of a mixture, the bits per byte of each source beside those of the whole, in training and by command."""

import json
import subprocess
import sys

import pytest

from tests.runner import ROOT

pytestmark = pytest.mark.full


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_each_source_of_the_validation_has_its_own_bits_per_byte(runner, stage):
    runner = runner
    chat = stage == "sft"
    train, *held_out = [runner.chat_files[i] for i in (0, 1, 1)] if chat else runner.text_files[:3]
    recipe = (runner.sft_recipe if chat else runner.recipe)("mixed", "gpt2", train={"max_steps": 2, "seed": 7})
    named = ", ".join(
        f"{{files: '{file}', name: {name}}}" for file, name in zip(held_out, ("first", "second"), strict=True)
    )
    overrides = [f"data.sources=[{{files: '{train}'}}]", f"data.validation=[{named}]"]
    run = runner.train(recipe, *overrides, stage=stage)
    lines = [path.read_text().splitlines() for path in (train, *held_out)]
    looked_for = {json.dumps(json.loads(line)) for of_file in lines[1:] for line in of_file}
    overlap = json.loads((run.directory / "run_manifest.json").read_text())["inputs"]["overlap"]
    both = looked_for & {json.dumps(json.loads(line)) for line in lines[0]}
    assert (overlap["documents"], overlap["found"], overlap["whole"]) == (len(looked_for), len(both), True)
    name = "val/bpb" if stage == "pretrain" else "sft/assistant_bpb"
    found = {key: run.values(f"{name}{key}")[2] for key in ("", "/first", "/second")}
    assert min(found["/first"], found["/second"]) <= found[""] <= max(found["/first"], found["/second"])
    scored = subprocess.run(
        [sys.executable, "-m", "pipeline.evals", run.directory, "bpb"], cwd=ROOT, capture_output=True, text=True
    )
    assert scored.returncode == 0, scored.stderr
    rows = json.loads((run.directory / "report" / "evals.json").read_text())["entries"][-1]["results"]
    by_name = {row["name"]: row for row in rows}
    for key, value in found.items():
        assert by_name[name + key]["value"] == pytest.approx(value, rel=1e-5)
    whole, first = (by_name[key]["protocol_parts"] for key in (name, f"{name}/first"))
    assert first == {**whole, "source": "first"}
