"""The verdict on a hang: which rank is guilty, from where all of them stand."""

from collections.abc import Sequence
from dataclasses import dataclass

from framework.distributed.hang.board import Beat, Place
from framework.distributed.hang.stacks import own_frame

_GROUPS = ("the default process group", "the control group")


@dataclass(frozen=True)
class Seen:
    """A rank, as it was found."""

    place: Place
    stack: str
    manner: str  # what it does instead of waiting for other ranks; empty if it does that

    def __str__(self) -> str:
        where = f"in {self.place.beats[-1]}" if self.place.beats else "at its start"
        frame = own_frame(self.stack)
        return where if frame is None else f"{where}, at {frame}"


def judge(seen: Sequence[Seen], *, timeout_s: float, spans_nodes: bool) -> str:
    """Return the verdict on the ranks of a node, in one sentence.

    Guilty is who does something else than to wait for the others. Where all wait, but not for the same, it is who has
    not begun as many collectives in a part of the program as the others, or as in the same part before.
    """
    guilty = [one for one in seen if one.manner]
    waiting = [one for one in seen if not one.manner]
    waited = f"waited launch.timeout_s={timeout_s:g} seconds"
    if guilty:
        said = "; ".join(f"rank {one.place.rank} hangs: it {one.manner}, {one}" for one in guilty)
        return "; ".join([said, *(f"rank {one.place.rank} has {waited} {one}" for one in waiting)])
    if spans_nodes:
        return f"of this node no rank hangs, and all have {waited} for those of another: {_told(seen)}"
    odd = _odd_one(seen)
    if odd is None:
        last = min(seen, key=lambda one: (len(one.place.beats) and one.place.beats[-1].number, one.place.collectives))
        return (f"rank {last.place.rank} hangs, most likely, being behind: all have {waited} for each other, and "
                f"which of them is wrong cannot be told: {_told(seen)}")  # fmt: skip
    return f"rank {odd.rank} hangs: {odd}; all have {waited} for each other: {_told(seen)}"


def _told(seen: Sequence[Seen]) -> str:
    return "; ".join(f"rank {one.place.rank} {one}" for one in seen)


@dataclass(frozen=True)
class _Odd:
    """A rank that has begun another number of collectives than it should."""

    rank: int
    begun: int
    at: Beat
    expected: int
    group: str

    def __str__(self) -> str:
        return f"in {self.at} it has begun {self.begun} collectives on {self.group}, where {self.expected} are expected"


def _odd_one(seen: Sequence[Seen]) -> _Odd | None:
    for group in range(len(_GROUPS)):
        if (odd := _odd_in(seen, group=group)) is not None:
            return odd
    return None


def _odd_in(seen: Sequence[Seen], *, group: int) -> _Odd | None:
    """Return the rank that departs first from what all do alike on a group: that does not, or not yet, begin as many."""
    done: dict[int, dict[int, int]] = {}  # collectives by rank, by number of a beat: until the next
    under_way: dict[int, dict[int, int]] = {}
    at: dict[int, Beat] = {}
    for one in seen:
        beats = one.place.beats
        for beat, after in zip(beats, beats[1:]):
            done.setdefault(beat.number, {})[one.place.rank] = after.collectives[group] - beat.collectives[group]
        for beat in beats[-1:]:
            under_way.setdefault(beat.number, {})[one.place.rank] = (
                one.place.collectives[group] - beat.collectives[group]
            )
        at |= {beat.number: beat for beat in beats}
    whole = [number for number, by_rank in done.items() if len(by_rank) == len(seen)]
    alike = [number for number in whole if len(set(done[number].values())) == 1]
    if 2 * len(alike) < len(whole):
        return None  # a pipeline, say: its ranks have different parts
    usual: dict[tuple[str, str], set[int]] = {}  # by what is done, and what follows
    for number in alike:
        usual.setdefault((at[number].phase, at[number + 1].phase), set()).update(done[number].values())
    for number in sorted(set(done) - set(alike)):
        closed, open_ = done[number], under_way.get(number, {})
        known = usual.get((at[number].phase, at[number + 1].phase), set())
        expected = max(known) if len(known) == 1 else max((*closed.values(), *open_.values()))
        odd = [(rank, begun) for rank, begun in closed.items() if begun != expected]
        odd += [(rank, begun) for rank, begun in open_.items() if begun > expected]
        if odd:
            return _Odd(*odd[0], at[number], expected, _GROUPS[group]) if len(odd) == 1 else None
    return None
