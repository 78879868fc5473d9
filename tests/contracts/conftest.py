"""Real processes through the real launcher, on tiny recipes over real text."""

import pytest

from tests.runner import Runner


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    return Runner(tmp_path, cache, text_files, chat_files)
