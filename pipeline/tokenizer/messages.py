"""Messages as a chat template is given them, what it refuses, and which of its spans are trained."""

import re

from pipeline.process.errors import DataError
from pipeline.sources.formats import REASONING

GENERATION = re.compile(r"\{%-?\s*generation")


def refusal_of(error: BaseException) -> str:
    """Return the sentence for what a template raised, which may be as long as the template likes."""
    reason = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        reason = "it calls itself without end"
    if len(reason) > 300:
        reason = f"{reason[:300]}..."
    return f"the chat template refuses the conversation: {reason}"


def shown(messages: list[dict]) -> list[dict]:
    """Return the messages as a template sees them: no weight, no key that is None, no empty list of calls, and
    reasoning by every name."""
    found = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if not kept.get("tool_calls"):
            kept.pop("tool_calls", None)  # templates ask whether there is the key
        for key in REASONING:
            if kept.get(key):
                # Data and templates know it by one of these names: a template is shown it under each.
                kept |= dict.fromkeys(REASONING, kept[key])
                break
        found.append(kept)
    return found


def learned_spans(messages: list[dict], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans without those of messages of weight 0. Raises DataError where it is not known which these
    are."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(message.get("weight") != 0 for message in answers):
        return spans
    if len(spans) != len(answers):
        raise DataError(
            f"the chat template marks {len(spans)} spans of {len(answers)} answers, so the weight 0 of a message "
            "cannot be kept. Name a template with one {% generation %} block for each answer as "
            "tokenizer.chat_template"
        )
    return [span for span, message in zip(spans, answers, strict=True) if message.get("weight") != 0]
