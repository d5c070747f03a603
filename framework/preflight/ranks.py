"""The processes of a rehearsal's comparison: each takes two steps as a rank, and answers with its observations."""

import gc
import math
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from framework.build.training import Builder
from framework.config.folders import EXTRAS, ROOT
from framework.data.source import Source
from framework.distributed.other_backend import kinds_of_devices
from framework.distributed.world import World
from framework.modules.tensors import tensors_in
from framework.preflight.child import end_of
from framework.preflight.refused import Refused
from framework.preflight.two_steps import Seen, first_to_part, two_steps
from framework.runtime.environment import Environment
from framework.runtime.exits import DiskFailed, RunEnded, error_text, exits_as_errors, place_of
from framework.runtime.forks import Idleness, begin_child
from framework.runtime.preemption import held_back
from framework.runtime.torch_internals import is_of_functorch

_NOT_THE_MODELS = (Path(torch.__file__).parent, ROOT / "framework", EXTRAS)  # folders of code
_ASKING = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor", "all_to_all",
           "all_to_all_single", "barrier", "get_world_size", "get_rank")  # fmt: skip
_IDLE_S = 8.0  # all processes wait for each other, and none uses the CPU
_LIMIT_S = 600.0  # a rehearsal ends before this time


def fault_of_ranks(ranks: list[Seen]) -> str:
    """Return the fault that has caused the others, or an empty text."""
    is_consequence = lambda fault: fault.startswith("waits") or "Connection" in fault  # noqa: E731  # of another process's end
    return min((rank.fault for rank in ranks if rank.fault), key=is_consequence, default="")


def observe_ranks(
    build: Builder, source: Source | None, *, count: int, like: Seen | None = None, is_watched: bool = False,
    then: Builder | None = None,
) -> list[Seen]:  # fmt: skip
    """Take two steps on so many processes, forked from this one; return the observations of each rank, in order.

    Without a source, each process loads it. The steps and the number of updates are those in `like`. None: one process searches
    the step that is hardest for several. `is_watched`: record whether the model's own code uses torch.distributed.
    `then`: the ranks also take the first two steps of this builder; the first observations hold theirs, if they have arrived.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as scratch:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        shared = build, source, count, like, is_watched, then, Path(scratch)
        ranks = [context.Process(target=_rank, args=(rank, pipe[1], *shared)) for rank, pipe in enumerate(pipes)]
        with held_back():
            for process in ranks:
                process.start()
        for _, theirs in pipes:
            theirs.close()
        answers = [ours for ours, _ in pipes]
        seen = _answers(answers, ranks)
        if then is not None and not fault_of_ranks(seen):
            with suppress(MemoryError):
                seen[0].then = _answers(answers, ranks)
        for process in ranks:
            process.kill()
            process.join()
        return seen


def _answers(answers: Sequence[Connection], ranks: Sequence[BaseProcess]) -> list[Seen]:
    deadline, seen = math.inf, list[Seen]()
    for answer, process in zip(answers, ranks):
        try:
            is_there = _comes(answer, ranks, deadline=deadline)
            seen.append(Seen(**answer.recv()) if is_there else Seen(fault="waits for another process, which does not arrive"))
        except EOFError:
            process.join()
            if process.exitcode == -signal.SIGKILL:  # the kernel does so if there is no memory
                raise MemoryError("one of its processes was killed by SIGKILL") from None
            why = ": gloo aborts where processes communicate different sizes" if process.exitcode == -signal.SIGABRT else ""
            seen.append(Seen(fault=f"its process {end_of(process.exitcode or 0)}{why}"))
        if seen[-1].unfinished:
            raise MemoryError(seen[-1].unfinished)
        if seen[-1].fault:
            deadline = min(deadline, time.monotonic() + 2.0)  # the others may wait for it forever
    return seen


def _comes(answer: Connection, ranks: Sequence[BaseProcess], *, deadline: float) -> bool:
    """Wait for an answer; return False if it has not arrived by the deadline, or if no rank has used the CPU for long.

    The time of a step on this machine is not known, because the machine may be busy.
    """
    idleness, pids = Idleness(), [rank.pid for rank in ranks]
    while not answer.poll(max(0.0, min(0.5, deadline - time.monotonic()))):
        if time.monotonic() >= deadline or idleness.lasts_s(pids) > _IDLE_S:
            return False
    return True


def _rank(
    rank: int, answer: Connection, build: Builder, source: Source | None, count: int, like: Seen | None, is_watched: bool,
    then: Builder | None, scratch: Path,
) -> None:  # fmt: skip
    begin_child()
    torch.set_num_threads(1)
    seen = Seen()
    with _noted_in(seen):
        environment = Environment(rank=rank, local_rank=rank, world_size=count, local_world_size=count)
        environment.export()
        name, module = build.config.backend.name, build.config.backend.module
        if module is None or name is None or "cpu" not in kinds_of_devices(name, module=module):
            name, module = "gloo", None
        world = World.start(environment, backend=name, backend_module=module, timeout_s=_LIMIT_S, scratch=scratch)
        build = build.altered(world=world)
        source = build.source("train") if source is None else source
        if is_watched:
            sys.setprofile(partial(_note_asking, seen))
        if like is None:
            seen.first, seen.do_part = first_to_part(build, source, folder=scratch)
        else:
            seen.first, seen.num_updates = like.first, like.num_updates
        with _Crossings(seen) if is_watched else nullcontext():
            two_steps(build.altered(), source, seen, folder=scratch)  # with its own task
        world.agreement.barrier()
    answer.send(vars(seen))
    if then is not None and not seen.fault:
        gc.collect()  # the first trainers: there may not be memory for more
        seen = Seen(num_updates=1)
        with _noted_in(seen):
            (scratch / "then").mkdir(exist_ok=True)
            two_steps(then.altered(world=world), source, seen, folder=scratch / "then")
            world.agreement.barrier()
        answer.send(vars(seen))


@contextmanager
def _noted_in(seen: Seen) -> Iterator[None]:
    """Note the exception that ends the steps inside."""
    try:
        with exits_as_errors():
            yield
    except Refused as refused:
        seen.fault = f"{refused.problem.key}: {refused.problem.what}"
        if refused.problem.key.startswith("part."):
            seen.finding = refused.problem.key, refused.problem.what, refused.problem.expected
    except DiskFailed as end:
        seen.unfinished = str(end)
    except RunEnded as end:
        seen.fault = str(end)
    except Exception as error:
        seen.fault = f"{error_text(error)}, at {place_of(error)}"


def _note_asking(seen: Seen, frame: FrameType, event: str, _: object) -> None:
    """As a profiler of Python, record the first call of torch.distributed that neither torch nor this framework makes."""
    if seen.asks or event != "call" or frame.f_code.co_name not in _ASKING:
        return
    if not frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return
    caller = frame.f_back
    if caller is not None and caller.f_code.co_filename.endswith("c10d_logger.py"):  # a wrapper of torch's
        caller = caller.f_back
    if caller is None:
        return
    if _is_models(caller) and "torchmetrics" not in Path(caller.f_code.co_filename).parts:  # metrics add up over ranks
        seen.asks = f"{frame.f_code.co_name} at {caller.f_code.co_filename}:{caller.f_lineno}"


def _is_models(frame: FrameType) -> bool:
    return not any(map(Path(frame.f_code.co_filename).is_relative_to, _NOT_THE_MODELS))


class _Crossings(TorchFunctionMode):
    """A mode that notes the first operation on what a pipeline's stage has computed and on what it does not have.

    In a stage, what another stage has computed is not a number.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._seen.crossing:
            given = [one for one in tensors_in([list(args), kwargs or {}]) if type(one) is Tensor and one.ndim > 1]
            given = [one for one in given if one.is_floating_point() and one.numel() and not one.is_meta]
            given = [one for one in given if not is_of_functorch(one)]
            samples = [one for one in given if one.shape[0] == given[0].shape[0]]
            missing = [bool(one.isnan().all()) for one in samples]
            if any(missing) and any(one.requires_grad and not none for one, none in zip(samples, missing)):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and Path(frame.f_code.co_filename).is_relative_to(_NOT_THE_MODELS[0]):  # torch's
                    frame = frame.f_back
                if frame is not None and _is_models(frame):
                    self._seen.crossing = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return function(*args, **(kwargs or {}))
