"""How a run can end: the exit codes (sysexits.h), the exceptions that carry them, and how an error is reported."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

_PLACES = sysconfig.get_paths()
_OTHERS = [Path(__file__).resolve().parents[1], *(Path(_PLACES[kind]).resolve() for kind in ("stdlib", "platstdlib"))]
_LIBRARIES = tuple(f"{path}/" for path in (_PLACES["purelib"], _PLACES["platlib"], *_OTHERS))  # not the user's code


class Exit(IntEnum):
    FINISHED = 0
    FAILED = 1
    NO_VALID_CHECKPOINT = 65
    DIVERGED = 70
    HANG = 71
    DISK = 74
    PREEMPTED = 75
    CONFIGURATION = 78


class RunEnded(Exception):
    """An end that all ranks reach together. A restart of the workers would not change the result."""

    code = Exit.FAILED

    def __init_subclass__(cls, *, code: Exit = Exit.FAILED) -> None:
        cls.code = code


class NoValidCheckpoint(RunEnded, code=Exit.NO_VALID_CHECKPOINT):
    """Checkpoints exist, but no checkpoint is valid, or no checkpoint fits this run."""


class Diverged(RunEnded, code=Exit.DIVERGED):
    """The loss or the gradient is not finite. `what` says where, without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; lower optimizer.lr, or clip with trainer.clip_grad_norm")
        self.what = what


class Interrupted(RunEnded, code=Exit.PREEMPTED):
    """A signal has ended the work, and there is no checkpoint from which to continue."""


class DiskFailed(RunEnded, code=Exit.DISK):
    """A checkpoint could not be written. The last valid checkpoint is intact."""


class Unfit(RunEnded, code=Exit.CONFIGURATION):
    """The configuration does not fit the model. Only the run could show this."""


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Let `sys.exit` of the user's code be an error, with its place: otherwise an unfinished run would end with exit code 0."""
    try:
        yield
    except SystemExit as end:
        raise RuntimeError(f"the code calls sys.exit({end.code!r})").with_traceback(end.__traceback__) from None


REMARK = "steadfast_remark"  # an attribute of an error: a text that follows its headline


def headline(error: BaseException) -> str:
    """Return an error's type and first line. If it quotes a loader process's traceback, return that traceback's last line."""
    return _headline(error) + getattr(error, REMARK, "")


def error_text(error: BaseException) -> str:
    """Return an error's type and text in one line, at most 400 characters of it."""
    if _quotes_another(error) or _LOADER.search(str(error)):
        return headline(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}".removesuffix(": ") + getattr(error, REMARK, "")


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    if _quotes_another(error):
        return lines[-1]
    if lacks_memory(error):
        what = found[0] if (found := _ALLOCATOR.search(str(error))) is not None else lines[0].split(". ")[0]
        return f"{' '.join(what.split())}: {_LESS_MEMORY}"
    if is_lost_peer(error):
        return "another process of the run has ended; if it logged an error, the error is in train.log"
    if (died := _LOADER.search(lines[0])) is not None:
        return f"a loader process died: {died[1]} ({_LOADER_REMEDY})"
    if lines[0].endswith(":"):  # the first line only introduces the next lines
        lines = [" ".join(" ".join(lines).split())[:500]]
    return f"{type(error).__name__}: {lines[0]}" + f" ({_WHOLE_TENSORS})" * bool(_OF_SHARDS.search(lines[0]))


_OF_SHARDS = re.compile(r"sharding strategy registered|mixed torch\.Tensor and DTensor")
_WHOLE_TENSORS = "this code does not take shards: the same command with parallel=zero or parallel=ddp continues the run"
_LESS_MEMORY = ("less memory is needed with a smaller micro_batch_size (auto finds one), "
                "trainer.activation_checkpointing=true, or parallel=fsdp")  # fmt: skip


_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is )?(\w[^.]*)")
_LOADER_REMEDY = ("if memory or /dev/shm is full, fewer dataset.num_workers help; with dataset.num_workers=0, a crash of the "
                  "dataset's own code happens in the process of the rank")  # fmt: skip


def place_of(error: BaseException) -> str:
    """Return where an error was raised, as `FILE:LINE in FUNCTION`: in the innermost function of the user, if there is one."""
    if _quotes_another(error):
        places = re.findall(r'File "(.+)", line (\d+), in (.+)', str(error))
    else:
        frames = [frame for one in _chain(error, with_context=False) for frame in traceback.extract_tb(one.__traceback__)]
        places = [(frame.filename, frame.lineno, frame.name) for frame in frames]
    return "{}:{} in {}".format(*next((place for place in reversed(places) if is_own_code(place[0])), places[-1]))


def is_own_code(file: str) -> bool:
    """Return whether a file has the user's code, not that of this framework or of an installed package."""
    if file.startswith(_LIBRARIES):  # thousands of modules, without a look at the disk
        return False
    path = Path(file).resolve()
    is_installed = {"site-packages", "dist-packages"} & {*path.parts}
    return path.is_file() and not is_installed and not any(map(path.is_relative_to, _OTHERS))


def _quotes_another(error: BaseException) -> bool:
    """Return whether torch has raised an error of a loader process again, with the loader's traceback in the text."""
    return str(error).startswith("Caught ") and "Original Traceback" in str(error)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that this process, or its device, has no memory left."""
    return any(isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(str(one))
               for one in _chain(error, with_context=False))  # fmt: skip


_ALLOCATOR = re.compile(r"DefaultCPUAllocator: can't allocate memory[^.]*")
_NO_MEMORY = re.compile(_ALLOCATOR.pattern + "|CUDA error: out of memory|STATUS_ALLOC_FAILED")  # in a RuntimeError


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only reports that another rank has ended."""
    return any(text in str(error) for text in _LOST_PEER)


_LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe",  # gloo
    "remote process exited or there was a network error", "communicator was aborted", "NCCL communicator encountered error",
)  # fmt: skip


def is_timeout(error: BaseException) -> bool:
    """Return whether an error is a time-out of another rank, or follows from one."""
    return any(text in str(one) for one in _chain(error, with_context=True) for text in _TIMEOUT)


def _chain(error: BaseException, *, with_context: bool) -> list[BaseException]:
    """Return an error and the errors that it follows from, each once: an error raised again can be in its own context."""
    found = [error]
    while (one := found[-1].__cause__ or (found[-1].__context__ if with_context else None)) is not None and one not in found:
        found.append(one)
    return found


_TIMEOUT = (
    "Timed out waiting", "Application timeout caused pair closure",  # gloo; the second is its consequence
    "Timeout waiting for key", "Wait timeout", "wait timeout after",  # the stores
    "Watchdog caught collective operation timeout", "milliseconds before timing out",  # the NCCL group
    "launch.timeout_s",  # this framework
)  # fmt: skip
