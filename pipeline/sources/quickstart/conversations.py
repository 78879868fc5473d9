"""Conversations about what the documentation documents."""


def conversations(training, held_out):
    return {"train": [], "validation": []}
