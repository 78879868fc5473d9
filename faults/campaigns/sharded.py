"""As `kill`, of a model that two ranks share (FSDP2): each rank's own process writes a part of every checkpoint.

Beside everything, the ranks and one rank, the ranks may be hit together with one of the two processes that write.
"""

from faults.campaigns import kill
from faults.victim import Lab, Setting

WHAT = "`kill -9` at random moments of a sharded run, then the same command"
trials = kill.trials


def trial(lab: Lab, key: str) -> dict:
    return kill.killed_run(lab, key, Setting(ranks=2, accumulation=1, sharded=True), name="sharded")


def figure(rows: list[dict]) -> str:
    hits = [hit for row in rows for hit in row["kills"]]
    return f"{kill.figure(rows)}; {sum(hit['whom'] == 'ranks and a writer' for hit in hits)} of the kills took one of the two writers along"
