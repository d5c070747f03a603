"""The nodes' signs of life: each writes a file each second, which the others read; no two machines' clocks are compared."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from framework.launch.elastic.links import DOUBTFUL_AFTER_S, LOST_AFTER_S, Address, Links

_BEAT_S = 1.0
_LOOK_S = 0.25  # between two looks at a file: of many nodes, each agent reads all
_BLOCK = 1024


@dataclass(frozen=True)
class Sign:
    """What a node writes: that it lives, where it listens, and whom it reaches."""

    beat: int
    addresses: list[Address]
    reaches: frozenset[int]  # that have not been silent for so long that they are lost
    hears: frozenset[int]  # that have answered just now


_SIGN = TypeAdapter(Sign)
_NONE = Sign(0, [], frozenset(), frozenset())


@dataclass
class _Seen:
    """What this process has seen of a node's file: its content, since when, and the latest sign that was whole."""

    content: str
    since: float
    looked_at: float
    sign: Sign


class Signs:
    """One agent's view of the signs in the folder of a meeting."""

    def __init__(self, folder: Path, links: Links) -> None:
        self._folder, self._links = folder, links
        self._seen: dict[int, _Seen] = {}

    def path(self, number: int) -> Path:
        return self._folder / f"node_{number}"

    def of(self, number: int) -> Sign:
        """Return a node's latest sign, which may be a quarter of a second old."""
        return self._look(number).sign

    def silent_s(self, number: int) -> float:
        """Return for how many seconds this process has seen no other sign of a node."""
        return time.monotonic() - self._look(number).since

    def _look(self, number: int) -> _Seen:
        now, seen = time.monotonic(), self._seen.get(number)
        if seen is not None and now - seen.looked_at < _LOOK_S:
            return seen
        content = ""
        with suppress(FileNotFoundError):
            content = self.path(number).read_text()  # opened, so that a network file system asks the server
        if seen is None or seen.content != content:
            sign = _NONE if seen is None else seen.sign
            with suppress(ValidationError):  # it is being written
                sign = _SIGN.validate_json(content)
            seen = _Seen(content, now, now, sign)
        seen.looked_at = now
        self._seen[number] = seen
        return seen

    def give(self, number: int, beat: int) -> None:
        """Write this node's sign."""
        reaches, hears = (frozenset(self._links.answering(within_s=s)) for s in (LOST_AFTER_S, DOUBTFUL_AFTER_S))
        text = _SIGN.dump_json(Sign(beat, self._links.addresses, reaches, hears)).decode()
        # of the same size, mostly: a network file system may show an old size
        self.path(number).write_text(text.ljust((len(text) // _BLOCK + 1) * _BLOCK))

    def keep_giving(self, number: int, *, until: threading.Event) -> None:
        """Write it each second, and at once where there is news of a link."""
        beat, told, since = 0, list[int](), time.monotonic()
        while not until.wait(_BEAT_S / 5):
            heard = self._links.answering(within_s=DOUBTFUL_AFTER_S)
            if heard != told or time.monotonic() - since >= _BEAT_S:
                beat, told, since = beat + 1, heard, time.monotonic()
                with suppress(OSError):  # a missed beat is not a lost node
                    self.give(number, beat)
