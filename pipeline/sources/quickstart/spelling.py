"""Spelling."""


def spelling_conversations(texts):
    return {"train": [], "validation": []}
