"""The run's tokenizer: from the cache, trained on its sources, or ready made; and what names it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import read_json, remove_folder, write_json
from pipeline.artifacts.cache import cache_dir
from pipeline.artifacts.checkpoints import SEAL, problems, seal, whole_folder
from pipeline.artifacts.errors import DataError
from pipeline.artifacts.locks import file_lock
from pipeline.tokenizer.specials import BOS, END, PAD, control_strings

# Part of the cache's key: raised when training would give something else for the same text and settings.
TRAINING_VERSION = 1


def load_or_train(recipe, sources: list, *, validation: list | None = None, beside: str | None = None) -> Any:
    """The PreTrainedTokenizerFast of a recipe, with chat template, bos, eos and pad.

    A ready one (`tokenizer.path`) gets the control tokens it lacks, each said in a printed line. Otherwise one is trained on
    the sources, once per text and settings: every process finds it in the cache, one trains while the others wait. It is
    judged then: report.json beside it, printed; `validation` and `beside` are for that judgement alone.
    Raises RecipeError, InputMissingError or ServiceError for what the recipe names; DataError when the sources hold no text.
    """
    if recipe.tokenizer.path:
        from pipeline.tokenizer.ready import load_ready

        return load_ready(recipe)
    folder = cached_folder(recipe, sources)
    with file_lock(folder.with_name(folder.name + ".lock")):
        if found := _damage(folder):
            print(f"tokenizer: {folder}: {'; '.join(found)}, so it is trained again on the same text", flush=True)
            remove_folder(folder)
        if not folder.is_dir():
            _train(recipe, sources, folder, validation=validation or [], beside=beside)
    return _open(recipe, folder)


def cached_folder(recipe, sources: list) -> Path:
    """Where the trained tokenizer of these sources and settings is or will be."""
    settings = recipe.tokenizer
    key = {
        "version": TRAINING_VERSION,
        "sources": [[source.fingerprint, source.spec.weight or 1.0] for source in sources],
        "vocab_size": settings.vocab_size,
        "split_pattern": settings.split_pattern,
        "train_chars": int(settings.train_chars),
        "document_chars": int(settings.document_chars),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir(recipe.data.cache_dir) / "tokenizers" / name


def _train(recipe, sources: list, folder: Path, *, validation: list, beside: str | None) -> None:
    from pipeline.tokenizer.bpe import train_bpe
    from pipeline.tokenizer.byte_lengths import byte_lengths
    from pipeline.tokenizer.judgement import judge, table
    from pipeline.tokenizer.training_text import training_texts

    settings = recipe.tokenizer
    names = ", ".join(source.name for source in sources)
    print(
        f"tokenizer: training {settings.vocab_size:,} ids on up to {int(settings.train_chars):,} characters of {names}"
    )
    read = _Counted(
        training_texts(sources, total_chars=int(settings.train_chars), document_chars=int(settings.document_chars))
    )
    tokenizer = train_bpe(read, vocab_size=settings.vocab_size, split_pattern=settings.split_pattern)
    if read.chars == 0:
        raise DataError(f"{names}: no text to train a tokenizer on. Name sources with text, or set tokenizer.path.")
    if len(tokenizer) < settings.vocab_size:
        print(
            f"tokenizer: the text has only {len(tokenizer):,} different pieces; the vocabulary is that small, "
            f"not tokenizer.vocab_size = {settings.vocab_size:,}"
        )
    report: dict[str, Any] = {"texts": read.texts, "chars": read.chars, "ids": len(tokenizer)}
    report["judgement"] = judge(tokenizer, train=sources, validation=validation, beside=beside)
    with whole_folder(folder) as temporary:
        from safetensors.numpy import save_file

        tokenizer.save_pretrained(temporary)
        save_file({"byte_lengths": byte_lengths(tokenizer)}, temporary / "byte_lengths.safetensors")
        write_json(temporary / "report.json", report)
    print(table(report["judgement"]))
    print(f"tokenizer: {len(tokenizer):,} ids from {read.chars:,} characters of {read.texts:,} texts, kept in {folder}")


def _damage(folder: Path) -> list[str]:
    """Return what keeps a cached tokenizer from being used; nothing where none is cached.

    One of an earlier version has no checksums: it is sealed as it is when it loads and agrees with what was noted beside it.
    """
    if not folder.is_dir():
        return []
    if (folder / SEAL).exists():
        return problems(folder)
    if not _agrees_with_itself(folder):
        return ["is not what its training left"]
    seal(folder)
    return []


def _agrees_with_itself(folder: Path) -> bool:
    from safetensors.numpy import load_file
    from transformers import PreTrainedTokenizerFast

    from pipeline.tokenizer.byte_lengths import byte_lengths

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        kept = load_file(folder / "byte_lengths.safetensors")["byte_lengths"]
        ids = read_json(folder / "report.json")["ids"]
        return (
            len(tokenizer) == ids
            and byte_lengths(tokenizer).tolist() == kept.tolist()
            and (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BOS, END, PAD)
            and tokenizer.padding_side == "left"
        )
    except Exception:  # the libraries raise many kinds, plain Exception among them: whichever, it cannot be used
        return False


def _open(recipe, folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    from pipeline.tokenizer.ready import chosen_template

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = chosen_template(recipe, control_strings(tokenizer))
    return tokenizer


def identity(tokenizer) -> str:
    """What makes two tokenizers the same: ids for every text, named specials, chat template; 64 hex digits."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left behind by whoever called the tokenizer last; no part of what it is.
    backend.pop("padding")
    backend.pop("truncation")
    state = {"backend": backend, "specials": tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


class _Counted:
    """Texts on their way through, counted."""

    def __init__(self, texts):
        self._texts, self.texts, self.chars = texts, 0, 0

    def __iter__(self):
        for text in self._texts:
            self.texts += 1
            self.chars += len(text)
            yield text
