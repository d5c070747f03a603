"""The speed of a run: the time of each phase of a step, samples and tokens a second, memory. Definitions: docs/metrics.md."""

import resource
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from framework.checkpoint.state import Progress
from framework.training.machine import Machine
from framework.training.profile import Profile

Phase = Literal["start", "data", "forward_backward", "optimizer", "checkpoint", "evaluation", "loop", "end"]
PARTS: tuple[Phase, ...] = ("data", "forward_backward", "optimizer", "checkpoint")  # of a step's time; "loop" is the rest
_STEPPING: tuple[Phase, ...] = ("data", "forward_backward", "optimizer", "loop")
_MOST_EVENTS = 4000  # kept between two rows: the events of the last thousand steps


@dataclass(eq=False)
class Speed:
    """A stop-watch for the loop's phases, and the numbers computed from it. Each rank has its own.

    When the loop enters a phase, a clock is read. On CUDA an event is also recorded, without waiting: an event is counted when
    the device has finished the work before it. `peak_flops` is the peak of all devices of the run together.
    """

    device: torch.device
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    profile: Profile | None = None
    machine: Machine | None = None

    def __post_init__(self) -> None:
        is_on_gpu = self.device.type == "cuda"
        self._events: deque[tuple[Phase, torch.cuda.Event]] | None = deque(maxlen=_MOST_EVENTS) if is_on_gpu else None
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self.phase: Phase = "start"
        self._since = time.perf_counter()
        self._at_tick = self._seconds.copy()
        self.begin(step=0, samples_seen=0)

    def enter(self, phase: Phase) -> None:
        """Count the time from now on for `phase`."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
        if self._events is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))

    def begin(self, *, step: int, samples_seen: int) -> None:
        """Count for the next row from now on."""
        self.enter(self.phase)
        self._at_row = step, samples_seen, self._seconds.copy()

    def step_s(self, *, step: int) -> float:
        """Return the seconds of a step since the last row, measured by this rank; 0 if there was no step."""
        self.enter(self.phase)
        last_step, _, before = self._at_row
        spent = self._since_then(before)
        return sum(spent[phase] for phase in (*PARTS, "loop")) / (step - last_step) if step > last_step else 0.0

    def row(self, *, step: int, samples_seen: int) -> dict[str, float]:
        """Return the speed columns of a training row, for the steps since the last row, measured by this rank.

        Collective if there is a `machine`.
        """
        last_step, last_samples, before = self._at_row
        step_s, num_steps = self.step_s(step=step), step - last_step
        self.begin(step=step, samples_seen=samples_seen)
        spent = self._since_then(before)
        rate = (samples_seen - last_samples) / max(step_s * num_steps, 1e-9)
        parts = self._of_device() if self._events is not None else {phase: spent[phase] / num_steps for phase in PARTS}
        row = {"samples_per_s": rate, "step_s": step_s, **{f"{phase}_s": parts[phase] for phase in PARTS}}
        row["data_share"] = parts["data"] / max(step_s, 1e-9)
        if self.tokens_per_sample is not None:
            row["tokens_per_s"] = rate * self.tokens_per_sample
        if self.flops_per_sample is not None and self.peak_flops is not None:
            row["mfu"] = rate * self.flops_per_sample / self.peak_flops
        return row | (self.machine.columns() if self.machine is not None else {})

    def _of_device(self) -> dict[Phase, float]:
        """Return the seconds per step that the device spent in each phase; in `data`, it waits.

        Work that the device has not finished counts for the next row.
        """
        assert self._events is not None
        spent = dict.fromkeys(self._seconds, 0.0)
        num_steps = 0
        while len(self._events) > 1 and self._events[1][1].query():
            phase, start = self._events.popleft()
            spent[phase] += start.elapsed_time(self._events[0][1]) / 1000
            num_steps += phase == "optimizer"
        return {phase: spent[phase] / max(num_steps, 1) for phase in PARTS}

    def tick(self, progress: Progress) -> None:
        """Add to `progress` the seconds since the last call, and those of them that were spent in steps."""
        self.enter(self.phase)
        spent, self._at_tick = self._since_then(self._at_tick), self._seconds.copy()
        progress.wall_s += sum(spent.values())
        progress.train_s += sum(spent[phase] for phase in _STEPPING)

    def _since_then(self, before: dict[Phase, float]) -> dict[Phase, float]:
        return {phase: seconds - before[phase] for phase, seconds in self._seconds.items()}


def peak_memory_gib(devices: list[torch.device]) -> float:
    """Return this process's peak memory: allocated on all its CUDA devices, or resident on a CPU."""
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)  # KiB on Linux
