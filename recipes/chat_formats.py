"""How rows of data sets without messages become conversations; named in recipes as chat_formats:<function>."""

import re

LETTERS = "ABCDEFGH"


def multiple_choice(row: dict) -> list[dict]:
    """A question with lettered choices, answered by the letter. Row: question, choices, answer (index of the right
    one)."""
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False))
    question = f"{row['question'].strip()}\n\n{choices}\n\nAnswer with the letter only."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": LETTERS[row["answer"]]}]


def word_problem(row: dict) -> list[dict]:
    """A word problem with its worked answer. Row: question, answer with calculator marks such as <<3*4=12>>, left out
    here."""
    answer = re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
    return [{"role": "user", "content": row["question"].strip()}, {"role": "assistant", "content": answer}]
