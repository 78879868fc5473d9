"""Hosts of one job: they meet, end and start again together, and name one that is missing or lost. Two of them in one process."""

import threading
import time

import pytest

from pipeline.launch import launch
from pipeline.launch.launch import ABORTED, End, Hosts
from pipeline.process.errors import HangError, RecipeError
from pipeline.process.storage import read_json, write_json
from pipeline.run_dir.run_directory import RunDirectory
from tests.warm_commands import free_port


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(launch, "BEAT_S", 0.05)
    monkeypatch.setattr(launch, "LINE_S", 0.5)
    monkeypatch.setattr(launch, "LOST_S", 3.0)


@pytest.fixture
def job():
    """Makes hosts of one job, which are let go at the end of the test."""
    import torch.distributed  # noqa: F401 - takes longer than the limits below

    port, made = free_port(), []

    def make(node: int, *, nodes: int = 2, limit_s: float = 60.0) -> Hosts:
        lines: list[str] = []
        host = Hosts(nodes=nodes, node=node, address="127.0.0.1", port=port, limit_s=limit_s, report=lines.append)
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
            assert host.start_again(lambda: "again", []) == "again"
            return host.meet([])

        ports.append(together(lambda: again(first, late[0]), lambda: again(second, late[1])))  # noqa: B023
    assert all(one == other and one for one, other in ports)
    assert not first.failed()
    assert not second.failed()


def test_a_host_that_never_comes_is_named_while_it_is_waited_for_and_at_the_end(job):
    first = job(0, limit_s=1.5)
    with pytest.raises(HangError, match=r"waited \d+ s in vain for node 1: 1 of 2 hosts are here"):
        first.meet([])
    assert first.lines[0].startswith("waiting for node 1: 1 of 2 hosts are here (for at most")
    alone = job(1, limit_s=1.0)
    silence(first)
    alone.port = free_port()
    with pytest.raises(HangError, match=r"in vain for node 0 at 127.0.0.1:"):
        alone.meet([])


def test_hosts_that_were_started_with_different_numbers_of_hosts_say_so_at_once(job):
    first, second = job(0), job(1, nodes=3)

    def refusal(host):
        with pytest.raises(RecipeError) as refused:
            host.meet([])
        return str(refused.value)

    said = together(lambda: refusal(first), lambda: refusal(second))
    assert said[0].startswith("NNODES is 2 on host host0 (node 0) and 3 on host host1 (node 1)")
    assert said[1].startswith("NNODES is 3 on host host1 (node 1) and 2 on node 0")


def test_a_signal_ends_the_waiting_and_no_host_that_never_came_holds_node_0_at_its_end(job):
    first = job(0)
    assert first.meet([15]) is None
    began = time.monotonic()
    first.leave([15])
    assert time.monotonic() - began < 2


def test_a_signal_ends_the_waiting_for_a_host_that_does_not_end(job, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    first.agree(End(75, "stopped"))
    began = time.monotonic()
    first.leave([15])
    assert second.start_again(lambda: None, [15]) is None
    assert time.monotonic() - began < 2


def test_a_host_that_leaves_before_its_ranks_have_started_ends_the_start_of_the_others(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    assert second.agree(End(75, "a signal came", killed=True)).status == 75
    wait_for(first.failed, seconds=1.0)
    assert first.agree(End(70, ABORTED)) == End(75, "host host1 (node 1): a signal came", killed=True)


def test_a_host_that_has_left_is_not_met(job):
    first, second = job(0, limit_s=1.0), job(1)
    first._connect()
    second._connect()
    second.agree(End(75, "a signal came", killed=True))
    wait_for(lambda: first.seen.get(1, {}).get("end"))
    with pytest.raises(HangError, match=r"in vain for (host host1 \()?node 1\)?: 1 of 2 hosts are here"):
        first.meet([])


def test_node_0_that_has_ended_and_gone_is_not_lost(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    first.agree(End(75, "stopped"))
    wait_for(lambda: second.seen[0].get("end"))
    second.broken = True  # as when its process, which holds the store, is gone
    assert not second.failed()


@pytest.mark.parametrize(
    ("ends", "messages"),
    [
        # Each keeps its own word, so that the traceback in failure.json stays that of the rank that failed.
        (
            [End(1, "Connection reset"), End(1, "ValueError: my callback")],
            ["Connection reset", "ValueError: my callback"],
        ),
        ([End(70, ABORTED), End(70, "rank 1 hangs")], ["host host1 (node 1): rank 1 hangs", "rank 1 hangs"]),
        ([End(70, ABORTED), End(1, "ValueError")], ["host host1 (node 1): ValueError", "ValueError"]),
    ],
)
def test_an_unclear_end_is_replaced_only_by_one_that_tells_more(job, ends, messages):
    pair = [job(0), job(1)]
    together(*(lambda host=host: host.meet([]) for host in pair))
    agreed = together(*(lambda host=host, end=end: host.agree(end) for host, end in zip(pair, ends, strict=True)))
    assert [end.message for end in agreed] == messages
    assert not any(end.killed for end in agreed)


def test_failure_json_keeps_the_rank_s_own_facts_and_has_the_class_of_the_status(tmp_path):
    run, status_file = RunDirectory(tmp_path), tmp_path / "status"
    (tmp_path / "status.run").write_text(str(tmp_path))
    of_rank = {"status": 65, "class": "DataError", "message": "rows.txt: is wrong.", "traceback": ["a", "b"]}
    write_json(run.failure, of_rank)
    launch.record_failure(status_file, End(65, "host host1 (node 1): rows.txt: is wrong.", killed=True), first=False)
    assert read_json(run.failure) == of_rank
    launch.record_failure(status_file, End(74, "host host1 (node 1): no space is left.", killed=True), first=True)
    assert (read_json(run.failure)["class"], read_json(run.failure)["status"]) == ("DiskFullError", 74)
    write_json(run.failure, {"status": 70, "class": "HangError", "message": "the connection to another host broke"})
    launch.record_failure(
        status_file, End(70, "host host0 (node 0) was lost: it does not answer", killed=True), first=False
    )
    assert read_json(run.failure)["message"] == "host host0 (node 0) was lost: it does not answer"


def test_of_hosts_that_lost_each_other_the_first_one_s_word_stands(tmp_path):
    run, status_file = RunDirectory(tmp_path), tmp_path / "status"
    (tmp_path / "status.run").write_text(str(tmp_path))
    ends = {
        True: End(70, "host host1 (node 1) was lost: no sign of life for 30 s", killed=True),
        False: End(70, "host host0 (node 0) was lost: it does not answer", killed=True),
    }
    for order in ((True, False), (False, True)):
        for first in order:
            launch.record_failure(status_file, ends[first], first=first)
        assert read_json(run.failure)["message"] == ends[True].message
        run.failure.unlink()


def test_a_node_rank_beyond_the_number_of_hosts_is_refused():
    environ = {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "here"}
    with pytest.raises(ValueError, match=r"NODE_RANK is 2, and NNODES is 2: the machines are numbered 0 to 1\."):
        launch.hosts_of(environ)
    assert launch.hosts_of({**environ, "NODE_RANK": "1"}).node == 1


def test_the_next_round_is_published_together_with_its_reason(job, monkeypatch):
    first, published = job(0), []
    publish = first._publish
    monkeypatch.setattr(first, "_publish", lambda **changes: (publish(**changes), published.append(first.own)))
    first.start_again(lambda: "again", [])
    assert published[0]["round"] == 1
    assert published[0]["again"] == "again"


def test_nothing_is_started_again_once_a_host_has_ended_well(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    assert second.agree(End(0)) == End(0)
    assert first.agree(End(1, "OSError: in publishing")).status == 1
    assert first.start_again(lambda: "again", []) is None
    assert first.lines == [
        "host host1 (node 1): has ended, so nothing is started again. Run the same command again on all."
    ]


def test_the_status_and_sentence_of_the_host_that_failed_are_those_of_the_job(job):
    first, second = job(0), job(1)
    together(lambda: first.meet([]), lambda: second.meet([]))
    wrong = second.agree(End(64, "recipe.yaml:3: is wrong."))
    assert wrong == End(64, "recipe.yaml:3: is wrong.")
    wait_for(first.failed)
    assert first.agree(End(1, "RuntimeError: Connection reset by peer")) == End(
        64, "host host1 (node 1): recipe.yaml:3: is wrong.", killed=True
    )
    assert [host.start_again(lambda: None, []) for host in (first, second)] == [None, None]


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
        assert first.start_again(lambda: "again", [])
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
    first.leave([])


def wait_for(condition, *, seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
