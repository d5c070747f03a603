"""Which rank is guilty, from what the ranks have left on their board."""

import faulthandler
import threading
from pathlib import Path

from framework.distributed.hang.board import OwnBoard, RankSlot, RankState
from framework.distributed.hang.diagnose import RankReport, frames, judge, own_frame


def seen(rank: int, num_beats: int, *, beat_at: float = 0.0) -> RankReport:
    """A rank that waits in the part of the program that began with this heartbeat."""
    step, phase = 1 + num_beats // 2, ("logging", "training")[num_beats % 2]
    return RankReport(RankSlot(rank, rank, RankState.TIMED_OUT, 100 + rank, 9.0, beat_at, num_beats, step, phase), "", "")


def verdict(*ranks: RankReport) -> str:
    return judge(ranks, timeout_s=3.0, spans_nodes=False)


def test_of_waiting_ranks_the_one_that_is_ahead_has_left_out_a_collective() -> None:
    for ahead in range(3):
        said = verdict(*(seen(rank, 10 if rank == ahead else 9) for rank in range(3)))
        assert said.startswith(f"rank {ahead} hangs: it is ahead of the others, in step 6 (logging), so it has left out a "
                               "collective before; all have waited"), said  # fmt: skip


def test_of_ranks_that_wait_in_the_same_part_of_a_step_none_is_certain() -> None:
    said = verdict(seen(0, 9, beat_at=5.0), seen(1, 9, beat_at=4.0))
    assert said.startswith("rank 1 probably hangs, because its heartbeat is the oldest, but it is not known"), said


def test_where_no_rank_of_the_node_hangs_another_nodes_are_said_to_be_missing() -> None:
    said = judge([seen(2, 8), seen(3, 8)], timeout_s=3.0, spans_nodes=True)
    assert said.startswith(
        "no rank of this node hangs, and all have waited launch.timeout_s=3 seconds for ranks of another node: rank 2"
    )


def test_a_board_tells_the_latest_beat_of_the_others(tmp_path: Path) -> None:
    mine, others = (OwnBoard(tmp_path / "board", rank=4 + n, local_rank=n, num_local=3) for n in range(2))
    for step in range(200):
        others.beat("training", step=step)
    place = mine.slot(1)
    assert (place.rank, place.state, place.num_beats, place.place) == (5, RankState.RUNNING, 200, "in step 199 (training)")
    assert (mine.slot(2).rank, mine.slot(2).state) == (6, RankState.ABSENT)
    with mine.alone():
        mine.post("rank 5")
    assert others.verdict == "rank 5" and mine.has_judged and not others.has_judged
    mine.close()
    others.close()


def test_of_many_threads_the_main_one_is_read(tmp_path: Path) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with open(tmp_path / "stack", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    done.set()
    thread.join()
    text = (tmp_path / "stack").read_text()
    assert text.count("hread 0x") >= 2
    assert frames(text)[0].function == test_of_many_threads_the_main_one_is_read.__name__
    own = own_frame(text)
    assert own is not None and own.file == __file__
