"""The adapters of model.adapter beside PEFT's own, and what is refused before step 1."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from pipeline.model.adapter import add_adapter, is_adapted, merge_adapter
from pipeline.model.errors import ModelOptionsError
from pipeline.model.load import load_model
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import sizes_from_model
from tests.families import save_model

peft = pytest.importorskip("peft")
SETTINGS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0, "modules_to_save": []}


def adapted(folder, *, new_ids=(), **settings):
    model = load_model(folder, native=True)
    add_adapter(model, {**SETTINGS, **settings}, base=str(folder), revision=None, new_ids=new_ids, seed=3)
    return model


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True, "use_rslora": True}])
def test_only_adapters_learn_and_their_losses_are_pefts(tmp_path, name, settings):
    folder = save_model(name, tmp_path)
    ours = adapted(folder, **settings)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**{**SETTINGS, **settings, "modules_to_save": None}))
    ids = torch.arange(5, 45).view(2, 20)
    losses = []
    for model in (ours, theirs):
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        found = []
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
        assert all(map(torch.equal, frozen, [p for p in model.parameters() if not p.requires_grad]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][-1] < losses[0][0] - 0.1


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # tied, untied
def test_rows_of_new_tokens_learn_and_are_merged(tmp_path, name):
    model = adapted(save_model(name, tmp_path), new_ids=[401, 403])
    ids = torch.tensor([[5, 401, 7, 403, 9]])
    before = model.get_input_embeddings().weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    changed = (model.get_input_embeddings().weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [401, 403]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        merged = merge_adapter(model)
        assert not is_adapted(merged)
        assert torch.allclose(merged(input_ids=ids).logits, logits, rtol=0, atol=1e-5)


def test_a_low_rank_change_of_a_tied_head_is_refused(tmp_path):
    with pytest.raises(ModelOptionsError, match="the embedding and the head in one"):
        adapted(save_model("qwen3", tmp_path), target_modules=["lm_head", "q_proj"])


def test_unknown_modules_are_refused_by_name(tmp_path):
    folder = save_model("qwen3", tmp_path)
    with pytest.raises(ModelOptionsError, match="no module no_such"):
        adapted(folder, modules_to_save=["no_such"])
    with pytest.raises(ModelOptionsError, match="PEFT cannot adapt this model"):
        adapted(folder, target_modules=["no_such"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.start_from=null", "names no model"),
        ("optimizer={type: muon_adamw}", "two factors of each"),
        ("train.fp8=true", "converts matrices that are trained"),
    ],
)
def test_a_recipe_that_cannot_train_adapters_is_refused(tmp_path, override, message):
    path = tmp_path / "a.yaml"
    path.write_text(
        "run: {stage: sft}\ndata: {sources: [{files: x.jsonl}], row_tokens: 64, batch_tokens: 512}\n"
        f"model: {{start_from: {tmp_path}, adapter: {{r: 4}}}}\ntrain: {{max_steps: 5, bf16: true}}\n"
    )
    with pytest.raises(RecipeError, match=message):
        read_recipe([str(path), override])


@pytest.mark.parametrize("whole", [[], ["lm_head"]])
def test_flops_of_a_token_leave_out_gradients_of_frozen_weights(tmp_path, whole):
    model = adapted(save_model("qwen2", tmp_path), modules_to_save=whole)  # its head is not tied
    ids = torch.arange(5, 45).view(2, 20)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    products = counter.get_flop_counts()["Global"]
    made = sum(flops for name, flops in products.items() if name in (torch.ops.aten.mm, torch.ops.aten.addmm))
    block = model.model.layers[0].self_attn
    unread = sum(p.numel() for name, p in block.named_parameters() if "lora_A" in name and "o_proj" not in name)
    unread += sum(getattr(block, name).base_layer.weight.numel() for name in ("q_proj", "k_proj", "v_proj"))
    assert made / ids.numel() == pytest.approx(sizes_from_model(model, 20).linear - 2 * unread, rel=1e-6)
