"""What the nodes of an elastic run agree on, transition by transition, and the file in which they do."""

import os
import signal
import time
from pathlib import Path

from framework.launch.elastic.membership import MEMBERSHIP, Meeting, Member, Membership
from framework.launch.failures import Failure
from tests import harness

ERROR = Failure(0, "RuntimeError: a mistake", "file.py:1 in step")
OTHER = Failure(1, "RuntimeError: another", "file.py:2 in step")


def of(num_nodes: int, *, sizes: list[int], max_restarts: int = 3) -> Membership:
    """So many nodes that wait."""
    membership = Membership(sizes, 1, max_restarts)
    for pid in range(num_nodes):
        membership.add(Member("host", pid))
    return membership


def all_leave(membership: Membership) -> None:
    for node in membership.nodes.values():
        node.waits = True


def test_a_round_has_the_largest_size_that_fits_and_the_others_wait() -> None:
    membership = of(3, sizes=[2, 4])
    membership.start_round()
    assert (membership.members, membership.waiting, membership.may_grow) == ([1, 2], [3], False)
    membership.add(Member("host", 3))
    assert membership.may_grow
    all_leave(membership)
    membership.start_round()
    assert (membership.round, membership.members, membership.waiting) == (2, [1, 2, 3, 4], [])


def test_no_round_begins_before_all_have_left_the_one_before() -> None:
    membership = of(2, sizes=[1, 2])
    membership.start_round()
    membership.nodes[1].waits = True
    assert not membership.may_start
    del membership.nodes[2]  # dead
    assert membership.may_start


def test_a_lost_node_is_no_failure() -> None:
    membership = of(2, sizes=[1, 2], max_restarts=0)
    for _ in range(10):
        membership.start_round()
        membership.broken = membership.round
        all_leave(membership)
        del membership.nodes[membership.members[0]]
        membership.add(Member("host", 0))
    assert (membership.failures, membership.code) == ([], None)


def test_nodes_that_lose_each_other_with_nobody_dead_do_not_go_on_for_ever() -> None:
    membership = of(2, sizes=[1, 2])
    while membership.code is None:
        membership.start_round()
        membership.broken = membership.round
        all_leave(membership)
    assert (membership.round, membership.code) == (2, 1)
    assert "the nodes have lost each other" in str(membership.error)


def test_errors_are_counted_once_a_round_and_over_all_nodes() -> None:
    membership = of(2, sizes=[2], max_restarts=2)
    assert [membership.note(ERROR, 1), membership.note(OTHER, 1), membership.note(OTHER, 2)] == [1, 1, 2]
    assert membership.code is None
    membership.note(ERROR, 3)
    assert (membership.code, membership.error) == (1, "rank 0: RuntimeError: a mistake")


def test_an_error_that_comes_again_in_the_same_place_ends_the_run() -> None:
    membership = of(2, sizes=[2], max_restarts=9)
    membership.note(ERROR, 1)
    membership.note(ERROR, 2)
    assert membership.code == 1


def test_the_first_end_is_the_end() -> None:
    membership = of(1, sizes=[1])
    membership.end(75)
    membership.end(1, error="too late")
    assert (membership.code, membership.error) == (75, None)


def test_the_record_survives_being_written_down() -> None:
    membership = of(2, sizes=[1, 2])
    membership.start_round()
    membership.note(ERROR, 1)
    assert MEMBERSHIP.validate_json(MEMBERSHIP.dump_json(membership)) == membership


def test_kill_9_in_the_middle_of_a_change_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    def meeting() -> Meeting:
        return Meeting(tmp_path / "meeting", sizes=[1, 2], num_workers=1, max_restarts=3, attempt=[])

    def die_in_a_change() -> None:
        with meeting().change() as membership:
            membership.end(1)
            os.kill(os.getpid(), signal.SIGKILL)

    here = meeting()
    assert here.enter()
    process = harness._FORK.Process(target=die_in_a_change)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    began = time.monotonic()
    with here.change() as membership:
        assert (membership.code, list(membership.nodes)) == (None, [1])
    assert time.monotonic() - began < 1.0
    here.leave()
    assert not list(tmp_path.iterdir())
