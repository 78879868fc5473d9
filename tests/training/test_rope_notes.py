"""Rotary positions that transformers sets by what it has seen: a line before step 1 where rows are that long."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.evals.bpb import per_token_nll
from pipeline.model.load import rope_notes
from tests.training.test_isolation import CONFIGS, opened, recipe_for

LIMIT = 64
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def config_of(kind: str, max_positions: int = LIMIT) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=405,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        rope_parameters={"rope_theta": 1e4, **ROPES[kind]},
    )


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("row_tokens", [LIMIT, 2 * LIMIT])
def test_a_line_is_said_where_the_loss_of_a_text_depends_on_its_batch(kind, row_tokens):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(kind)).eval()
    ids_BT = torch.randint(405, (2, row_tokens))
    halves_T = torch.arange(row_tokens) % (row_tokens // 2)  # two texts in a row, as packing has them
    positions_BT = torch.stack([halves_T, torch.arange(row_tokens)])
    batch = {"input_ids": ids_BT, "shift_labels": ids_BT.roll(-1, 1), "position_ids": positions_BT}
    with torch.no_grad():
        alone = per_token_nll(model, {name: rows[:1] for name, rows in batch.items()})
        beside = per_token_nll(model, batch)[:1]
    depends = not torch.allclose(alone, beside, atol=1e-3)
    assert depends == (kind != "linear" and row_tokens > LIMIT)
    assert len(rope_notes(model.config, row_tokens)) == depends


def test_positions_of_each_layer_type_are_looked_at():
    config = config_of("linear")
    config.rope_parameters = {"sliding_attention": ROPES["linear"], "full_attention": ROPES["longrope"]}
    (line,) = rope_notes(config, LIMIT + 1)
    assert "longrope positions depend on the longest text of a batch" in line
    assert len(line) <= 200


def test_a_model_with_long_positions_is_built_with_the_line(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setitem(CONFIGS, "llama", config_of("longrope", max_positions=256))
    opened(recipe_for(tmp_path, cache, "llama", "pretrain"))
    assert "model: beyond 64 tokens its longrope positions depend on" in capsys.readouterr().out
    opened(recipe_for(tmp_path, cache, "llama", "pretrain", row_tokens=64))
    assert "longrope" not in capsys.readouterr().out
