"""Checks of constructor arguments. A message starts with the argument, so that it is shown under the argument's key."""


def require_at_least(least: int, **arguments: int) -> None:
    """Raise ValueError for the first argument that is smaller than `least`."""
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name}={value}: is out of range (at least {least})")


def require_probability(**arguments: float) -> None:
    """Raise ValueError for the first argument that is not a probability below 1."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: is out of range (at least 0 and below 1)")
