"""docs/build_on.md on real chat runs: every example as it stands on the page. Slow: run by hand.

bash run_tests.sh -m slow tests/build_on
"""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from pipeline.model.load import load_model
from pipeline.tokenizer.chat import render
from pipeline.tokenizer.load import open_tokenizer
from tests.build_on.page import COMMANDS, EXAMPLES, TASKS

# What training says of itself, for `example(then=...)`.
LOG = """
results["log"] = [row for row in trainer.state.log_history if "loss" in row]
"""


def conversations(chat_files, count):
    return [json.loads(line) for line in chat_files[0].read_text().splitlines()[:count]]


def weights_moved(place, folder) -> bool:
    mine, theirs = load_model(place.model), load_model(place.path / folder)
    return any(not torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def losses(place, folder, rows) -> tuple[float, float]:
    """Mean nats of the rows' (ids, labels), at most 256 of each: of the run's model and of the one in the folder."""
    found = []
    for model in (load_model(place.model).eval(), load_model(place.path / folder).eval()):
        with torch.no_grad():
            cut = [[torch.tensor([part[:256]]) for part in row] for row in rows]
            found.append(sum(model(ids, labels=labels).loss.item() for ids, labels in cut) / len(rows))
    return found[0], found[1]


def test_every_example_of_the_page_is_run_here():
    for code in EXAMPLES.values():
        ast.parse(code)
    source = Path(__file__).read_text()
    assert [name for name in EXAMPLES if f'"{name}"' not in source] == []
    lines = [line for line in COMMANDS if line and not line.startswith("pip install")]
    assert [line for line in lines if not any(f'"{begin}"' in source for begin in _beginnings(line))] == []


def _beginnings(line):
    words = line.split()
    return [" ".join(words[:n]) for n in range(2, len(words) + 1)]


@pytest.mark.slow
def test_the_pipeline_answers_chats_and_continues_plain_text_after_its_bos(place):
    results = place.example(
        "generate",
        """
results["role"] = answer["role"]
text = "The function"
ids = generate.tokenizer(text, return_tensors="pt").input_ids
results["ids"] = ids[0].tolist()
results["greedy"] = generate.model.generate(ids, max_new_tokens=32, do_sample=False)[0].tolist()
results["written"] = generate(text, max_new_tokens=32, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
results["ends"] = generate.model.generation_config.eos_token_id
""",
    )
    tokenizer = open_tokenizer(str(place.model), revision=None, beside=None, where="the test")
    assert results["role"] == "assistant"
    assert results["ids"][0] == tokenizer.bos_token_id not in results["ids"][1:]
    assert results["written"] == results["greedy"]
    assert results["ends"] == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    assert "The function" in place.printed


@pytest.mark.slow
def test_trl_sft_trains_on_our_labels_with_the_models_own_loss(place, chat_files):
    pytest.importorskip("trl")
    rows = conversations(chat_files, 24)
    place.write_lines("conversations.jsonl", rows)
    results = place.example(
        "sft",
        LOG
        + """
import torch
results["ids"] = [list(ids) for ids in trainer.train_dataset["input_ids"]]
results["labels"] = [list(labels) for labels in trainer.train_dataset["labels"]]
model = trainer.model.eval()
batch = {k: v for k, v in next(iter(trainer.get_train_dataloader())).items() if torch.is_tensor(v)}
with torch.no_grad():
    results["losses"] = [model(**batch).loss.item(), model(**batch, fused_lm_head=True).loss.item()]
""",
    )
    tokenizer = open_tokenizer(str(place.model), revision=None, beside=None, where="the test")
    ours = [render(tokenizer, row["messages"]) for row in rows]
    assert results["ids"] == [ids[:256] for ids, _ in ours]
    labels = [[i if bit else -100 for i, bit in zip(ids, bits, strict=True)] for ids, bits in ours]
    assert results["labels"] == [row[:256] for row in labels]
    assert results["losses"][0] == pytest.approx(results["losses"][1], rel=1e-4)
    assert len(results["log"]) == 3
    before, after = losses(place, "sft", [(ids, row) for (ids, _), row in zip(ours, labels, strict=True)])
    assert after < before


@pytest.mark.slow
def test_packed_conversations_do_not_see_each_other_in_trl(place, chat_files, monkeypatch):
    pytest.importorskip("trl")
    place.write_lines("conversations.jsonl", conversations(chat_files, 8))
    monkeypatch.setitem(EXAMPLES, "sft", EXAMPLES["sft"].replace("max_length=256,", "max_length=256, packing=True,"))
    results = place.example(
        "sft",
        """
import torch
model = trainer.model.eval()
batch = {k: v for k, v in next(iter(trainer.get_train_dataloader())).items() if torch.is_tensor(v)}
(ids,), (labels,), (positions,) = batch["input_ids"], batch["labels"], batch["position_ids"]
starts = [i for i, position in enumerate(positions) if position == 0] + [len(ids)]
def nats(ids, labels, **given):
    return torch.nn.functional.cross_entropy(model(ids[None], **given).logits[0, :-1].float(), labels[1:], reduction="sum").item()
with torch.no_grad():
    results["packed"] = model(**batch, fused_lm_head=True).loss.item() * (labels[1:] != -100).sum().item()
    results["alone"] = sum(nats(ids[a:b], labels[a:b]) for a, b in zip(starts, starts[1:]))
    results["starts"] = len(starts) - 1
""",
    )
    assert results["starts"] > 1
    assert results["packed"] == pytest.approx(results["alone"], rel=1e-4)


@pytest.mark.slow
def test_a_lora_learns_merges_and_the_merged_folder_serves_every_command(place, chat_files, text_files):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    rows = conversations(chat_files, 24)
    place.write_lines("conversations.jsonl", rows)
    results = place.example(
        "lora",
        """
import torch
ids = torch.arange(40)[None]
results["modules"] = sorted({n.split(".lora_")[0].split(".")[-1] for n, p in trainer.model.named_parameters() if p.requires_grad})
exact = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()  # without TRL's bf16
results["logits"] = exact(ids).logits[0].tolist()
""",
    )
    assert (
        results["modules"]
        == {
            "gpt2": ["c_attn", "c_fc", "c_proj"],
            "nanochat": ["fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"],
            "tandem": ["c_fc", "c_k", "c_proj", "c_q", "c_v", "smear_gate", "value_gate"],
        }[place.form]
    )
    adapted = torch.tensor(results["logits"])
    place.example("merge")
    tokenizer = open_tokenizer(str(place.model), revision=None, beside=None, where="the test")
    ours = [render(tokenizer, row["messages"]) for row in rows]
    labelled = [(ids, [i if bit else -100 for i, bit in zip(ids, bits, strict=True)]) for ids, bits in ours]
    before, after = losses(place, "merged", labelled)
    assert after < before
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (load_model(place.path / "merged")(ids).logits[0] - adapted).abs().max() <= 1e-4
        assert (load_model(place.model)(ids).logits[0] - adapted).abs().max() > 1e-2
    assert {p.name for p in (place.path / "merged").glob("*.py")} == {p.name for p in place.model.glob("*.py")}
    assert place.command("python -m pipeline.chat merged -p").strip() != ""
    (place.path / "texts.txt").write_text(json.loads(text_files[2].read_text().splitlines()[0])["text"])
    assert "bpb" in place.command("python -m pipeline.evals merged bpb")
    place.command("python -m pipeline.hub export merged")
    assert load_model(place.path / "merged-bf16").config.n_positions == load_model(place.model).config.n_positions


@pytest.mark.slow
def test_trl_dpo_begins_at_ln_2_and_prefers_the_chosen_answers(place):
    pytest.importorskip("trl")
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"What is {n}?"}],
            "chosen": [{"role": "assistant", "content": f"It is {n}."}],
            "rejected": [{"role": "assistant", "content": "I do not know."}],
        }
        for n in range(24)
    ]
    place.write_lines("pairs.jsonl", pairs)
    log = place.example("dpo", LOG)["log"]
    assert log[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert log[-1]["rewards/margins"] > 0
    assert log[-1]["loss"] < log[0]["loss"]
    assert weights_moved(place, "dpo")


@pytest.mark.slow
def test_trl_grpo_generates_scores_and_takes_steps(place):
    pytest.importorskip("trl")
    place.write_lines("prompts.jsonl", [{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(4)])
    log = place.example("grpo", LOG)["log"]
    assert len(log) == 4
    assert all(row["reward"] < 0 and row["grad_norm"] > 0 for row in log)
    assert weights_moved(place, "grpo")


@pytest.mark.slow
def test_the_stock_trainer_trains_further_and_its_result_loads_and_generates(place, text_files):
    (place.path / "texts.jsonl").write_text(text_files[0].read_text()[:60_000].rpartition("\n")[0] + "\n")
    results = place.example(
        "further",
        """
results["rows"] = list(trainer.train_dataset["input_ids"])
results["begins"] = trainer.train_dataset[0]["input_ids"][0] == tokenizer.bos_token_id
again = AutoModelForCausalLM.from_pretrained("further", trust_remote_code=True)
import torch
results["cached"] = again.generate(torch.tensor([[tokenizer.bos_token_id]]), max_new_tokens=4, return_dict_in_generate=True).past_key_values is not None
""",
    )
    assert results["begins"]
    assert results["cached"]
    before, after = losses(place, "further", [(ids, ids) for ids in results["rows"]])
    assert after < before


@pytest.mark.slow
def test_the_harness_and_our_command_give_a_chat_run_the_same_numbers(place):
    pytest.importorskip("lm_eval")
    ((name, task),) = TASKS.items()
    (place.path / name).parent.mkdir()
    (place.path / name).write_text(task)
    words = ["a list", "a number", "the file", "some text, of which there is more", "nothing"]
    questions = [{"question": f"What is {w}?", "answers": words, "gold": n * n % 5} for n, w in enumerate(words * 4)]
    place.write_lines("endings.jsonl", questions)
    ours = place.command("python -m pipeline.evals runs/NAME lm_eval:endings")
    theirs = place.command("python -m lm_eval --model hf")
    mine = re.findall(r"lm_eval/endings/(\w+) +([\d.]+) +([\d.]+) +[\d.]+-[\d.]+ +20 ", ours)
    assert [name for name, _, _ in mine] == ["acc", "acc_norm"]
    by_harness = re.findall(r"(acc\w*) *\|\S+ *\|([\d. ]+)\|\S+ *\|([\d. ]+)", theirs)
    for (name, value, error), (their_name, their_value, their_error) in zip(mine, by_harness, strict=True):
        assert (name, float(value)) == (their_name, float(their_value))
        digits = max(3, len(their_error.strip().partition(".")[2]))  # its table writes three where a column has a zero
        assert f"{float(error):.{digits}f}" == f"{float(their_error):.{digits}f}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("quantize", "bitsandbytes"), ("quantize_torchao", "torchao")])
def test_a_quantized_model_is_smaller_near_the_model_and_loads_again(place, name, package):
    pytest.importorskip(package)
    if (place.form, name) == ("gpt2", "quantize_torchao"):
        pytest.skip("torchao quantizes nn.Linear, and GPT-2 has none")
    folder = {"quantize": "int8", "quantize_torchao": "int8-torchao"}[name]
    results = place.example(
        name,
        f"""
import torch
ids = torch.arange(60)[None]
with torch.no_grad():
    logits = model.eval()(ids).logits.float()
    plain = AutoModelForCausalLM.from_pretrained("runs/NAME/model", trust_remote_code=True).eval()(ids).logits.float()
    again = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True).eval()(ids).logits.float()
results["distance"] = ((logits - plain).norm() / plain.norm()).item()
results["again"] = (logits - again).abs().max().item()
results["written"] = model.generate(ids[:, :8], max_new_tokens=4, do_sample=False).shape[1]
""",
    )
    assert 0 < results["distance"] < 0.05
    assert results["again"] == 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (place.path / folder, place.model)]
    assert sizes[0] < sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("ensured", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_a_lora_on_a_tied_head_loads_back_only_as_documented(kind, ensured, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    gated = {**sizes, "intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = {
        "gpt2": GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2),
        "llama": LlamaConfig(**gated),
        "qwen3": Qwen3Config(**gated, head_dim=16),
    }[kind]
    base, fresh = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    fresh.load_state_dict(base.state_dict())
    more = {"ensure_weight_tying": True} if ensured else {}
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["lm_head"], **more))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(300, (4, 32))
    for _ in range(20):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    with torch.no_grad():
        trained = adapted.eval()(input_ids=ids).logits
        as_loaded = torch.allclose(trained, loaded(input_ids=ids).logits, atol=1e-5)
        as_merged = torch.allclose(trained, loaded.merge_and_unload()(input_ids=ids).logits, atol=1e-5)
    merge_is_right = kind == "gpt2" and ensured
    assert (as_loaded, as_merged) == (not merge_is_right, merge_is_right)
