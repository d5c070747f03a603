"""Periods: how often something is due, in optimizer steps, epochs, samples, tokens or units of time."""

import re
from typing import Annotated, Any

from pydantic import StringConstraints

from framework.config.section import Positive
from framework.runtime.exits import Unfit

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PERIOD = r"([1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(ep|samples|tokens|s|min|h)"
WITH_UNIT = Annotated[str, StringConstraints(pattern=f"^{_PERIOD}$")]
Period = Positive | WITH_UNIT  # a number of steps, or a number with its unit


def seconds_of(period: Period | None) -> float | None:
    """Return the seconds of a period of time; None for any other."""
    number, unit = _parts(period)
    return number * _SECONDS[unit] if unit in _SECONDS else None


def samples_of(period: Any, *, epoch_size: int, sample_tokens: int | None) -> float | None:
    """Return the samples of a period in epochs, samples or tokens; None for any other value.

    Unfit for tokens, if it is not known how many a sample has.
    """
    number, unit = _parts(period)
    if unit == "tokens" and sample_tokens is None:
        raise Unfit(f"{period}: counts tokens, but the dataset has no seq_len (another unit, or dataset.facts.seq_len)")
    return {"ep": number * epoch_size, "samples": number, "tokens": number / (sample_tokens or 1)}.get(unit)


def counts_samples(value: Any) -> bool:
    """Return whether this is a period in epochs, samples or tokens."""
    return _parts(value)[1] in ("ep", "samples", "tokens")


def epochs_of(value: Any) -> float | None:
    """Return the number of epochs in a text such as `1.5ep`; None for any other value."""
    number, unit = _parts(value)
    return number if unit == "ep" else None


def _parts(period: Any) -> tuple[float, str]:
    found = re.fullmatch(_PERIOD, period) if isinstance(period, str) else None
    return (float(found[1]), found[2]) if found is not None else (0.0, "")
