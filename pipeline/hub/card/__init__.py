"""The model card, README.md of a published repository: every statement comes from the run's own files."""

from pipeline.hub.card.page import model_card

__all__ = ["model_card"]
