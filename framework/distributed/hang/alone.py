"""The watch over a run of one process. No other rank waits for it, so a thread notices when it makes no progress."""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.distributed.hang.board import Board, BoardView
from framework.distributed.hang.diagnose import look
from framework.distributed.hang.stillness import Stillness

_LOOK_S = 1.0
_DEBUGGERS = ("/pdb.py", "/bdb.py")  # in a debugger, a person may need any amount of time


@contextmanager
def watched_alone(*, timeout_s: float, on_hang: Callable[[str], None]) -> Iterator[Board | None]:
    """Yield the board of the only rank. A thread calls `on_hang` with the verdict if the rank does nothing for `timeout_s`.

    Yield None if there is no folder for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="steadfast_board_") as folder:
            board = Board(Path(folder, "board"), rank=0, local_rank=0, num_local=1)
            view = BoardView(Path(folder, "board"), first_rank=0, num_local=1)
    except OSError:
        yield None
        return
    is_over = threading.Event()

    def watch() -> None:
        stillness = Stillness()
        while not is_over.wait(_LOOK_S):
            if stillness.lasts_s(view.everyone()) > timeout_s and not _is_debugged():
                on_hang(look(view, timeout_s=timeout_s, spans_nodes=False))
                return

    thread = threading.Thread(target=watch, name="hang", daemon=True)
    thread.start()
    try:
        yield board
    finally:
        is_over.set()
        thread.join()
        view.close()
        board.close()


def _is_debugged() -> bool:
    if "pydevd" in sys.modules:
        return True
    for frame in sys._current_frames().values():
        inner: object = frame
        while inner is not None:
            if inner.f_code.co_filename.endswith(_DEBUGGERS):  # type: ignore[attr-defined]
                return True
            inner = inner.f_back  # type: ignore[attr-defined]
    return False
