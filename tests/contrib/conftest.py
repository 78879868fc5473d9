"""Recipes over small real sources, as the data room's tests have them."""

import pytest

from tests.data.conftest import Bench, tokenizer  # noqa: F401 - a fixture


@pytest.fixture
def bench(tmp_path, text_files, chat_files, tokenizer) -> Bench:  # noqa: F811 - the fixture above
    return Bench(tmp_path, text_files, chat_files, tokenizer)
