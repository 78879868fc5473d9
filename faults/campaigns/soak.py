"""Random faults for as long as asked: runs that are hit again and again until each has come to its end.

--times is in minutes. Every run is one trial: killed, terminated, its disk full or failing, its numbers spoiled, in any
order. Every fourth is started by the cold command and publishes each checkpoint to a Hub that is at times away.
"""

import random
import signal
import time
from contextlib import nullcontext

from faults import evidence, injector
from faults.services import differences, environment, push
from faults.victim import MAX_STEPS, WAIT_S, Lab, Setting
from tests.conftest import ROOT
from tests.hub.hub_stand_in import Fault, hub_stand_in

WHAT = "Soak: random faults, one after the other"
# Each with the statuses that it may end a start with; None: ended from outside. 0 is the end of the run, come before the fault.
FAULTS = {
    "kill everything": None,
    "kill one rank": None,
    "SIGTERM": {75},
    "ENOSPC": {73, 74},
    "EIO": {73, 74},
    "NaN": {76},
    "Hub 503": {75},
}
SPOILED = ("loss", "gradient", "parameter")
HITS = 6  # at most per run; then it may end
REPOSITORY = "somebody/soak"


def trials(lab: Lab, times: int, seed: int):
    """Numbers, until the minutes are over."""
    ends = time.monotonic() + 60 * times
    number = seed
    while time.monotonic() < ends:
        yield str(number)
        number += 1


def trial(lab: Lab, key: str) -> dict:
    with hub_stand_in() if int(key) % 4 == 2 else nullcontext() as hub:
        return _Trial(lab, key, hub).made()


class _Trial:
    """hub: the one that the run publishes to; then every start is the cold command, since forks keep the first address."""

    def __init__(self, lab: Lab, key: str, hub):
        self.lab, self.hub = lab, hub
        self.chance = random.Random(f"soak {key}")
        ranks = 1 + int(key) % 2
        self.setting = Setting(ranks=ranks, accumulation=2 // ranks, max_steps=2 * MAX_STEPS)
        self.reference = lab.reference(self.setting)
        self.folder = lab.trial(f"soak-{key}")
        self.run, self.log = self.folder / "run", self.folder / "run.log"
        self.cache = lab.partly_prepared(self.setting, self.folder)

    def made(self) -> dict:
        hits, wrong = [], []
        faults = [name for name in FAULTS if self.hub or name != "Hub 503"]
        while len(hits) < HITS:
            fault = self.chance.choice(faults)
            status, output = self._hit(fault)
            if status == 0:
                break
            hits.append(fault)
            if FAULTS[fault] is not None and status not in FAULTS[fault]:
                wrong.append(f"{fault}: status {status}: {output[-1500:]}")
        status, output = self._start_and_wait({})
        if status != 0:
            wrong.append(f"the last start ended with {status}: {output[-1500:]}")
        elif different := evidence.differences(evidence.final_state(self.run), self.reference):
            wrong.append(f"not bitwise the uncut run's: {different[:6]}")
        if self.hub and (left := self._unpublished()):
            wrong.append(f"not on the Hub as on disk: {left}")
        lost = [lost for _, lost in evidence.attempts(self.run)[1:]]
        return {"ok": not wrong, "wrong": wrong, "hits": hits, "lost": lost, "published": self.hub is not None}

    def _start(self, environ: dict[str, str]):
        overrides = ["run.callbacks=[faults.numeric_faults:Fault]", "run.trust_code=true"]
        environ = {"PYTHONPATH": str(ROOT), **environ}
        if self.hub:
            overrides += [f"hub.id={REPOSITORY}", "hub.strategy=checkpoint", "hub.wait_at_end_s=5"]
            environ |= environment(self.hub.url, self.folder / "hf")
        how = {"cache": self.cache, "environment": environ, "log": self.log, "cold": self.hub is not None}
        return self.lab.start(self.setting, self.run, *overrides, **how)

    def _start_and_wait(self, environ: dict[str, str]) -> tuple[int | None, str]:
        before = self.log.stat().st_size if self.log.exists() else 0
        return self._ended(self._start(environ), before)

    def _ended(self, process, before: int) -> tuple[int | None, str]:
        status = process.wait(WAIT_S)
        if status is None:
            process.kill_everything()
        return status, self.log.read_bytes()[before:].decode(errors="replace")

    def _hit(self, fault: str) -> tuple[int | None, str]:
        """One start that meets the fault: its status and what it printed; 0 when it came to its end before."""
        chance, run = self.chance, self.run
        until = evidence.logged_step(run) + chance.randint(1, self.setting.max_steps // 4)
        if fault == "NaN":
            where, value, rank = (
                chance.choice(SPOILED),
                chance.choice(("nan", "inf")),
                chance.randrange(self.setting.ranks),
            )
            return self._start_and_wait({"FAULT": f"{where} {value} {until} {rank}"})
        if fault in ("ENOSPC", "EIO"):
            at = chance.randint(1, 400)
            rules = f"at={at}:{fault}" if fault == "EIO" else f"from={at}:{fault}"
            return self._start_and_wait(
                injector.faults(run / "checkpoints", rules=rules, counter=self.folder / "counter")
            )
        before = self.log.stat().st_size if self.log.exists() else 0
        begun = len(evidence.attempts(run))
        process = self._start({})
        if fault == "Hub 503":
            self._wait_until_trained(process, begun, 1)
            self.hub.fault = Fault(status=503)
        self._wait_until_trained(process, begun, until)
        time.sleep(chance.random() / 2)
        if fault in ("SIGTERM", "Hub 503"):
            process.send(signal.SIGTERM, process.ranks())
        elif fault == "kill one rank":
            process.kill(process.ranks()[-1:])
        else:
            process.kill_everything()
        ended = self._ended(process, before)
        if self.hub:
            self.hub.fault = None
        return ended

    def _wait_until_trained(self, process, begun: int, step: int) -> None:
        while process.poll() is None and not evidence.has_trained(self.run, begun, step):
            time.sleep(0.005)

    def _unpublished(self) -> list[str]:
        if differences(self.run, self.hub, REPOSITORY):
            pushed = push(self.run, self.hub.url, self.folder / "hf")
            if pushed.returncode:
                return [f"push: {pushed.returncode}: {pushed.stderr[-500:]}"]
        return differences(self.run, self.hub, REPOSITORY)


def minutes(rows: list[dict]) -> int:
    """What --times has to be for as many trials."""
    return round(sum(row["seconds"] for row in rows) / 60)


def figure(rows: list[dict]) -> str:
    hits = [fault for row in rows for fault in row["hits"]]
    by_kind = ", ".join(f"{hits.count(fault)} {fault}" for fault in FAULTS)
    cold = sum(row.get("published", False) for row in rows)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} runs ended with the clean run's bits, after {len(hits)} faults "
        f"({by_kind}) in {minutes(rows)} minutes; {cold} of them by the cold command, their models on the Hub as on disk"
    )
