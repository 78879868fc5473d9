"""Classifiers and reward models from a saved model, in a process that has nothing of ours."""

import os
import subprocess
import sys

import pytest
import torch
from tiny_models import random_ids, tiny

from pipeline.model.saved import save_model

CLASSIFY = """
import sys
import torch
sys.modules["pipeline"] = None  # importing it is an error
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
folder, out = sys.argv[1:]
ids = torch.load(out + "/ids.pt")
seen = {}
for name, auto in {"row": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}.items():
    model, info = auto.from_pretrained(folder, trust_remote_code=True, num_labels=3, output_loading_info=True)
    seen[name + " made anew"] = sorted(info["missing_keys"])
    labels = torch.tensor([2, 0]) if name == "row" else ids % 3
    output = model.eval()(input_ids=ids, labels=labels)
    output.loss.backward()
    seen[name + " logits"], seen[name + " score"] = output.logits.detach(), model.score.state_dict()
    model.save_pretrained(out + "/" + name)
    again = auto.from_pretrained(out + "/" + name, trust_remote_code=True).eval()
    assert torch.equal(again(input_ids=ids).logits, output.logits)
torch.save(seen, out + "/seen.pt")
"""
REWARD = """
import sys
sys.modules["pipeline"] = None
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import RewardConfig, RewardTrainer
folder, out = sys.argv[1:]
words = {"<|bos|>": 0, "<|end|>": 1, "<|pad|>": 2, "yes": 3, "no": 4, "why": 5}
inner = Tokenizer(models.WordLevel(words, unk_token="no"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>")
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=1)
rows = Dataset.from_list([{"chosen": "why yes yes", "rejected": "why no"}, {"chosen": "why yes", "rejected": "why no no"}] * 8)
args = RewardConfig(out + "/reward", max_steps=6, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
                    report_to=[], use_cpu=True, bf16=False, save_strategy="no")
trainer = RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
assert len(losses) == 6 and losses[-1] < 0.5 * losses[0], losses
"""


def run(code, folder, out):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(out / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", code, str(folder), str(out)]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_checkpoint_folder_loads_as_a_classifier_of_rows_and_of_tokens(tmp_path):
    model, ids = tiny("modern"), random_ids(2, 20)
    ids[0, 15:] = model.config.pad_token_id
    save_model(model, tmp_path / "model")
    torch.save(ids, tmp_path / "ids.pt")
    run(CLASSIFY, tmp_path / "model", tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    assert seen["row made anew"] == ["score.weight"]
    assert seen["token made anew"] == ["score.bias", "score.weight"]
    with torch.no_grad():
        hidden = model.transformer(ids).last_hidden_state
    last = torch.stack([hidden[0, 14], hidden[1, 19]])
    torch.testing.assert_close(seen["row logits"], last @ seen["row score"]["weight"].T, atol=1e-5, rtol=1e-5)
    expected = torch.nn.functional.linear(hidden, **seen["token score"])
    torch.testing.assert_close(seen["token logits"], expected, atol=1e-5, rtol=1e-5)


def test_trls_reward_trainer_learns_from_a_saved_model(tmp_path):
    pytest.importorskip("trl")
    save_model(tiny("modern"), tmp_path / "model")
    run(REWARD, tmp_path / "model", tmp_path)
