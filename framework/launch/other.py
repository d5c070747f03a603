"""Launchers that start all processes of a run themselves, and do not set torchrun's variables: the group `launchers`."""

from typing import Any

from framework.config.folders import option_node, options
from framework.config.targets import component
from framework.runtime.environment import Environment


def other_launcher() -> Any | None:
    """Return the launcher that has started this process as one of several. None for torchrun, and for a single process.

    ValueError, with a line `KEY: WHAT`, if a launcher of the user cannot be imported.
    """
    environment = Environment.read()
    if environment.is_launched and not environment.is_foreign:
        return None
    for name in options("launchers"):
        try:
            launcher = component(option_node("launchers", name))()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"launchers.{name}: {error} (docs/extend.md)") from error
        if launcher.started():
            return launcher
    return None
