"""Safetensors files of weights: the final weights of a run, or the initial weights of another run, and how they fit a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from framework.checkpoint.file_tensors import NUM_LISTED, listed, stored_tensors, tensors_of
from framework.checkpoint.format import FileTensor
from framework.checkpoint.plain_state import set_extra_state
from framework.config.init_from import InitFile
from framework.distributed.world import World
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.files import checksum
from framework.runtime.log import LOGGER
from framework.runtime.plain import Invalid, parse_json

EXTRA_STATE = "extra_state"  # key in a file's metadata: the modules' state besides tensors, as JSON


@dataclass(frozen=True)
class Fit:
    """The tensors of files that fit a model. A tied weight has several names in a model; a file needs only one of them."""

    fitting: list[str]
    faults: list[str]  # what does not fit, one line each
    misplaced: list[str]  # the names that must fit and do not fit

    @classmethod
    def of(cls, tensors: Mapping[str, FileTensor], module: nn.Module) -> "Fit":
        """Compare names, shapes and kinds of number. The model's tensors need no storage."""
        state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        both = [name for name in state if name in tensors]
        held = {id(state[name]) for name in both}
        missing = [name for name, tensor in state.items() if id(tensor) not in held]
        fitting, differing = [], {}
        for name in both:
            entry, tensor = tensors[name], state[name]
            is_floating = entry.dtype.startswith(("F", "BF"))
            if entry.shape == list(tensor.shape) and is_floating == tensor.is_floating_point():
                fitting.append(name)
            else:
                found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                differing[name] = f"{name} ({entry.dtype} {entry.shape} in the file, {found} in the model)"
        unexpected = {name: name for name in sorted(tensors.keys() - state.keys())}
        for name in list(unexpected)[:NUM_LISTED]:  # comparing all names would take long
            near = get_close_matches(name, missing, n=1)
            unexpected[name] = f"{name} (is it {near[0]}?)" if near else name
        lists = {"missing in the file": missing, "unexpected in the file": list(unexpected.values()),
                 "of another shape or kind": list(differing.values())}  # fmt: skip
        return cls(
            fitting=fitting,
            faults=[f"{what}: {listed(names)}" for what, names in lists.items() if names],
            misplaced=[text for name, text in (unexpected | differing).items() if tensors[name].is_strict],
        )


def load_file(path: Path, module: nn.Module) -> Fit:
    """Load a file, an index or a folder that uses the model's names. See `load_tensors`."""
    return load_tensors(tensors_of(InitFile(file=str(path))), module)


@torch.no_grad()
def load_tensors(tensors: Mapping[str, FileTensor], module: nn.Module) -> Fit:
    """Copy the fitting tensors of files into the model, in the model's dtypes. Return the fit.

    The model must be on the CPU, before any strategy changes it. Only the fitting tensors of a file are read, and none into a
    parameter without numbers, because another rank sends these.
    """
    fit, state = Fit.of(tensors, module), module.state_dict()
    for path in dict.fromkeys(stored.path for stored in tensors.values()):
        here = {name: stored for name, stored in tensors.items() if stored.path == path}
        file = safe_open(path, framework="pt")  # it closes when nothing reads from it any more
        for name in filter(here.__contains__, fit.fitting):
            if not state[name].is_meta:
                whole = file.get_tensor(here[name].name)
                state[name].copy_(whole.t() if here[name].is_transposed else whole)
        is_named_alike = all(stored.name == name for name, stored in here.items())
        if not fit.faults and is_named_alike and EXTRA_STATE in (metadata := file.metadata() or {}):
            set_extra_state(module, parse_json(metadata[EXTRA_STATE]))
    return fit


def warm_start(module: nn.Module, entries: Sequence[InitFile], *, digests: Mapping[str, str], world: World) -> None:
    """Copy the fitting tensors of the entries into the whole model, before any strategy changes it. Collective.

    Raise NoValidCheckpoint if a file does not have the digest in the run's identity. Rank 0 logs what does not fit.
    """
    own_fault = next(filter(None, map(_file_fault, digests.items())), "") if world.local_rank == 0 else ""
    for fault in filter(None, world.agreement.distinct(own_fault).values()):
        raise NoValidCheckpoint(f"model.init_from: {fault}")
    try:
        fit = load_tensors(stored_tensors(entries), module)
    except Invalid as error:  # it happens on this rank only, just after a successful read: no agreement
        raise RuntimeError(f"model.init_from: {error}") from None
    if world.rank == 0:
        LOGGER.info("model.init_from: %d of the model's %d tensors are loaded from %s", len(fit.fitting),
                    len(module.state_dict()), ", ".join(entry.file for entry in entries))  # fmt: skip
        for line in fit.faults:
            LOGGER.warning("model.init_from: %s", line)


def _file_fault(file: tuple[str, str]) -> str:
    path, digest = file
    try:
        _, actual = checksum(Path(path))
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return "" if actual == digest else f"{path} has changed since the command started; the same command starts another run"
