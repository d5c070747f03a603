"""Renamed components: configurations of earlier versions still work, and their runs keep their ids."""

from typing import Any

# (current, old): prefixes of dotted paths
_MOVED = (("framework.optim.optimizers.", "framework.optim."), ("framework.optim.schedules.", "framework.schedules."))


def current_target(target: str) -> str:
    """Return a component's current dotted path."""
    for now, before in _MOVED:
        if target.startswith(before) and not target.startswith(now) and target.count(".") == before.count("."):
            return now + target.removeprefix(before)
    return target


def first_target(target: str) -> str:
    """Return a component's first dotted path, so that a run's id does not change when the component moves."""
    for now, before in _MOVED:
        if target.startswith(now):
            return before + target.removeprefix(now)
    return target


def renamed(value: Any) -> Any:
    """Return plain data with every old `_target_` replaced by its current path."""
    if isinstance(value, dict):
        return {key: current_target(item) if key == "_target_" and isinstance(item, str) else renamed(item)
                for key, item in value.items()}  # fmt: skip
    return [renamed(item) for item in value] if isinstance(value, list) else value
