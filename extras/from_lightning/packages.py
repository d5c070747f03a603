"""The two packages of Lightning, `lightning` and `pytorch_lightning`: a project uses one, and each has its own classes."""

from typing import Any

PACKAGES = ("lightning", "pytorch_lightning")


def lightning_class(kind: type, name: str) -> Any:
    """Return the class of Lightning with this name that a class is or inherits from; None if there is none."""
    return next((base for base in kind.__mro__ if base.__name__ == name and is_of_lightning(base)), None)


def is_of_lightning(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES
