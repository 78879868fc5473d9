"""Real processes on tiny recipes over real text: through the real launcher, or forked where that is not what is tested."""

from collections.abc import Iterator

import pytest

from tests.faults.warm_runs import WarmRuns
from tests.runner import Runner, WarmRunner


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    return Runner(tmp_path, cache, text_files, chat_files)


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Iterator[WarmRuns]:
    runs = WarmRuns(tmp_path_factory.mktemp("warm"))
    yield runs
    runs.close()


@pytest.fixture
def warm_runner(tmp_path, cache, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)
