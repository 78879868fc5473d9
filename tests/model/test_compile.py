"""Under torch.compile the training forward is one graph, compiled once, and computes the same."""

import pytest
import torch
from tiny_models import loss_and_gradients, random_ids, tiny
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.full


def batches(packed):
    for seed in range(3):
        labels = random_ids(2, 24, seed=seed + 10)
        labels[:, : 3 * seed] = -100
        batch = {"input_ids": random_ids(2, 24, seed=seed), "labels": labels, "shift_labels": labels}
        if packed:
            batch["position_ids"] = torch.arange(24).remainder(5 + seed)[None].expand(2, -1).contiguous()
        yield batch | {"num_items_in_batch": torch.tensor(48 - 6 * seed)}


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
def test_the_training_step_is_one_graph_compiled_once(model, packed):
    torch._dynamo.reset()
    model.train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in batches(packed):
        found = [loss_and_gradients(step, batch, model=model) for step in (model, compiled)]
        for eager, graph in zip(*found, strict=True):
            torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1


def test_the_compiled_graph_holds_no_mask_where_nothing_is_masked():
    torch._dynamo.reset()
    graphs = []

    def reading(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(tiny("gpt2").train(), backend=reading, fullgraph=True)
    compiled(random_ids(2, 24), shift_labels=random_ids(2, 24))
    calls = [n for g in graphs for n in g.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert len(calls) == 4
    assert all(call.kwargs["attn_mask"] is None and call.kwargs["is_causal"] for call in calls)


def test_compiled_bf16_training_is_eager_bf16_training_within_its_rounding():
    torch._dynamo.reset()
    model = tiny("modern").train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = next(batches(False))
    losses = []
    for step in (model, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(step(**batch).loss)
        losses[-1].backward()
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-3)
    assert losses[0].item() == pytest.approx(model(**batch).loss.item(), rel=2e-2)
