"""Which rank is guilty, from what the ranks have left on their board."""

import faulthandler
import threading
from pathlib import Path

from framework.distributed.hang.board import Beat, Board, RankSlot, RankState
from framework.distributed.hang.diagnose import RankReport, frames, judge, own_frame

USUAL = {"training": (4, 1), "logging": (0, 1)}  # collectives of a step's parts, on both groups


def seen(rank: int, parts: list[str], *, begun: tuple[int, int] = (0, 0), odd: dict[int, int] | None = None) -> RankReport:
    """A rank that has gone through these parts of the program, and begun so many collectives in the last.

    `odd`: how many it has started on the default group where that was unusual, by the part's number.
    """
    beats, totals = [], (0, 0)
    for number, part in enumerate(parts):
        beats.append(Beat(number, 1 + number // 2, part, totals))
        made = ((odd or {}).get(number, USUAL[part][0]), USUAL[part][1]) if number < len(parts) - 1 else begun
        totals = (totals[0] + made[0], totals[1] + made[1])
    return RankReport(RankSlot(rank, rank, 100 + rank, RankState.TIMED_OUT, 0.0, totals, tuple(beats)), "", "")


def verdict(*ranks: RankReport) -> str:
    return judge(ranks, timeout_s=3.0, spans_nodes=False)


STEPS = ["training", "logging"] * 4  # the beats 0 to 7


def test_who_has_begun_less_than_before_in_the_same_part_has_left_one_out() -> None:
    said = verdict(seen(0, [*STEPS, "training"], begun=(4, 0)), seen(1, [*STEPS, "training", "logging"], odd={8: 3}))
    assert said.startswith("rank 1 hangs: in step 5 (training) it has started 3 collectives on the default process group, "
                           "but 4 are expected; all have waited"), said  # fmt: skip


def test_who_has_begun_more_than_before_is_named_and_not_the_one_that_went_on() -> None:
    said = verdict(seen(0, [*STEPS, "training"], begun=(5, 0)), seen(1, [*STEPS, "training", "logging"], begun=(0, 1)))
    assert said.startswith("rank 0 hangs: in step 5 (training) it has started 5 collectives"), said


def test_what_was_left_out_some_parts_ago_is_found() -> None:
    said = verdict(seen(0, [*STEPS, "training"], begun=(4, 0)), seen(1, [*STEPS, "training", "logging"], odd={4: 3}))
    assert said.startswith("rank 1 hangs: in step 3 (training) it has started 3 collectives"), said


def test_ranks_of_a_pipeline_are_not_measured_by_each_other() -> None:
    last_stage = seen(
        1, [*STEPS, "training"], begun=(2, 0), odd=dict.fromkeys(range(0, 8, 2), 2) | dict.fromkeys(range(1, 8, 2), 1)
    )
    said = verdict(seen(0, [*STEPS, "training"], begun=(1, 0)), last_stage)
    assert "probably hangs" in said and "it is not known which rank is wrong" in said


def test_where_no_rank_of_the_node_hangs_another_nodes_are_said_to_be_missing() -> None:
    said = judge([seen(2, STEPS), seen(3, STEPS)], timeout_s=3.0, spans_nodes=True)
    assert said.startswith(
        "no rank of this node hangs, and all have waited launch.timeout_s=3 seconds for ranks of another node: rank 2"
    )


def test_a_board_tells_the_latest_beats_of_the_others(tmp_path: Path) -> None:
    mine, others = (Board(tmp_path / "board", rank=4 + n, local_rank=n, num_local=3) for n in range(2))
    for step in range(200):
        others.beat("training", step=step, collectives=(2 * step, step))
    place = mine.slot(1)
    assert (place.rank, place.state, place.collectives) == (5, RankState.RUNNING, (398, 199))
    assert [beat.step for beat in place.beats] == list(range(136, 200))
    assert (mine.slot(2).rank, mine.slot(2).state) == (6, RankState.ABSENT)
    assert mine.try_lead() and not others.try_lead()
    mine.post("rank 5")
    assert others.verdict == "rank 5"
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
