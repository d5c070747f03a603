"""A real pseudo-terminal with a command in it, and an emulator that shows what a person would see there."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte

from framework.cli.run import start
from tests.harness import Ended, begin, end

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [sys.executable, str(ROOT / "train.py")]
_SCROLLBACK = 10_000  # lines


@dataclass
class Shown:
    """What a terminal has got so far, and what it shows of it."""

    columns: int
    rows: int = 24
    received: bytes = b""
    code: int | None = None  # of the command, once it has ended
    screen: pyte.HistoryScreen = field(init=False)

    def __post_init__(self) -> None:
        self.screen = pyte.HistoryScreen(self.columns, self.rows, history=_SCROLLBACK)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, block: bytes) -> None:
        self.received += block
        self._stream.feed(block)

    @property
    def lines(self) -> list[str]:
        """Every line from the first on, those that have left the screen too; without empty ones at the end."""
        above = ["".join(line[column].data for column in range(self.columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*above, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def show(
    words: Sequence[str],
    *,
    directory: Path,
    columns: int,
    rows: int = 24,
    look: Callable[[Shown, int], None] = lambda shown, terminal: None,
    **env: str,
) -> Shown:
    """Run a command in a terminal of that size. `look` is called after each block that the terminal gets."""
    leader, follower = pty.openpty()
    resize(leader, columns=columns, rows=rows)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(words, cwd=directory, env=environment | {"TERM": "xterm-256color"} | env,
                               stdin=follower, stdout=follower, stderr=follower, start_new_session=True)  # fmt: skip
    shown = _watched(leader, follower, Shown(columns, rows), look)
    shown.code = process.wait()
    return shown


def on_terminal(
    *overrides: str, root: Path, columns: int, rows: int = 40, before: Callable[[], None] = lambda: None,
    run: Callable[[list[str]], int] = start,
) -> tuple[Ended, Shown]:  # fmt: skip
    """Run a command, as harness.command does, whose stdin, stdout and stderr are a terminal; `before` runs in its process first."""
    leader, follower = pty.openpty()
    resize(leader, columns=columns, rows=rows)

    def use_terminal() -> None:
        os.close(leader)
        for descriptor in (0, 1, 2):
            os.dup2(follower, descriptor)
        os.environ.update(TERM="xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        before()

    process = begin(*overrides, root=root, before=use_terminal, run=run)
    shown = _watched(leader, follower, Shown(columns, rows), lambda shown, terminal: None)
    return end(process, root=root), shown


def _watched(leader: int, follower: int, shown: Shown, look: Callable[[Shown, int], None]) -> Shown:
    os.close(follower)
    while block := _read(leader):
        shown.feed(block)
        look(shown, leader)
    os.close(leader)
    return shown


def resize(terminal: int, *, columns: int, rows: int = 24) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # EIO: the last process that had it open has ended
        return b""
