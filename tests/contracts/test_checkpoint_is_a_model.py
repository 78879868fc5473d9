"""Contract 4: every checkpoint and the finished model load in a process that has never heard of this package."""

import json

import pytest
import torch

from pipeline.model.load import load_model

READ_WITHOUT_US = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is a path?"}], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    new = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    found[folder] = {"ids": ids, "logits": logits.tolist(), "new": new, "eos": model.generation_config.eos_token_id, "type": model.config.model_type}
print(json.dumps(found))
"""


SHARDED = {"ranks": 2, "sharded": True}


@pytest.mark.full_except("modern-False")
@pytest.mark.parametrize(
    ("model", "bf16", "how"),
    [
        ("gpt2", False, {}),
        ("modern", False, {}),
        ("modern", True, {}),
        ("gpt2", False, SHARDED),
        ("modern", True, SHARDED),
    ],
    ids=["gpt2-False", "modern-False", "modern-True", "gpt2-sharded", "modern-sharded"],
)
def test_checkpoints_and_the_finished_model_load_without_this_package(runner, stock, model, bf16, how, tmp_path):
    train = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "bf16": bf16}
    run = runner.train(runner.recipe("alone", model, train=train), **how)
    folders = [run.directory / "checkpoints" / "checkpoint-2", run.directory / "model"]
    printed = stock.run(READ_WITHOUT_US, *folders, folder=tmp_path)
    for folder, found in json.loads(printed.splitlines()[-1]).items():
        ours = load_model(folder).eval()
        ids = torch.tensor([found["ids"]])
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(found["logits"]), ours(ids).logits[0], atol=1e-4, rtol=1e-4)
        assert ours.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() == found["new"]
        assert len(found["eos"]) == 2  # the end token, and BOS: nothing of a text follows it
        assert found["type"] == ("gpt2" if model == "gpt2" else "tandem")
        assert bool(list(run.directory.glob("model/*.py"))) == (model == "modern")
