"""Hosts of one job: they meet, end and start again together, and name one that is missing or lost. Two of them in one process."""

import threading
import time

import pytest

from pipeline.launch import hosts
from pipeline.launch.hosts import End, Hosts
from pipeline.process.errors import HangError
from tests.warm_commands import free_port


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(hosts, "BEAT_S", 0.05)
    monkeypatch.setattr(hosts, "LINE_S", 0.5)
    monkeypatch.setattr(hosts, "LOST_S", 3.0)


@pytest.fixture
def job():
    """Makes hosts of one job, which are let go at the end of the test."""
    port, made = free_port(), []

    def make(node: int, *, limit_s: float = 60.0) -> Hosts:
        lines: list[str] = []
        host = Hosts(nodes=2, node=node, address="127.0.0.1", port=port, limit_s=limit_s, report=lines.append)
        host.lines = lines
        host.own["host"] = f"host{node}"
        made.append(host)
        return host

    yield make
    for host in made:
        silence(host)


def silence(host: Hosts) -> None:
    """As if its process had been killed."""
    host.store = None


def together(*calls):
    """Return what the calls give, each made in a thread of its own as by another host."""
    answers = [None] * len(calls)

    def call(number):
        answers[number] = calls[number]()

    threads = [threading.Thread(target=call, args=[number], daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return answers


def test_hosts_meet_on_one_port_and_twenty_restarts_of_both_meet_again(job):
    first, second = job(0), job(1)
    ports = [together(lambda: first.meet([]), lambda: second.meet([]))]
    for restart in range(20):
        # One hears of the failure later than the other, in turns.
        late = [0.0, 0.1] if restart % 2 else [0.1, 0.0]

        def again(host, late_s):
            time.sleep(late_s)
            assert host.agree(End(70, "a rank was lost", killed=True)).status == 70
            assert host.start_again(lambda: "again") == "again"
            return host.meet([])

        ports.append(together(lambda: again(first, late[0]), lambda: again(second, late[1])))  # noqa: B023
    assert all(one == other and one for one, other in ports)
    assert not first.failed()
    assert not second.failed()


def test_a_host_that_never_comes_is_named_while_it_is_waited_for_and_at_the_end(job):
    first = job(0, limit_s=1.5)
    with pytest.raises(HangError, match=r"waited 1 s in vain for node 1: 1 of 2 hosts are here|waited 2 s"):
        first.meet([])
    assert first.lines[0].startswith("waiting for node 1: 1 of 2 hosts are here (for at most")
    alone = job(1, limit_s=1.0)
    silence(first)
    alone.port = free_port()
    with pytest.raises(HangError, match=r"in vain for node 0 at 127.0.0.1:"):
        alone.meet([])


def test_a_signal_ends_the_waiting(job):
    assert job(0).meet([15]) is None


def test_the_status_and_sentence_of_the_host_that_failed_are_those_of_the_job(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    wrong = second.agree(End(64, "recipe.yaml:3: is wrong."))
    assert wrong == End(64, "recipe.yaml:3: is wrong.")
    wait_for(first.failed)
    assert first.agree(End(1, "RuntimeError: Connection reset by peer")) == End(
        64, "host host1 (node 1): recipe.yaml:3: is wrong.", killed=True
    )
    assert [host.start_again(lambda: None) for host in (first, second)] == [None, None]


def test_a_rank_that_was_killed_on_one_host_is_why_the_other_lost_its_connection(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    killed = End(70, "rank 1 was lost: killed by SIGKILL", killed=True)
    ends = together(lambda: first.agree(End(1, "Connection reset by peer")), lambda: second.agree(killed))
    assert [end.status for end in ends] == [70, 70]
    assert ends[0].message == "host host1 (node 1): rank 1 was lost: killed by SIGKILL"


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_falls_silent_is_named_and_the_run_ends_with_status_70(job, node):
    pair = [job(0), job(1)]
    together(*(lambda host=host: host.meet([]) for host in pair))
    silence(pair[node])
    other = pair[1 - node]
    wait_for(other.failed)
    end = other.agree(End(1, "RuntimeError: Connection reset by peer"))
    assert end.status == 70
    assert end.message.startswith(f"host host{node} (node {node}) was lost: ")


def test_a_host_that_is_started_anew_ends_the_start_it_was_lost_from_and_joins_the_next(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    silence(second)
    anew = job(1)

    def go_on():
        wait_for(first.failed)
        end = first.agree(End(1, "Connection reset by peer"))
        assert (end.status, end.message[:40]) == (70, "host host1 (node 1) was lost: it was sta")
        assert first.start_again(lambda: "again")
        return first.meet([])

    one, other = together(go_on, lambda: anew.meet([]))
    assert one == other


def test_ranks_that_stop_as_they_were_asked_to_are_no_failure(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    assert second.agree(End(75, "stopped")).status == 75
    time.sleep(0.5)
    assert not first.failed()
    assert first.agree(End(75, "stopped")) == End(75, "stopped")
    first.leave()


def wait_for(condition) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
