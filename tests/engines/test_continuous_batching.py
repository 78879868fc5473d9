"""transformers' continuous batching (`generate_batch`, paged keys and values) and TRL's GRPO on it."""

import pytest
import torch
from forms import FORMS, TEXTS, greedy, load, write_forms
from transformers import ContinuousBatchingConfig, GenerationConfig

SERVED = [form for form in FORMS if form != "modern"]
# On a CPU it would take most of the machine's memory by itself.
SMALL = {"num_blocks": 32, "max_batch_tokens": 512}


@pytest.mark.full_except("portable")
@pytest.mark.parametrize("form", SERVED)
def test_generate_batch_gives_the_greedy_tokens_of_generate(form, tmp_path):
    write_forms(tmp_path, form)
    model, tokenizer = load(tmp_path / form)
    prompts = [tokenizer(text).input_ids[:24] for text in TEXTS[:20]]
    expected = [greedy(model, ids) for ids in prompts]
    ends = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=32, **ends),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL),
    )
    assert [answer.generated_tokens for answer in answers.values()] == expected


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("form", ["portable", "modern-without-smear"])
def test_trls_grpo_takes_steps_with_paged_generation(form, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    write_forms(tmp_path, form)
    before = load(tmp_path / form)[0]
    settings = {"max_completion_length": 16, "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 3}
    here = {"output_dir": str(tmp_path / "grpo"), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / form),
        reward_funcs=lambda completions, **_: [-len(messages[0]["content"]) / 100 for messages in completions],
        args=trl.GRPOConfig(
            **settings,
            **here,
            learning_rate=1e-3,
            logging_steps=1,
            trust_remote_code=True,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config=SMALL,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text[:40]}]} for text in TEXTS[:8]]),
    )
    trainer.train()
    assert sum("reward" in row for row in trainer.state.log_history) == 3
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), trainer.model.parameters(), strict=True)]
    assert any(moved)
