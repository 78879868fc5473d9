"""Whether transformers gives a saved tokenizer back: for some model types it puts a class of its own in its place."""

import tempfile
from typing import Any

from pipeline.tokenizer.load import identity


def comes_back_beside(config: Any, tokenizer: Any) -> bool:
    """True when AutoTokenizer, asked for a folder with this model config, gives this very tokenizer.

    A config that AutoTokenizer cannot read (of your own code) decides nothing, and gives True.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            back = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, KeyError, OSError):
            return True
    return hasattr(back, "backend_tokenizer") and identity(back) == identity(tokenizer)
