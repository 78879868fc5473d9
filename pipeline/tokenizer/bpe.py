"""Training of a byte-level BPE: every text is some sequence of its ids, and every id some sequence of bytes."""

from collections.abc import Iterable
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.tokenizer.chat import built_in_template
from pipeline.tokenizer.specials import BOS, END, PAD, SPECIALS, escape

# How text is cut before merging; no token ever crosses a cut.
SPLIT_PATTERNS = {
    # GPT-4's, with numbers cut to two digits instead of three: better for small vocabularies. Source: nanochat.
    "nanochat": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def train_bpe(texts: Iterable[str], *, vocab_size: int, split_pattern: str) -> Any:
    """A PreTrainedTokenizerFast of at most vocab_size ids: 256 bytes, then merges by frequency, then the specials.

    The same texts give the same tokenizer. There are fewer ids when the texts hold too few different pieces.
    `tokenizer(text)` begins with BOS, as every document in training does. split_pattern: a name of SPLIT_PATTERNS or a
    regular expression; RecipeError when it is none.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pattern = SPLIT_PATTERNS.get(split_pattern, split_pattern)
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the tokenizers library raises plain Exception
        names = ", ".join(SPLIT_PATTERNS)
        raise RecipeError(
            f"tokenizer.split_pattern: {pattern!r} is neither {names} nor a regular expression ({error}). Correct it."
        ) from None
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        min_frequency=0,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Escaped: under a pattern that does not cut there, a text full of "<|bos|>" would grow a merge of that name, and the
    # control token added below would share its id with plain text.
    backend.train_from_iterator((escape(text) for text in texts), trainer)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = built_in_template(list(SPECIALS))
    return tokenizer
