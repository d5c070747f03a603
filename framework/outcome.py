"""How a run can end: the exit codes (sysexits.h), and the exceptions that carry them."""

from enum import IntEnum


class Exit(IntEnum):
    FINISHED = 0
    FAILED = 1
    NO_VALID_CHECKPOINT = 65
    DIVERGED = 70
    DISK = 74
    PREEMPTED = 75
    CONFIGURATION = 78


class RunEnded(Exception):
    """An end that every rank reaches together, and that starting the workers again would not change."""

    code = Exit.FAILED


class NoValidCheckpoint(RunEnded):
    """Checkpoints exist, but none is valid (or none fits this run)."""

    code = Exit.NO_VALID_CHECKPOINT


class Diverged(RunEnded):
    """The loss or the gradient is not finite."""

    code = Exit.DIVERGED


class DiskFailed(RunEnded):
    """A checkpoint could not be written; the last valid one is intact."""

    code = Exit.DISK
