"""The hosts of one job: they meet before every start of it, say how theirs ended, and notice one that is lost.

launch.py of node 0 keeps a store (torch's TCPStore) at MASTER_ADDR:MASTER_PORT for as long as it lives. Every host writes what it
does there once a second, as one JSON object under its number, and reads all others'. torch's elastic rendezvous would start any
failed run again, and names neither the host that is missing nor the one that is lost.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from pipeline.process.errors import HangError, Interrupted, Preempted

BEAT_S = 1.0
LOST_S = 30.0  # without a beat
WAS_LOST = " was lost: "  # behind a host's name, before how it is known
LINE_S = 10.0
GRACE_S = 5.0  # that ranks have to end by themselves once another host has failed
ASKED = (0, Preempted.status, Interrupted.status)  # all ranks end so together
UNCLEAR = (1, HangError.status)  # also what ranks say whose connection to a failed one broke
ABORTED = "ended, since another host had failed"  # of ranks that had to be killed: tells nothing of the reason


@dataclass(frozen=True)
class End:
    """Status and message with which a host's start, or the job's, ended.

    killed: a rank or the whole host was lost, or the host left before its ranks had started, which is why the others failed.
    """

    status: int
    message: str = ""
    killed: bool = False

    def is_failure(self) -> bool:
        """Return whether the other hosts' ranks wait in vain."""
        return self.killed or self.status not in ASKED


class Hosts:
    """One host's view of all. What each publishes by key, in the order in which a round (a start of the job) sets it:

    round: the number of the round that this host waits for or makes.
    port, met: of node 0 alone, once all wait for this round: where the ranks meet, and the lives (processes) that are part of it.
    end: how the round ended on this host; None while its ranks run. A host that leaves before they start sets it, too.
    again: of node 0 alone, together with the next round: why there is one; "" when there is none, and every host leaves.
    """

    def __init__(
        self, *, nodes: int, node: int, address: str, port: int, limit_s: float, report: Callable[[str], None]
    ):
        self.nodes, self.node, self.address, self.port = nodes, node, address, port
        self.limit_s, self.report = limit_s, report
        self.own: dict[str, Any] = {"host": socket.gethostname(), "life": secrets.token_hex(4), "round": 0}
        self.seen: dict[int, dict[str, Any]] = {}
        self.changed: dict[int, float] = {}  # when another host's beat was last a new one
        self.lives: dict[int, str] = {}  # of the hosts that met
        self.store: Any = None
        self.broken = False
        self.answered = self.looked = self.awake = time.monotonic()
        self.wake = threading.Event()

    def name(self, node: int) -> str:
        host = (self.own if node == self.node else self.seen.get(node, {})).get("host")
        return f"host {host} (node {node})" if host else f"node {node}"

    def meet(self, signals: list[int]) -> int | None:
        """Return the port on node 0 at which the ranks of this start meet, once all hosts have come; None after a signal.

        Raises HangError when one has not come within limit_s.
        """
        began = time.monotonic()
        line, reason = began + LINE_S, ""
        while not signals:
            if self._is_cut():
                self.store, self.seen = None, {}
                reason = self._connect()
            here = {n: seen for n, seen in self._hosts() if seen.get("round") == self.own["round"] and not self.lost(n)}
            if self.node == 0:  # which alone decides; the others follow, and find one that left after that failed
                here = {n: seen for n, seen in here.items() if not seen.get("end")}
            waited = time.monotonic() - began
            if self.store is not None and (port := self._port(here)):
                self.lives = {n: seen["life"] for n, seen in here.items()}
                return port
            missing = [self.name(n) for n in range(self.nodes) if n not in here] or [self.name(0)]
            what = reason or f"{', '.join(missing)}: {len(here)} of {self.nodes} hosts are here"
            if waited > self.limit_s:
                raise HangError(
                    f"{self.name(self.node)}: waited {waited:.0f} s in vain for {what}. Look at the output of the hosts that are missing, and "
                    "whether they reach MASTER_ADDR and MASTER_PORT; RDZV_TIMEOUT sets another limit, in seconds."
                )
            if time.monotonic() > line and len(here) < self.nodes:
                line = time.monotonic() + LINE_S
                self.report(f"waiting for {what} (for at most {self.limit_s - waited:.0f} s more)")
            time.sleep(0.1)
        return None

    def _connect(self) -> str:
        """Return why the store cannot be reached yet, or nothing."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it prints every attempt that nobody answers
        from torch.distributed import TCPStore

        first = self.node == 0
        address, timeout = "127.0.0.1" if first else self.address, timedelta(seconds=LOST_S)
        try:
            if not first:  # fails at once, where the store would wait
                socket.create_connection((address, self.port), timeout=2).close()
            store = TCPStore(address, self.port, None, first, timeout, wait_for_workers=False)
            if first:
                for node in range(self.nodes):
                    store.set(str(node), "{}")
        except (OSError, RuntimeError):
            return (
                f"port {self.port}, which another process here holds" if first else f"node 0 at {address}:{self.port}"
            )
        self.store, self.broken, self.answered = store, False, time.monotonic()
        threading.Thread(target=self._beat, args=[store], name="hosts", daemon=True).start()
        return ""

    def _beat(self, store: Any) -> None:
        number, keys = 0, [str(node) for node in range(self.nodes)]
        while store is self.store:
            number += 1
            try:
                store.set(str(self.node), json.dumps(self.own | {"beat": number}))
                seen = {node: json.loads(text) for node, text in enumerate(store.multi_get(keys))}
            except RuntimeError:  # the process of node 0 is gone
                self.broken = store is self.store
                return
            now = time.monotonic()
            paused = (
                now - self.answered > 5 * BEAT_S
            )  # by Ctrl-Z or with its machine: the others were not heard meanwhile
            for node, state in seen.items():
                if paused or state.get("beat") != self.seen.get(node, {}).get("beat"):
                    self.changed[node] = now
            self.seen, self.answered = seen, now
            self.wake.wait(BEAT_S)
            self.wake.clear()

    def _hosts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from (self.seen | {self.node: self.own}).items()

    def _port(self, here: dict[int, dict[str, Any]]) -> int | None:
        """Return the port that node 0 has chosen for this round, another one each time: the last one's may be held still."""
        if self.node == 0 and len(here) == self.nodes:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._publish(port=probe.getsockname()[1], met=[seen["life"] for seen in here.values()])
            return self.own["port"]
        if self.node == 0 or not (first := self.seen.get(0)):
            return None
        if self.own["life"] in (first.get("met") or []):
            return first["port"] if first["round"] == self.own["round"] and len(here) == self.nodes else None
        # A host that was started anew waits for the start after the one that it has missed.
        if (joined := first["round"] + bool(first.get("port"))) != self.own["round"]:
            self._publish(round=joined)
        return None

    def _publish(self, **changes: Any) -> None:
        self.own = {**self.own, **changes}
        self.wake.set()

    def _is_cut(self) -> bool:
        """Return whether node 0 does not answer."""
        if (now := time.monotonic()) - self.looked > 5 * BEAT_S:  # this process was stopped meanwhile, as a whole
            self.awake = now
        self.looked = now
        return self.store is None or self.broken or now - max(self.answered, self.awake) > LOST_S

    def lost(self, node: int) -> str:
        """Return why a host of this round is lost, nothing of one that lives or has ended."""
        if node == self.node:
            return ""
        seen = self.seen.get(node, {})
        if self.lives and seen.get("life") != self.lives.get(node):
            return f"{self.name(node)}{WAS_LOST}it was started anew"
        if seen.get("end"):
            return ""
        if node == 0 and self._is_cut():
            return f"{self.name(0)}{WAS_LOST}it does not answer"
        if time.monotonic() - self.changed.get(node, time.monotonic()) > LOST_S:
            return f"{self.name(node)}{WAS_LOST}no sign of life for {LOST_S:.0f} s"
        return ""

    def failed(self) -> bool:
        """Return whether another host is lost or has failed, so that this one's ranks wait in vain."""
        return any(self.lost(n) or self._end(n).is_failure() for n in range(self.nodes) if n != self.node)

    def _end(self, node: int) -> End:
        state = self.own if node == self.node else self.seen.get(node, {})
        return End(**state["end"]) if state.get("end") else End(0)

    def agree(self, own: End) -> End:
        """Publish how this host's start ended and return how the job's did: by the host that failed, not by those that lost it."""
        self._publish(end=asdict(own))
        if own.status in ASKED:
            return own
        ends, lost = time.monotonic() + LOST_S + 2 * GRACE_S, ""
        while own.status in UNCLEAR and not own.killed and time.monotonic() < ends:
            others = [n for n in range(self.nodes) if n != self.node]
            lost = next(filter(None, map(self.lost, others)), "")
            if lost or all(self.seen.get(n, {}).get("end") for n in others):
                break
            time.sleep(0.1)
        found = [(n, self._end(n)) for n in range(self.nodes) if self._end(n).is_failure()]
        clear = [pair for pair in found if pair[1].status not in UNCLEAR] or [pair for pair in found if pair[1].killed]
        if lost and not clear:
            return End(
                HangError.status,
                f"{lost}, which ended the run. The last whole checkpoint is good. Run the same command again to go on from it.",
                killed=True,
            )
        node, end = (clear or sorted(found, key=lambda pair: (pair[1].message == ABORTED, pair[1].status)))[0]
        if node == self.node or (not clear and own.status == end.status and own.message != ABORTED):
            return own
        return End(end.status, f"{self.name(node)}: {end.message}", killed=end.killed or end.status not in UNCLEAR)

    def start_again(self, decide: Callable[[], str | None], signals: list[int]) -> str | None:
        """Return why there is another start, None for none. Node 0 decides for all; a host that has lost it decides for itself."""
        if self.node == 0:
            reason = decide()
            gone = [self.name(n) for n in self.lives if n and self.seen[n].get("end") and not self._end(n).is_failure()]
            if reason and gone:
                self.report(
                    f"{', '.join(gone)}: has ended, so nothing is started again. Run the same command again on all."
                )
                reason = None
        else:
            ends = time.monotonic() + self.limit_s  # it may wait for a checkpoint that is still being written
            while not (self._has_decided() or self._is_cut() or signals) and time.monotonic() < ends:
                time.sleep(0.1)
            reason = self.seen[0]["again"] if self._has_decided() else decide()
        following: dict[str, Any] = {}
        if reason:
            self.lives = {}
            following = {"round": self.own["round"] + 1, "end": None, "port": None, "met": None}
        # At once: the others read `again` as soon as the round has changed.
        self._publish(again=reason or "", **following)
        return reason or None

    def _has_decided(self) -> bool:
        first = self.seen.get(0, {})
        return first.get("round", 0) > self.own["round"] or first.get("again") == ""

    def leave(self, signals: list[int]) -> None:
        """Wait, on node 0, until every host that met has ended too and has read how the others did; GRACE_S at most after a signal."""
        began = time.monotonic()
        waiting = [n for n in self.lives if n != self.node]  # none before they have met
        while self.node == 0 and time.monotonic() - began < (GRACE_S if signals else self.limit_s):
            waiting = [n for n in waiting if not self.seen.get(n, {}).get("end") and not self.lost(n)]
            if not waiting:
                break
            time.sleep(0.1)
        self.wake.set()
        time.sleep(2 * BEAT_S)  # what this host has published last is read
