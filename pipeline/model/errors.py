"""The error of models that cannot be built."""


class ModelOptionsError(ValueError):
    """The recipe's model cannot be built, for the reason in the message."""
