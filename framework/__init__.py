"""Steadfast: PyTorch training in which a run is its configuration.

The public interface is `run`, `compose` and `load`, what they return, and the protocols that a component implements
(`framework.data.source`, `framework.engine.seam`, `framework.loggers.sink`): these follow semantic versioning. All else may
change with any release.
"""

from typing import TYPE_CHECKING, Any

from framework.runtime.version import __version__

__all__ = ["ConfigurationError", "Run", "RunFailed", "__version__", "compose", "load", "run"]

if TYPE_CHECKING:
    from framework.api import ConfigurationError, Run, RunFailed, compose, load, run


def __getattr__(name: str) -> Any:
    """Import the interface at the first use: a process that only reads an exit code needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from framework import api

    return getattr(api, name)
