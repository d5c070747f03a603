"""Whether a model's own code uses the processes of a run, which a strategy uses for it."""

from pathlib import Path
from types import FrameType

import torch

from framework.preflight.two_steps import Seen

_NOT_THE_MODELS = (Path(torch.__file__).parent, Path(__file__).parents[1])  # folders of code
_ASKING = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor", "all_to_all",
           "all_to_all_single", "barrier", "get_world_size", "get_rank")  # fmt: skip


def note_asking(seen: Seen, frame: FrameType, event: str, _: object) -> None:
    """As a profiler of Python, record the first call of torch.distributed that neither torch nor this framework makes."""
    if seen.asks or event != "call" or frame.f_code.co_name not in _ASKING:
        return
    if not frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return
    caller = frame.f_back
    if caller is not None and caller.f_code.co_filename.endswith("c10d_logger.py"):  # a wrapper of torch's
        caller = caller.f_back
    if caller is not None and not any(map(Path(caller.f_code.co_filename).is_relative_to, _NOT_THE_MODELS)):
        seen.asks = f"{frame.f_code.co_name} at {caller.f_code.co_filename}:{caller.f_lineno}"
