"""The live line of a terminal: bar, step, loss, main metric, speed and times, as far as they fit."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import in_digits, is_curve

_WIDEST_BAR = 40  # in columns
_BARS = (20, 10, 6, 0)  # the minimum columns of the bar, from much space to little space
# The order in which fields shrink if there is little space. Each time a field is named, it gets its next shorter form.
_GIVES_WAY = ("others", "lr", "bar", "times", "speed", "step", "loss", "metric", "bar", "times", "gap", "times", "metric",
              "bar", "speed", "times", "loss")  # fmt: skip
_FIELDS = ("step", "loss", "metric", "others", "lr", "speed", "times")


class LiveLine:
    """The line that rich draws again and again, at rich's own times. A new row only stores its numbers here."""

    def __init__(self, run: RunInfo) -> None:
        self._run, self._begun = run, time.monotonic()
        self._row: dict[str, Any] = {}
        self._step, self._at = run.step, self._begun  # the step and the time of the row

    def update(self, row: dict[str, Any]) -> None:
        """Show a training row from now on."""
        self._row, self._step, self._at = row, row["step"], time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, todo = "=-" if options.ascii_only else "━━"
        text = Text(no_wrap=True, overflow="crop")
        bar, words = fitted(self._forms(), width=options.max_width - 3)  # - 3: a terminal prints ^C after the line
        if bar:
            num_done = round(bar * min(1.0, self._step / max(1, self._run.total_steps)))
            text.append(done * num_done, style="cyan").append(todo * (bar - num_done), style="bright_black")
            text.append(" ")
        yield text.append(words)

    def _forms(self) -> dict[str, Sequence[str]]:
        now, row, left = time.monotonic(), self._row, self._run.total_steps - self._step
        elapsed_s, pace_s = now - self._begun, (self._at - self._begun) / max(1, self._step - self._run.step)
        elapsed, eta = clock(elapsed_s), clock(max(0.0, left * pace_s - (now - self._at)))
        times = (f"{elapsed} elapsed  eta {eta}", f"{elapsed}  eta {eta}", f"{elapsed}<{eta}", f"eta {eta}", "")
        names = [name for name in row if is_curve(name) and name != "loss"]
        main = main_metric(names, monitor=self._run.monitor)
        speed, lr = row.get("samples_per_s"), row.get("lr")
        return {
            "step": (f"step {self._step}/{self._run.total_steps}", f"{self._step}/{self._run.total_steps}"),
            "loss": (*_named("loss", row), ""),
            "metric": (*_named(main, row), ""),
            "others": ("  ".join(f"{name} {in_digits(row[name])}" for name in names if name != main), ""),
            "lr": (f"lr {lr:.2e}" if lr is not None else "", ""),
            "speed": (f"{speed:,.0f} samples/s", f"{short(speed)}/s", "") if speed is not None else ("", "", ""),
            "times": times if row else (f"{elapsed} elapsed", elapsed, elapsed, "", ""),
        }


def fitted(forms: Mapping[str, Sequence[str]], *, width: int) -> tuple[int, str]:
    """Return the columns of the bar, and the words after it, that together fit into `width`. No number is cut.

    `forms` has each field's texts, from the longest to the shortest.
    """
    every = {**forms, "gap": ("  ", " "), "bar": _BARS}
    taken = dict.fromkeys(every, 0)
    for name in (*_GIVES_WAY, ""):
        gap = "  "[taken["gap"] :]
        words = gap.join(filter(None, (forms[field][taken[field]] for field in _FIELDS)))
        least = _BARS[taken["bar"]]
        size = cell_len(words)
        if size + least + bool(least) <= width or not name:
            break
        taken[name] += 1
    return min(_WIDEST_BAR, width - size - 1) if least else 0, words


def main_metric(names: Sequence[str], *, monitor: str) -> str:
    """Return the metric that is shown beside the loss: the monitored metric, else the first one; empty if there is none."""
    monitored = monitor.partition("/")[2]
    return monitored if monitored in names else next(iter(names), "")


def brief(value: float | None) -> str:
    """Return a number as text of about five characters."""
    if value is None:
        return "nan"
    if 1 <= abs(value) < 1e4:
        return f"{value:.2f}"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1 else f"{value:.1e}"


def clock(seconds: float) -> str:
    """Return a time as text: 0:07, 12:34, 1:02:03, or 2 days, 3:04:05."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")


def short(number: float) -> str:
    """Return a number as text with three digits and a unit of a thousand: 3.79k."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _named(name: str, row: Mapping[str, Any]) -> tuple[str, str]:
    return (f"{name} {in_digits(row[name])}", f"{name} {brief(row[name])}") if name in row else ("", "")
