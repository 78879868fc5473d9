"""The score of CORE: right answers as one item at a time gives them, its interval, its name, its limits, its ranks."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.evals.core import (
    CoreScore,
    TaskScore,
    Tokens,
    closing_lines,
    core_results,
    in_order,
    rows_of,
    score_core,
)
from pipeline.evals.core_bundle import TASKS, open_bundle
from pipeline.metrics import Protocol
from pipeline.model.load import load_model
from pipeline.process.errors import DataError
from tests.evals.conftest import SHARED
from tests.evals.core_items import write_bundle
from tests.model.tiny_models import tiny
from tests.ranks import printed_on_ranks

ROOT = Path(__file__).parents[2]
BY_NAME = {task.name: task for task in TASKS}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return open_bundle(str(write_bundle(tmp_path_factory.mktemp("bundle"), 7)))


@pytest.fixture(scope="module", params=["gpt2", "modern"])
def model(request):
    return tiny(request.param, vocab_size=266, n_positions=512)


def answers(scores):
    return {scored.task.name: scored.correct.tolist() for scored in scores.tasks}


def one_at_a_time(bundle, model, tokenizer, long_prompts):
    """Each item by itself, each row whole, all logits: the definition."""
    tokens = Tokens(tokenizer, tokenizer.bos_token_id, 512, long_prompts)
    found = {}
    for task in TASKS:
        items = in_order(bundle.items[task.file], None)
        found[task.name] = []
        rows, _ = rows_of(task, items, tokens)
        for index in range(len(items)):
            means, greedy = [], True
            for row in (row for row in rows if row.item == index):
                with torch.no_grad():
                    logits = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0, row.start - 1 : -1]
                targets = torch.from_numpy(row.ids[row.start :])
                means.append(F.cross_entropy(logits, targets).item())
                greedy = greedy and bool((logits.argmax(-1) == targets).all())
            right = means.index(min(means)) == items[index]["gold"] if "gold" in items[index] else greedy
            found[task.name].append(right)
    return found


@pytest.mark.full
@pytest.mark.parametrize("long_prompts", ["fewer_shots", "crop"])
def test_every_item_is_answered_as_when_it_is_scored_alone(bundle, model, tokenizer, long_prompts):
    score = score_core(bundle, model, tokenizer, device="cpu", long_prompts=long_prompts)
    assert answers(score) == one_at_a_time(bundle, model, tokenizer, long_prompts)
    assert 0 < sum(map(sum, answers(score).values())) < sum(map(len, answers(score).values()))


@pytest.mark.full
def test_a_capped_score_takes_the_first_items_and_draws_examples_from_them(bundle, tokenizer):
    model = tiny("gpt2", vocab_size=266, n_positions=512)
    whole, capped = (score_core(bundle, model, tokenizer, device="cpu", max_per_task=n) for n in (None, 3))
    assert {len(t.correct) for t in capped.tasks} == {3}
    zero_shot = [t.name for t in TASKS if t.shots == 0]
    assert [answers(capped)[name] for name in zero_shot] == [answers(whole)[name][:3] for name in zero_shot]
    assert capped.protocol != whole.protocol


@pytest.mark.full
def test_the_shortened_prompts_of_all_tasks_are_counted(bundle, tokenizer):
    model = tiny("gpt2", vocab_size=266, n_positions=64)
    names, reported = ["copa", "arc_easy", "squad"], []

    def score(wanted, **more):
        return score_core(bundle.only(wanted), model, tokenizer, device="cpu", **more)

    together, single = score(names, report=reported.append), [score([name]) for name in names]
    assert answers(together) == {name: found for one in single for name, found in answers(one).items()}
    assert [(one.task.name, one.shortened) for one in reported] == [("arc_easy", 7), ("copa", 0), ("squad", 7)]


@pytest.mark.full
def test_the_interval_of_the_mean_is_that_of_tasks_that_err_independently(bundle):
    tasks = [TaskScore(task, np.arange(100) % 2 == 0, 0) for task in TASKS]
    score = CoreScore(tasks, missing={}, bundle=bundle, protocol="p", seconds=1.0)
    for version in ("v1", "v2"):
        slopes = [task.centred(1.0, version) - task.centred(0.0, version) for task in TASKS]
        half = 1.96 * np.sqrt(sum(np.square(slopes)) * 0.25 / 100) / len(TASKS)
        middle = score.mean(version)
        assert score.interval(version) == pytest.approx((middle - half, middle + half), abs=half / 10)


@pytest.mark.full
def test_a_task_with_none_or_all_right_has_a_real_interval():
    none, every = (TaskScore(TASKS[0], np.full(24, right), 0).interval() for right in (False, True))
    assert none == pytest.approx((0.0, 1 - 0.05 ** (1 / 24)))
    assert every == pytest.approx((0.05 ** (1 / 24), 1.0))


@pytest.mark.full
def test_a_model_whose_loss_is_no_number_has_no_score(bundle, tokenizer):
    model = tiny("gpt2", vocab_size=266, n_positions=512)
    model.get_input_embeddings().weight.data[7] = float("nan")
    with pytest.raises(DataError, match="the model's loss is no number"):
        score_core(bundle.only(["copa"]), model, tokenizer, device="cpu")


@pytest.mark.full
def test_two_ranks_share_the_rows_and_have_one_score(bundle, tmp_path, tokenizer):
    model = tiny("gpt2", vocab_size=266, n_positions=512)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_bundle(tmp_path / "bundle", 7)
    printed = printed_on_ranks(ROOT / "tests" / "evals" / "core_rank.py", tmp_path)
    first, second = (json.loads(output.splitlines()[-1]) for output in printed)
    alone = score_core(bundle, model, tokenizer, device="cpu")
    assert first["answers"] == second["answers"] == answers(alone)
    assert first["failure"] == "RuntimeError: rank 0 broke"
    assert second["failure"].startswith("OtherRankFailed")


@pytest.mark.full
def test_only_the_mean_of_all_published_tasks_is_called_core(bundle):
    scores = [TaskScore(task, np.array([True, False]), 0) for task in TASKS]
    given = {"protocol": Protocol({"score": "core"}), "seconds": 1.0}

    class Published(type(bundle)):
        def published(self, task):
            return task.name not in self.other

    made = Published(items={}, sha256=bundle.sha256, blobs={}, missing={})
    object.__setattr__(made, "other", ())
    whole = CoreScore(tasks=scores, missing={}, bundle=made, **given)
    assert whole.name == "core"
    assert whole.mean("v1") == pytest.approx(np.mean([task.centred(0.5, "v1") for task in TASKS]))
    assert [row["name"] for row in core_results(whole)][:3] == ["core/v1", "core/v2", "core/hellaswag_zeroshot"]
    assert "not CORE" not in "\n".join(closing_lines(whole))
    object.__setattr__(made, "other", ("copa",))
    assert "not the published file of copa" in "\n".join(closing_lines(whole))
    assert [row["name"] for row in core_results(whole)][:2] == ["core_partial/v1", "core_partial/v2"]
    missing = CoreScore(tasks=scores[1:], missing={"hellaswag_zeroshot": "is not in it"}, bundle=made, **given)
    assert missing.name == "core_partial"
    assert "missing hellaswag_zeroshot" in "\n".join(closing_lines(missing))


@pytest.mark.full
def test_published_accuracies_of_gpt2_give_its_published_core():
    path = SHARED / "core_eval" / "reference" / "gpt2_core_published.json"
    if not path.exists():
        pytest.skip("needs the published accuracies")
    for name, known in json.loads(path.read_text())["models"].items():
        for version, published in (("v1", known["recomputed_v1"]), ("v2", known["recomputed_dclm2025"])):
            mean = np.mean([BY_NAME[task].centred(value, version) for task, value in known["accuracy"].items()])
            assert mean == pytest.approx(published, abs=2e-6), (name, version)


def test_the_reference_weights_answer_as_under_nanochats_evaluator(stories):
    from transformers import AutoTokenizer

    known = json.loads((SHARED / "core_eval" / "reference" / "nanochat_core_stories260K_mini.json").read_text())
    small = [name for name, task in BY_NAME.items() if task.shots == 0]
    bundle = open_bundle(str(SHARED / "core_eval" / "mini_eval_bundle")).only([*small, "squad", "piqa"])
    score = score_core(
        bundle,
        load_model(stories, dtype=torch.float32),
        AutoTokenizer.from_pretrained(stories),
        device="cpu",
        long_prompts="crop",
    )
    for scored in score.tasks:
        assert "".join("01"[int(c)] for c in scored.correct) == known["tasks"][scored.task.name]["correct"]


@pytest.mark.full
def test_a_tokenizer_without_a_beginning_is_refused(bundle):
    class NoBeginning:
        bos_token_id = eos_token_id = None
        added_tokens_decoder: ClassVar[dict] = {}

    with pytest.raises(DataError, match="neither a BOS nor an EOS token"):
        score_core(bundle, tiny("gpt2"), NoBeginning(), device="cpu")
