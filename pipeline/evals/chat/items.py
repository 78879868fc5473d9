"""A question put to the assistant, whatever task it belongs to."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ChatItem:
    """One question. messages: what the assistant answers to. answer: the right letter, or what a checker compares with.

    letters: what may be answered, for multiple choice. subject: what a score can be split by. row: further texts that
    a checker needs; of multiple choice the bare question and the right choice.
    """

    messages: list[dict]
    answer: str
    letters: tuple[str, ...] = ()
    subject: str | None = None
    row: dict[str, str] = field(default_factory=dict)
