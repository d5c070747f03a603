"""A safetensors file of weights under a model's own names: the final weights of a run, or the first weights of another."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from framework.checkpoint.plain import Invalid
from framework.checkpoint.tensors import Entry, read_header
from framework.distributed.world import World
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.files import checksum
from framework.runtime.log import LOGGER


@dataclass(frozen=True)
class Fit:
    """Which tensors of a file fit a model. A tied weight has several names in a model; one of them in the file is enough."""

    fitting: list[str]
    faults: list[str]  # what does not fit, a line each

    @classmethod
    def of(cls, header: Mapping[str, Entry], module: nn.Module) -> "Fit":
        """Compare names, shapes and kinds of number. The model's tensors may be without storage."""
        state = module.state_dict(keep_vars=True)
        both = [name for name in state if name in header]
        held = {id(state[name]) for name in both}
        missing = [name for name, tensor in state.items() if id(tensor) not in held]
        fitting, differing = [], []
        for name in both:
            entry, tensor = header[name], state[name]
            is_floating = entry.dtype.startswith(("F", "BF"))
            if entry.shape == list(tensor.shape) and is_floating == tensor.is_floating_point():
                fitting.append(name)
            else:
                found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                differing.append(f"{name} ({entry.dtype} {entry.shape} in the file, {found} in the model)")
        unexpected = sorted(header.keys() - state.keys())
        lists = {"missing in the file": missing, "unexpected in the file": unexpected, "of another shape or kind": differing}
        return cls(fitting, [f"{what}: {_listed(names)}" for what, names in lists.items() if names])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


@torch.no_grad()
def load_file(path: Path, module: nn.Module) -> Fit:
    """Copy the fitting tensors of the file into the model, in the model's dtypes; return the fit. Raises Invalid.

    The model is whole, and on the CPU: no strategy has changed it yet.
    """
    fit = Fit.of(read_header(path), module)
    state = module.state_dict()
    with safe_open(path, framework="pt") as file:
        for name in fit.fitting:
            state[name].copy_(file.get_tensor(name))
    return fit


def warm_start(module: nn.Module, path: Path, *, digest: str, world: World) -> None:
    """Copy the fitting tensors of the file into the whole model, before any strategy changes it. Collective.

    NoValidCheckpoint if the file is not the one whose `digest` is part of the run's identity. Rank 0 logs what does not fit.
    """
    for fault in world.agreement.gather(_file_fault(path, digest) if world.local_rank == 0 else ""):
        if fault:
            raise NoValidCheckpoint(f"model.init_from: {path} {fault}")
    try:
        fit = load_file(path, module)
    except Invalid as error:  # on this rank only, a moment after it was read: nothing to agree on
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
