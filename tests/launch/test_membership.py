"""What the nodes of an elastic run agree on, transition by transition, and the file in which they do."""

import os
import signal
import time
from pathlib import Path

import pytest

from framework.launch.elastic.links import Links
from framework.launch.elastic.meeting import Meeting
from framework.launch.elastic.membership import MEMBERSHIP, Member, Membership, together
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


def meeting_in(folder: Path) -> Meeting:
    return Meeting(folder, node=Member("host", os.getpid()), links=Links([]), sizes=[1, 2], num_workers=1, max_restarts=3)


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
    assert "the nodes lost their connection" in str(membership.error)


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
        return meeting_in(tmp_path / "meeting")

    def die(membership: Membership) -> None:
        membership.end(1)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_a_change() -> None:
        meeting().change(die)

    here = meeting()
    assert here.enter()
    process = harness._FORK.Process(target=die_in_a_change)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    began = time.monotonic()
    assert here.change(lambda membership: (membership.code, list(membership.nodes))) == (None, [1])
    assert time.monotonic() - began < 1.0
    here.leave()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_is_frozen_in_a_change_is_passed_by_and_changes_nothing_later(tmp_path: Path) -> None:
    def freeze(membership: Membership) -> None:
        membership.error = f"{membership.error} frozen" if membership.error else "frozen"
        if membership.error == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)

    here = meeting_in(tmp_path / "meeting")
    assert here.enter()
    process = harness._FORK.Process(target=lambda: meeting_in(tmp_path / "meeting").change(freeze))
    process.start()
    os.waitpid(process.pid, os.WUNTRACED)
    began = time.monotonic()

    def change(membership: Membership) -> None:
        membership.error = "changed"

    here.change(change)
    assert time.monotonic() - began < 10.0
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0 and here.look().error == "changed frozen", "it has made its change to what the others left"
    here.leave()


def test_changes_of_many_processes_at_a_time_are_all_made(tmp_path: Path) -> None:
    def count(membership: Membership) -> None:
        membership.round += 1

    def often() -> None:
        meeting = meeting_in(tmp_path / "meeting")
        for _ in range(25):
            meeting.change(count)

    here = meeting_in(tmp_path / "meeting")
    assert here.enter()
    processes = [harness._FORK.Process(target=often) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert here.look().round == 100
    here.leave()


@pytest.mark.parametrize(
    ("numbers", "apart", "expected"),
    [
        ([1, 2, 3], [], [1, 2, 3]),
        ([1, 2], [(1, 2)], [1]),  # as many: with the oldest node
        ([2, 1, 3], [(1, 2), (1, 3)], [2, 3]),  # the oldest alone is fewer
        ([1, 2, 3], [(2, 3)], [1, 2]),  # a link between two of three
        ([1, 2, 3, 4], [(1, 2), (1, 3), (4, 2), (4, 3)], [1, 4]),
        ([1, 2, 3, 4, 5], [(1, 4), (1, 5), (2, 4), (2, 5), (3, 4), (3, 5)], [1, 2, 3]),
        ([1, 2, 3], [(1, 9), (9, 2)], [1, 2, 3]),  # of a node that is not there
        ([*range(1, 65)], [(a, b) for a in range(1, 33) for b in range(33, 65)], [*range(1, 33)]),
        ([*range(1, 65)], [(a, b) for a in range(1, 30) for b in range(30, 65)], [*range(30, 65)]),
    ],
)
def test_the_largest_number_of_nodes_that_all_reach_each_other(
    numbers: list[int], apart: list[tuple[int, int]], expected: list[int]
) -> None:
    assert together(numbers, apart=apart) == expected


def test_nodes_that_do_not_reach_each_other_are_in_no_round_together() -> None:
    membership = of(3, sizes=[1, 2, 3])
    membership.doubtful = [(1, 3)]
    membership.start_round()
    assert (membership.members, membership.waiting, membership.may_grow) == ([1, 2], [3], False)
    membership.doubtful = []
    assert membership.may_grow


def test_a_round_whose_nodes_lose_each_other_is_no_failure_and_the_largest_part_goes_on() -> None:
    membership = of(3, sizes=[1, 2, 3], max_restarts=0)
    for _ in range(10):
        membership.start_round()
        assert membership.members == [1, 2, 3] and membership.lost_links == []
        membership.cut = membership.doubtful = [(1, 2), (1, 3)]
        assert membership.lost_links == membership.cut
        membership.broken = membership.parted = membership.round
        all_leave(membership)
        membership.start_round()
        assert (membership.members, membership.code) == ([2, 3], None)
        membership.cut = membership.doubtful = []
        assert membership.may_grow
        all_leave(membership)
