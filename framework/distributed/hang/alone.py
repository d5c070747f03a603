"""The watch over a run of one process. No other rank waits for it, so a thread notices when it makes no progress."""

import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.distributed.hang.board import Board, OwnBoard
from framework.distributed.hang.diagnose import look

_DEBUGGERS = ("/pdb.py", "/bdb.py")  # in a debugger, a person may need any amount of time


@contextmanager
def watched_alone(*, timeout_s: float, on_hang: Callable[[str], None]) -> Iterator[OwnBoard | None]:
    """Yield the board of the only rank. A thread calls `on_hang` with the verdict if the rank does nothing for `timeout_s`.

    Yield None if there is no folder for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="steadfast_board_") as folder:
            board = OwnBoard(Path(folder, "board"), rank=0, local_rank=0, num_local=1)
            view = Board(Path(folder, "board"), first_rank=0, num_local=1)  # in which the rank is one of the others
    except OSError:
        yield None
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            if view.stillness_s() > timeout_s and not _is_debugged():
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
    stacks = map(traceback.extract_stack, sys._current_frames().values())
    return "pydevd" in sys.modules or any(frame.filename.endswith(_DEBUGGERS) for stack in stacks for frame in stack)
