"""The verdict on a hang: which rank is guilty, from where all of them are."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from framework.distributed.hang.board import Beat, RankSlot
from framework.runtime.torch_internals import BACKWARD_FUNCTION

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, or of the one thread that a traceback is about, innermost first."""
    threads = re.split(r"^(?:Current t|T)hread 0x", text, flags=re.MULTILINE)
    found = re.findall(r'File "(.+)", line (\d+),? in (.+)', threads[-1])  # the main thread, the oldest, comes last
    in_order = [Frame(file, int(line), function) for file, line, function in found]
    return in_order if len(threads) > 1 else in_order[::-1]


def own_frame(text: str) -> Frame | None:
    """Return the innermost frame that is not a library's."""
    return next((frame for frame in frames(text) if not frame.file.startswith((*_LIBRARIES, "<"))), None)


def waits_for_others(text: str) -> bool:
    """Return whether the innermost call is one of torch.distributed, or the backward pass, in which gradients are summed."""
    innermost = frames(text)[:1]
    return any("/torch/distributed/" in f.file or f.function == BACKWARD_FUNCTION for f in innermost)


_GROUPS = ("the default process group", "the control group")


@dataclass(frozen=True)
class RankReport:
    """Where a rank was found, and what it was doing."""

    slot: RankSlot
    stack: str
    manner: str  # what it does instead of waiting for other ranks; empty if it waits for them

    def __str__(self) -> str:
        where = f"in {self.slot.beats[-1]}" if self.slot.beats else "at its start"
        frame = own_frame(self.stack)
        return where if frame is None else f"{where}, at {frame}"


def judge(seen: Sequence[RankReport], *, timeout_s: float, spans_nodes: bool) -> str:
    """Return the verdict on the ranks of a node, in one sentence.

    The guilty rank is the one that is not waiting for the others. Where all wait, but not for the same, it is the rank that
    has not begun as many collectives in a part of the program as the others, or as in the same part before.
    """
    guilty, waiting = [one for one in seen if one.manner], [one for one in seen if not one.manner]
    everyone = "; ".join(f"rank {one.slot.rank} {one}" for one in seen)
    waited = f"waited launch.timeout_s={timeout_s:g} seconds"
    if guilty:
        said = "; ".join(f"rank {one.slot.rank} hangs: it {one.manner}, {one}" for one in guilty)
        return "; ".join([said, *(f"rank {one.slot.rank} has {waited} {one}" for one in waiting)])
    if spans_nodes:
        return f"of this node no rank hangs, and all have {waited} for those of another: {everyone}"
    found = _outlier(seen, group=0) or _outlier(seen, group=1)
    if found is None:
        last = min(seen, key=lambda one: (len(one.slot.beats) and one.slot.beats[-1].number, one.slot.collectives))
        return (f"rank {last.slot.rank} hangs, most likely, being behind: all have {waited} for each other, and "
                f"which of them is wrong cannot be told: {everyone}")  # fmt: skip
    rank, said = found
    return f"rank {rank} hangs: {said}; all have {waited} for each other: {everyone}"


def _outlier(seen: Sequence[RankReport], *, group: int) -> tuple[int, str] | None:
    """Return the rank that first begins another number of collectives on a group than all ranks do, and how it differs."""
    done: dict[int, dict[int, int]] = {}  # collectives by rank, by number of a beat: until the next beat
    under_way: dict[int, dict[int, int]] = {}
    at: dict[int, Beat] = {}
    for one in seen:
        beats = one.slot.beats
        for beat, after in zip(beats, beats[1:]):
            done.setdefault(beat.number, {})[one.slot.rank] = after.collectives[group] - beat.collectives[group]
        for beat in beats[-1:]:
            under_way.setdefault(beat.number, {})[one.slot.rank] = one.slot.collectives[group] - beat.collectives[group]
        at |= {beat.number: beat for beat in beats}
    whole = [number for number, by_rank in done.items() if len(by_rank) == len(seen)]
    alike = [number for number in whole if len(set(done[number].values())) == 1]
    if 2 * len(alike) < len(whole):
        return None  # a pipeline, say: its ranks have different parts
    usual: dict[tuple[str, str], set[int]] = {}  # by the phases of a beat and of the next
    for number in alike:
        usual.setdefault((at[number].phase, at[number + 1].phase), set()).update(done[number].values())
    for number in sorted(set(done) - set(alike)):
        closed, open_ = done[number], under_way.get(number, {})
        known = usual.get((at[number].phase, at[number + 1].phase), set())
        expected = max(known) if len(known) == 1 else max((*closed.values(), *open_.values()))
        odd = [(rank, begun) for rank, begun in closed.items() if begun != expected]
        odd += [(rank, begun) for rank, begun in open_.items() if begun > expected]
        if odd:
            rank, begun = odd[0]
            said = f"in {at[number]} it has begun {begun} collectives on {_GROUPS[group]}, where {expected} are expected"
            return (rank, said) if len(odd) == 1 else None
    return None
