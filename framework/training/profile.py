"""A trace of a few steps of a run, with torch.profiler, and the operations that take the most time."""

from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from framework.distributed.world import World
from framework.runtime.environment import variables
from framework.runtime.files import replacing
from framework.runtime.log import LOGGER

WAIT, WARM_UP, ACTIVE = 2, 1, 3  # numbers of steps that are skipped, discarded and recorded
_NUM_SHOWN = 5


class Profile:
    """A recorder of this process's steps, and of the time between them, into `folder`. Not collective.

    The file is `step_STEP_rank_RANK.json`, where STEP is its first step. Open it with chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, folder: Path, *, world: World) -> None:
        is_on_gpu = world.device.type == "cuda"
        self._own_time = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
        self._folder = folder
        self._rank = world.rank
        self._first_step = 0
        self._num_begun = 0
        self._profiler: profile | None = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_on_gpu else [])],
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )

    def begin_step(self, number: int) -> None:
        """Record that a step starts and the step before has ended. Steps count from 1."""
        if self._profiler is None:
            return
        self._num_begun += 1
        if self._num_begun == 1:
            variables().setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints every start and stop to stderr
            self._profiler.start()
        elif self._num_begun > WAIT + WARM_UP + ACTIVE:
            self.close()
        else:
            self._profiler.step()
        if self._num_begun == WAIT + WARM_UP + 1:
            self._first_step = number

    def close(self) -> None:
        """Stop the recording if it is running, and write the recorded steps."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._num_begun > 0:
            profiler.stop()
        if self._num_begun <= WAIT + WARM_UP:
            LOGGER.warning("trainer.profile: nothing is recorded, because the recording starts with step %d of the process",
                           WAIT + WARM_UP + 1)  # fmt: skip

    def _write(self, profiler: Any) -> None:
        path = self._folder / f"step_{self._first_step:08d}_rank_{self._rank}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            with replacing(path) as staging:
                profiler.export_chrome_trace(str(staging))
        except (OSError, RuntimeError) as error:  # Kineto raises RuntimeError
            LOGGER.warning("trainer.profile: %s could not be written (%s)", path, error)
            return
        if self._rank == 0:
            self._report(path, profiler)

    def _report(self, path: Path, profiler: Any) -> None:
        # a device's kernels are listed too, but the operations that launched them already count their time
        operations = [(getattr(event, self._own_time), event.key, event.count) for event in profiler.key_averages()
                      if event.device_type == DeviceType.CPU and not event.key.startswith("ProfilerStep")]  # fmt: skip
        total = sum(own_us for own_us, _, _ in operations) or 1
        LOGGER.info("%s", f"profile in {path}; the {_NUM_SHOWN} most expensive operations, by their own time:")
        for own_us, name, count in sorted(operations, reverse=True)[:_NUM_SHOWN]:
            LOGGER.info("%s", f"  {own_us / 1000:9.1f} ms {own_us / total:4.0%}  {name}  x {count}")
