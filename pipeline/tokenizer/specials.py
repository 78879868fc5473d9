"""The control tokens: their names, and how text that spells one is kept from becoming one."""

BOS = "<|bos|>"  # Before every document, conversation and packed piece.
END = "<|end|>"  # Ends every turn; eos_token, so that `generate` stops there.
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
PYTHON_START = "<|python_start|>"  # Around a tool call, which the assistant writes ...
PYTHON_END = "<|python_end|>"
OUTPUT_START = "<|output_start|>"  # ... and around what the tool answered, which it only reads.
OUTPUT_END = "<|output_end|>"
PAD = "<|pad|>"

SPECIALS = (BOS, END, SYSTEM, USER, ASSISTANT, PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END, PAD)
# What the chat template itself writes; bos and pad have their own place in any tokenizer.
TEMPLATE_MARKS = (END, SYSTEM, USER, ASSISTANT, PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)

# Of tokenizers without a bos token: what their models' texts were separated by, or began with.
DOCUMENT_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<s>")

WORD_JOINER = "\u2060"  # Has no width and no meaning: the text looks the same and is no control string any more.


def control_strings(tokenizer) -> list[str]:
    """Return every string that the tokenizer reads as a control token, in the order of ids."""
    added = tokenizer.added_tokens_decoder
    return [added[i].content for i in sorted(added) if added[i].special]


def control_ids(tokenizer) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def document_start(tokenizer) -> int | None:
    """Return the id that a text begins with: bos, else the control token of that use; never the end of a chat's turn."""
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    known = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((known[name] for name in DOCUMENT_STARTS if name in known), tokenizer.eos_token_id)


def tool_marks(tokenizer) -> tuple[int, ...] | None:
    """Return the ids of python_start, python_end, output_start and output_end; None when one of them is no control token."""
    known = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)
    return tuple(known[mark] for mark in marks) if all(mark in known for mark in marks) else None


def escape(text: str, controls: list[str] | tuple[str, ...] = SPECIALS) -> str:
    """Return the text with U+2060 after the first character of every control string; the chat template does the same.

    Nothing is ever deleted, so no new control string can arise from the pieces of old ones.
    """
    for control in controls:
        if control in text:
            text = text.replace(control, control[0] + WORD_JOINER + control[1:])
    return text
