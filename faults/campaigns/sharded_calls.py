"""As `calls`, of a model that two ranks share (FSDP2): both write a part of the save, so that the order of their calls is not the same in each trial."""

from dataclasses import replace

from faults.campaigns import calls
from faults.victim import Lab

WHAT = "A failure at every file call of one sharded save"
SETTING = replace(calls.SETTING, ranks=2, accumulation=1, sharded=True)
figure = calls.figure


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return calls.trials(lab, times, seed, SETTING)


def trial(lab: Lab, key: str) -> dict:
    return calls.failed_call(lab, key, SETTING, name="sharded_calls")
