"""The nodes' signs of life: each node writes a file every second, and the others read it. No clocks are compared."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from framework.launch.elastic.links import DOUBTFUL_AFTER_S, LOST_AFTER_S, Address, Links

_BEAT_S = 1.0
_LOOK_S = 0.25  # between two reads of a file: each agent reads the files of all nodes
_BLOCK = 1024


@dataclass(frozen=True)
class Sign:
    """The content of a node's sign: it lives, the addresses on which it listens, and the nodes that it reaches."""

    beat: int
    addresses: list[Address]
    reaches: frozenset[int]  # nodes that were not silent long enough to count as lost
    hears: frozenset[int]  # nodes that have answered recently


_SIGN = TypeAdapter(Sign)
_NONE = Sign(0, [], frozenset(), frozenset())


@dataclass
class _Seen:
    """This process's view of a node's file: its content, the time of its last change, and the latest complete sign."""

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
        """Return a node's latest sign. It may be a quarter of a second old."""
        return self._look(number).sign

    def silent_s(self, number: int) -> float:
        """Return for how many seconds this process has not seen a new sign of a node."""
        return time.monotonic() - self._look(number).since

    def _look(self, number: int) -> _Seen:
        now, seen = time.monotonic(), self._seen.get(number)
        if seen is not None and now - seen.looked_at < _LOOK_S:
            return seen
        content = ""
        with suppress(FileNotFoundError):
            content = self.path(number).read_text()  # open the file, so that a network file system asks the server
        if seen is None or seen.content != content:
            sign = _NONE if seen is None else seen.sign
            with suppress(ValidationError):  # the file is being written
                sign = _SIGN.validate_json(content)
            seen = _Seen(content, now, now, sign)
        seen.looked_at = now
        self._seen[number] = seen
        return seen

    def give(self, number: int, beat: int) -> None:
        """Write this node's sign."""
        reaches, hears = (frozenset(self._links.answering(within_s=s)) for s in (LOST_AFTER_S, DOUBTFUL_AFTER_S))
        text = _SIGN.dump_json(Sign(beat, self._links.addresses, reaches, hears)).decode()
        # mostly the same size: a network file system may show an old size
        self.path(number).write_text(text.ljust((len(text) // _BLOCK + 1) * _BLOCK))

    def keep_giving(self, number: int, *, until: threading.Event) -> None:
        """Write this node's sign every second, and immediately when a link has changed."""
        beat, told, since = 0, list[int](), time.monotonic()
        while not until.wait(_BEAT_S / 5):
            heard = self._links.answering(within_s=DOUBTFUL_AFTER_S)
            if heard != told or time.monotonic() - since >= _BEAT_S:
                beat, told, since = beat + 1, heard, time.monotonic()
                with suppress(OSError):  # a missed beat is not a lost node
                    self.give(number, beat)
