"""The identity of a run: a hash of everything in its configuration that decides what is computed."""

import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from framework.config.frozen_file import digest_of
from framework.config.renamed import first_target
from framework.runtime.files import checksum

# Keys that decide how or where a run is executed, not what it computes: not part of its identity.
EXECUTION = (
    "launch", "logger", "backend", "run", "mode", "eval", "export", "hydra", "name",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.async_save",
    "checkpoint.max_failures", "dataset.num_workers", "dataset.source", "trainer.profile",
)  # fmt: skip


def identity(config: dict[str, Any]) -> str:
    """Return the run's id: 12 hexadecimal digits that hash everything that decides what is computed.

    The file of `model.init_from` counts by its content, not by its path.
    """
    kept = {key: value for key, value in flat(config).items() if not is_below(key, EXECUTION)}
    kept |= {key: first_target(value) for key, value in kept.items() if key.endswith("._target_") and isinstance(value, str)}
    init_from = kept.pop("model.init_from", None)
    if init_from is not None:
        kept["model.init_from"] = content_of(str(init_from)) or init_from
    return digest_of(kept)[:12]


def content_of(path: str) -> str | None:
    """Return the checksum of a file's content; None if the file cannot be read (the preflight reports that)."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        return _content(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):  # ValueError: the path has a null byte
        return None


@cache  # a sweep asks once a job, and hashing gigabytes takes seconds
def _content(path: str, *_: int) -> str:
    return checksum(Path(path))[1]


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `sections`, or in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by their dotted keys. A list is a value."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            # lr=1 and lr=1.0 are the same command
            values[prefix + key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return values
