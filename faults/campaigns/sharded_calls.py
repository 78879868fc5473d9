"""As `calls`, of a model that two ranks share (FSDP2): both write a part of the save, so that the order of their calls is not the same in each trial."""

from faults.campaigns import calls
from faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "A failure at every file call of one sharded save"
SETTING = Setting(max_steps=2 * SAVE_STEPS, keep=1, ranks=2, accumulation=1, sharded=True)
figure = calls.figure


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return calls.trials(lab, times, seed, SETTING)


def trial(lab: Lab, key: str) -> dict:
    return calls.failed_call(lab, key, SETTING, name="sharded_calls")
