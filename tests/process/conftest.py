"""Real processes on tiny recipes, as in contracts."""

import pytest

from tests.runner import WarmRunner
from tests.warm_commands import WarmCommands


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm: WarmCommands) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)
