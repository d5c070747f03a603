"""A safetensors file of weights under a model's own names: a run's final ones, or those that another begins from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from framework.checkpoint.plain import Invalid
from framework.checkpoint.tensors import Entry, read_header
from framework.distributed.world import World
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.files import checksum
from framework.runtime.log import LOGGER


@dataclass(frozen=True)
class Fit:
    """What of a file fits a model. A tied weight, which a model has under several names, need be there under one."""

    fitting: list[str]
    missing: list[str]  # in the file
    unexpected: list[str]  # not in the model
    differing: list[str]  # in shape or kind of number, with both

    @classmethod
    def of(cls, header: Mapping[str, Entry], module: nn.Module) -> "Fit":
        """Compare names, shapes and kinds of number. The model's tensors may be without storage."""
        state = module.state_dict(keep_vars=True)
        both = [name for name in state if name in header]
        fitting = [name for name in both if _fits(header[name], state[name])]
        held = {id(state[name]) for name in both}
        return cls(
            fitting=fitting,
            missing=[name for name, tensor in state.items() if id(tensor) not in held],
            unexpected=sorted(header.keys() - state.keys()),
            differing=[_difference(name, header[name], state[name]) for name in both if name not in fitting],
        )

    @property
    def faults(self) -> list[str]:
        """Say what does not fit, a line each."""
        kinds = {
            "missing in the file": self.missing,
            "unexpected in the file": self.unexpected,
            "of another shape or kind": self.differing,
        }
        return [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]


def _fits(entry: Entry, tensor: Tensor) -> bool:
    is_floating = entry.dtype.startswith(("F", "BF"))
    return entry.shape == list(tensor.shape) and is_floating == tensor.is_floating_point()


def _difference(name: str, entry: Entry, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} ({entry.dtype} {entry.shape} in the file, {dtype} {list(tensor.shape)} in the model)"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


@torch.no_grad()
def load_file(path: Path, module: nn.Module) -> Fit:
    """Copy into the model what of the file fits it, in the model's own dtypes, and return what does. Raises Invalid.

    The model is whole, and on the CPU: no strategy has taken it apart yet.
    """
    from safetensors import safe_open

    fit = Fit.of(read_header(path), module)
    state = module.state_dict()
    with safe_open(path, framework="pt") as file:
        for name in fit.fitting:
            state[name].copy_(file.get_tensor(name))
    return fit


def warm_start(module: nn.Module, path: Path, *, digest: str, world: World) -> None:
    """Copy into the whole model, before any strategy takes it apart, what of the file fits it. Collective.

    NoValidCheckpoint if the file is not the one whose `digest` is part of the run's identity. Rank 0 tells what does not fit.
    """
    for fault in world.agreement.gather(_file_fault(path, digest) if world.local_rank == 0 else ""):
        if fault:
            raise NoValidCheckpoint(f"model.init_from: {path} {fault}")
    try:
        fit = load_file(path, module)
    except Invalid as error:  # of this rank alone, a moment after it was read: nothing to agree on
        raise RuntimeError(f"model.init_from: {path} {error}") from None
    if world.rank == 0:
        LOGGER.info("model.init_from: %d of the model's %d tensors are those of %s", len(fit.fitting),
                    len(module.state_dict()), path)  # fmt: skip
        for line in fit.faults:
            LOGGER.warning("model.init_from: %s", line)


def _file_fault(path: Path, digest: str) -> str:
    try:
        _, actual = checksum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if actual == digest else "has changed since the command was given; give it again, for another run"
