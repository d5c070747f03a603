"""Periods: how often something is due, in optimizer steps, epochs, samples or units of time."""

import re
from typing import Annotated, Any

from pydantic import StringConstraints

from framework.config.section import Positive

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PERIOD = r"([1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(ep|samples|s|min|h)"
WITH_UNIT = Annotated[str, StringConstraints(pattern=f"^{_PERIOD}$")]
Period = Positive | WITH_UNIT  # a number of steps, or a number with its unit


def seconds_of(period: Period | None) -> float | None:
    """Return the seconds of a period of time; None for any other."""
    number, unit = _parts(period)
    return number * _SECONDS[unit] if unit in _SECONDS else None


def samples_of(period: Period | None, *, epoch_size: int) -> float | None:
    """Return the samples of a period in epochs or samples; None for any other."""
    number, unit = _parts(period)
    return {"ep": number * epoch_size, "samples": number}.get(unit)


def epochs_of(value: Any) -> float | None:
    """Return the number of epochs in a text such as `1.5ep`; None for any other value."""
    number, unit = _parts(value)
    return number if unit == "ep" else None


def _parts(period: Any) -> tuple[float, str]:
    found = re.fullmatch(_PERIOD, period) if isinstance(period, str) else None
    return (float(found[1]), found[2]) if found is not None else (0.0, "")
