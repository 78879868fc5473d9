"""Load and run a published folder without this package: `python -P isolated_load_test.py FOLDER OUTPUT`.

It imports nothing of ours. OUTPUT becomes safetensors: the ids of the text and the model's logits over them, fp32 on
the CPU.
"""

import os
import sys
from typing import Any

TEXT = "The quick brown fox jumps over 13 lazy dogs, and nobody says: \u201cna\u00efve\u201d."


def main(folder: str, output: str) -> None:
    sys.modules["pipeline"] = None  # type: ignore[assignment]  # importing it is an error, also where it is installed
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        model.eval()
        config = model.config
    else:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = whole_model(folder, config)
    ids_1T = torch.tensor([tokenizer(TEXT).input_ids[: config.get_text_config().max_position_embeddings]])
    with torch.no_grad():
        logits_TV = model(input_ids=ids_1T).logits[0].float().contiguous()
    save_file({"ids": ids_1T[0], "logits": logits_TV}, output)


def whole_model(folder: str, config: Any) -> Any:
    """Return the model of the folder in fp32."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    if config.get_text_config() is config:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    # With parts for pictures or sound, which that class may leave out.
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main(*sys.argv[1:])
