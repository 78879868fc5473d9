"""How to use the published model: with transformers alone, and with the commands of this program."""

from pipeline.hub.card.published import Published
from pipeline.report.tables import code

QUESTION = "What is the capital of France?"
TEXT = "The capital of France is"


def use_text(card: Published) -> str:
    why = "The repository carries the model's code, hence `trust_remote_code=True`.\n\n" if card.own_code else ""
    return (
        f"With transformers alone:\n\n{why}{code(_example(card), 'python')}\n"
        f"With Tandem, the program that trained it, in a clone of it:\n\n{code(_commands(card), 'bash')}"
    )


def _example(card: Published) -> str:
    branch = f', revision="{card.branch}"' if card.branch else ""
    trust = ", trust_remote_code=True" if card.own_code else ""
    if card.is_chat:
        inputs = [
            f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        inputs = [
            "# As in training, a text begins with BOS, which the tokenizer does not add by itself.",
            f'text = (tokenizer.bos_token or "") + "{TEXT}"',
            'inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")',
        ]
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{card.repo_id}"{branch})',
        f'model = AutoModelForCausalLM.from_pretrained("{card.repo_id}"{branch}{trust})',
        *inputs,
        "outputs = model.generate(**inputs, max_new_tokens=64)",
        'print(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
    ]
    return "\n".join(lines)


def _commands(card: Published) -> str:
    name = card.repo_id
    at = f"{name}@{card.branch}" if card.branch else name
    revision = f" --revision {card.branch}" if card.branch else ""
    talk = (
        ["# Talk to it, in the terminal or a browser; serve it to OpenAI clients"]
        if card.is_chat
        else ["# Let it continue a text, in the terminal or a browser"]
    )
    talk += [
        f"python -m pipeline.chat {at}" + ("" if card.is_chat else f' -p "{TEXT}"'),
        f"python -m pipeline.chat {at} --web",
    ]
    talk += [f"python -m pipeline.chat.serve {at}"] if card.is_chat else []
    further = [
        "# Score it: bits per byte of a text of yours, benchmarks",
        f"python -m pipeline.evals {name} bpb --text my.txt{revision}",
        f"python -m pipeline.evals {name} {'chat' if card.is_chat else 'core'}{revision}",
        "# Fine-tune it on conversations of yours (rows of messages)",
        "accelerate launch pipeline/sft.py recipes/quickstart_sft.yaml \\",
        f"    model.start_from={name} 'data.sources=[{{files: my.jsonl}}]'",
        "# Fetch the whole run: model, recipe, results",
        f"python -m pipeline.hub pull {name}{revision}",
    ]
    return "\n".join([*talk, *further])
