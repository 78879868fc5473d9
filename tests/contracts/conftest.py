"""Real processes on tiny recipes over real text; test_launched_recipe.py goes through the real launcher."""

import pytest

from tests.faults.warm_runs import WarmRuns
from tests.runner import WarmRunner


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm: WarmRuns) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)
