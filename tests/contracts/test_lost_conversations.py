"""A run says before its first step what of the conversations is lost, and its report finds it from the run alone."""

import json

import pytest

from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.run_data import read_run
from tests.conftest import docstrings

pytestmark = pytest.mark.full

CONVERSATIONS = "conversations fit their rows"


def test_only_a_run_that_drops_conversations_warns_and_is_diagnosed_so(runner):
    texts = docstrings(modules=20)[:200]
    path = runner.folder / "uneven.jsonl"
    rows = [[{"role": "user", "content": "What?"}, {"role": "assistant", "content": text[:900]}] for text in texts]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe = runner.sft_recipe("uneven", "gpt2", data={}, train={"max_steps": 2})
    sources = f"data.sources=[{{files: {path}}}]"
    levels = {}
    for name, more in (("short", []), ("long", ["data.row_tokens=1024", "data.batch_tokens=4096"])):
        result = runner.train(recipe, sources, f"run.name={name}", *more, stage="sft")
        warnings = [line for line in result.output.splitlines() if line.startswith("warning: ")]
        before = result.output[: result.output.index("step 00000")]
        finding = diagnose(read_run(str(result.directory)))[CONVERSATIONS]
        levels[name] = finding.level
        said = [line for line in warnings if "uneven: " in line]
        assert len(said) == (name == "short")
        if said:
            assert said[0] in before
            # On a busy machine the start has packed nothing yet, and counts a sample, which is all of these.
            numbers, longer, _ = finding.evidence.partition(" are longer than a row")
            assert longer
            assert numbers in said[0]
            assert "rows of 512 would hold 99 %" in said[0]
        small = [line for line in warnings if "sft/assistant_bpb is over" in line]
        assert len(small) == 1  # 4,096 positions are scored
    assert levels == {"short": "trouble", "long": "healthy"}
