"""Reading what Python writes of a stack: a traceback (innermost call last) or faulthandler's (innermost first)."""

import re
import sysconfig
from typing import NamedTuple

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
    found = re.findall(
        r'File "(.+)", line (\d+),? in (.+)', threads[-1]
    )  # the main thread, being the oldest, comes last
    in_order = [Frame(file, int(line), function) for file, line, function in found]
    return in_order if len(threads) > 1 else in_order[::-1]


def own_frame(text: str) -> Frame | None:
    """Return the innermost frame that is not a library's."""
    return next((frame for frame in frames(text) if not frame.file.startswith((*_LIBRARIES, "<"))), None)


def waits_for_others(text: str) -> bool:
    """Return whether the innermost call is one of torch.distributed, or the backward pass, in which gradients are summed."""
    innermost = frames(text)[:1]
    return any("/torch/distributed/" in f.file or f.function == "_engine_run_backward" for f in innermost)
