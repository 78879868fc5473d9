"""How well a tokenizer compresses text: bytes per token, on the run's own text and on kinds it may have seen little of."""

from pathlib import Path
from typing import Any

from pipeline.tokenizer.sample_texts import SAMPLES
from pipeline.tokenizer.training_text import training_texts

JUDGED_CHARS = 500_000  # Of the train and of the validation text.
COMPARED = "openai-community/gpt2"


def judge(tokenizer, *, train: list, validation: list, beside: str | None = None) -> dict[str, Any]:
    """Bytes, tokens and bytes per token of each kind of text, and GPT-2's tokens where its files are at hand.

    beside: folder or Hub id of another tokenizer to compare with; default GPT-2 when the local Hub cache has it.
    """
    other, name = _other(beside)
    texts = {"train": _some(train), "validation": _some(validation)} | {kind: [text] for kind, text in SAMPLES.items()}
    rows = {}
    for kind, parts in texts.items():
        if parts:
            row: dict[str, float] = {
                "bytes": sum(len(text.encode()) for text in parts),
                "tokens": _tokens(tokenizer, parts),
            }
            row["bytes_per_token"] = row["bytes"] / row["tokens"]
            if other is not None:
                row["other_tokens"] = _tokens(other, parts)
                row["other_bytes_per_token"] = row["bytes"] / row["other_tokens"]
            rows[kind] = row
    return {"ids": len(tokenizer), "other": name, "other_ids": len(other) if other is not None else None, "texts": rows}


def table(judgement: dict[str, Any]) -> str:
    """The judgement as lines for the console."""
    other = judgement["other"]
    head = f"{'bytes per token':<16}{'bytes':>10}{'tokens':>10}{'ours':>8}"
    lines = [head + (f"{other[:20]:>22}{'difference':>12}" if other else "")]
    for kind, row in judgement["texts"].items():
        line = f"{kind:<16}{row['bytes']:>10,}{row['tokens']:>10,}{row['bytes_per_token']:>8.3f}"
        if other:
            gain = row["bytes_per_token"] / row["other_bytes_per_token"] - 1
            line += f"{row['other_bytes_per_token']:>22.3f}{gain:>+12.1%}"
        lines.append(line)
    if not other:
        lines.append(
            "beside GPT-2's, which is not on this machine: python -m pipeline.tokenizer RECIPE --beside FOLDER"
        )
    return "\n".join(lines)


def _some(sources: list) -> list[str]:
    return list(training_texts(sources, total_chars=JUDGED_CHARS, document_chars=10_000)) if sources else []


def _tokens(tokenizer, texts: list[str]) -> int:
    from pipeline.tokenizer.encode import plain_backend

    encodings = plain_backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings)


def _other(beside: str | None) -> tuple[Any, str | None]:
    from transformers import AutoTokenizer

    if beside is not None:
        from pipeline.tokenizer.ready import open_tokenizer

        return open_tokenizer(beside, revision=None, beside=None, where="--beside"), Path(beside).name
    try:
        return AutoTokenizer.from_pretrained(COMPARED, local_files_only=True, trust_remote_code=False), "gpt2"
    except (OSError, ValueError):
        return None, None  # Not in the local cache; nobody asked for it, so nothing is fetched.
