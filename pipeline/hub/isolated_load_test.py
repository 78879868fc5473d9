"""Load and run a published folder without this package: `python -P isolated_load_test.py FOLDER OUTPUT`.

It imports nothing of ours. OUTPUT becomes safetensors: the ids of the text and the model's logits over them, fp32 on
the CPU.
"""

import sys

TEXT = "The quick brown fox jumps over 13 lazy dogs, and nobody says: \u201cna\u00efve\u201d."


def main(folder: str, output: str) -> None:
    sys.modules["pipeline"] = None  # type: ignore[assignment]  # importing it is an error, also where it is installed
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    if config.get_text_config() is config:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    else:  # with parts for pictures or sound, which that class may leave out
        model_class = getattr(transformers, config.architectures[0])
        model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    ids_1T = torch.tensor([tokenizer(TEXT).input_ids[: config.get_text_config().max_position_embeddings]])
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0].float().contiguous()
    save_file({"ids": ids_1T[0], "logits": logits_TV}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
