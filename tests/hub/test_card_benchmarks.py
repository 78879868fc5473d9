"""Benchmarks on the model card: of the published model only, with what they stand on, and readable to the Hub's index."""

import pytest
import yaml
from huggingface_hub import ModelCard

from pipeline.hub.card import model_card
from pipeline.hub.content import collect
from pipeline.process.storage import write_json, write_text
from pipeline.report.run_data import read_run
from pipeline.run_dir.checkpoints import whole_folder
from tests.report.evaluated_run import chat_rows, contaminated, core_rows, lm_eval_row, write_evaluated_run


@pytest.fixture
def card_of(tmp_path):
    def write(*entries, step=20):
        run = write_evaluated_run(tmp_path / "a", *entries)
        write_json(run.model / "config.json", {"model_type": "gpt2"})
        return model_card(read_run(str(run.path)), repo_id="me/a", step=step)

    return write


def benchmarks_of(card):
    return card.split("## Benchmarks\n")[1].split("\n## ")[0]


def test_the_card_shows_the_finished_benchmarks_with_interval_and_protocol(card_of):
    older, newest, own = core_rows(1), core_rows(2), core_rows(3)
    section = benchmarks_of(card_of(("model/", 20, own), ("step 10", 10, older), ("step 20", 20, newest)))
    low_high = f"{own[0]['low']:.4f} to {own[0]['high']:.4f}"
    assert f"| core/v1 | {own[0]['value']:.6f} | {low_high} | 22 |" in section
    assert "### CORE, first 4 items of each task\n" in section
    assert "| piqa | 0.7500 | " in section
    assert f"Protocol {own[0]['protocol']}." in section
    assert section.count("| piqa |") == 1


def test_a_model_scored_only_at_its_last_step_shows_only_those_scores(card_of):
    newest = core_rows(2)
    section = benchmarks_of(card_of(("step 10", 10, core_rows(1)), ("step 20", 20, newest)))
    assert f"| core/v1 | {newest[0]['value']:.6f} |" in section
    assert "step 10" not in section


def test_a_card_without_scores_of_its_model_has_no_section_of_benchmarks(card_of):
    card = card_of(("step 10", 10, core_rows(1)))
    assert "## Benchmarks" not in card
    assert "model-index" not in card


def test_the_hub_reads_every_mean_and_task_from_the_metadata(card_of):
    rows = [*core_rows(2), *chat_rows(), lm_eval_row(), {"name": "chat/own", "value": float("nan"), "protocol": "x"}]
    results = ModelCard(card_of(("model/", 20, rows))).data.eval_results
    by_name = {result.metric_name: result for result in results}
    assert set(by_name) == {row["name"] for row in rows} - {"chat/own"}
    mean, task = by_name["core/v1"], by_name["lm_eval/piqa/acc_norm"]
    assert mean.metric_value == rows[0]["value"]
    assert mean.metric_args == {key: rows[0][key] for key in ("low", "high")}
    assert mean.dataset_name.endswith(f"protocol {rows[0]['protocol']}")
    assert (mean.metric_type, by_name["core/piqa"].metric_type) == ("centred_accuracy", "accuracy")
    assert (task.metric_type, task.metric_args) == ("acc_norm", {"stderr": 0.0125})


def test_a_partial_core_is_called_partial_in_table_and_metadata(card_of):
    card = card_of(("model/", 20, core_rows(names=["copa"])))
    front = yaml.safe_load(card.split("---\n")[1])
    names = [metric["name"] for result in front["model-index"][0]["results"] for metric in result["metrics"]]
    assert names == ["core_partial/v1", "core_partial/v2", "core/copa"]
    assert "### core_partial, first 4 items of each task\n" in card
    assert "This is not CORE: missing hellaswag_zeroshot, " in card
    assert "### CORE" not in card


def test_the_card_tells_contaminated_items_and_the_score_without_them(card_of):
    rows = [contaminated(row, 2, 0.125) if row["name"] == "core/copa" else row for row in core_rows()]
    section = benchmarks_of(card_of(("model/", 20, rows)))
    assert "| 2 of 4 (66.67 %) | 0.1250 |" in section
    assert "An item is contaminated when" in section


def test_a_published_checkpoint_has_its_own_scores_and_no_later_ones(tmp_path):
    bpb = [{"name": "val/bpb", "value": value, "protocol": f"of-{value}"} for value in (1.5, 1.25)]
    run = write_evaluated_run(
        tmp_path / "a",
        ("checkpoint-10", 10, [*core_rows(1), bpb[0]]),
        ("step 20", 20, [*core_rows(3), bpb[1]]),
        ("model/", 20, core_rows(4)),
    )
    with whole_folder(run.checkpoints / "checkpoint-10") as checkpoint:
        write_json(checkpoint / "config.json", {"model_type": "gpt2"})
    write_text(run.recipe, "{}\n")
    files = collect(
        read_run(str(run.path)), model=run.checkpoints / "checkpoint-10", step=10, repo_id="me/a", folder=tmp_path
    )
    card = files["README.md"].read_text()
    assert f"| core/v1 | {core_rows(1)[0]['value']:.6f} |" in card
    assert "of-1.5" in card
    assert "of-1.25" not in card
    assert "step 20" not in card
    assert "evals.json" in files
