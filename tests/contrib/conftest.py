"""Recipes over small real sources, as the data room's tests have them."""

from tests.data.conftest import bench, chat_files, tokenizer  # noqa: F401 - fixtures
