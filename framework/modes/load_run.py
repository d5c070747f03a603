"""A run's model with the weights of one of its checkpoints: whole, before any strategy takes it apart."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from framework.build import components
from framework.checkpoint.canonical import load_evaluated
from framework.checkpoint.manifest import step_of
from framework.checkpoint.plain import Invalid
from framework.checkpoint.store import CheckpointStore
from framework.checkpoint.weights import load_file
from framework.distributed.world import World
from framework.modes.checkpoint_choice import place_of
from framework.modules.structure import switch_off_dropout
from framework.optim.precision import PRECISIONS
from framework.runs.directory import RunDirectory
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.log import LOGGER


class Restored(NamedTuple):
    """A model as training evaluates it (with the average of the weights, if the run has one), and what it came from."""

    module: nn.Module
    path: Path
    step: int | None  # None: the file does not say


def restored(config: dict[str, Any], *, world: World) -> Restored:
    """Build the run's model and load what `run.checkpoint` names. Collective: the ranks share the work of verifying it.

    NoValidCheckpoint if it is damaged, or not of this model.
    """
    directory = RunDirectory(Path(config["run"]["dir"]))
    module = components.model(config).to(PRECISIONS[config["precision"]["name"]].parameters)
    switch_off_dropout(module)
    path = place_of(config["run"]["checkpoint"], directory=directory)
    if path is not None and step_of(path) is None:
        _all_well(_load_final(path, module), path, world=world)
        step = directory.read_summary().get("step") if path == directory.weights else None
        return Restored(module, path, step)
    path = _verified(config, path, directory=directory, world=world)
    _all_well(_load(path, module), path, world=world)
    return Restored(module, path, step_of(path))


def _verified(config: dict[str, Any], path: Path | None, *, directory: RunDirectory, world: World) -> Path:
    """Return the checkpoint that was asked for, having verified it. Collective."""
    store = CheckpointStore(
        directory.checkpoints, world=world, keep_last=1, keep_best=0, mode=config["checkpoint"]["mode"]
    )
    if path is None and config["run"]["checkpoint"] == "best":
        path = store.best()
        if path is None:
            raise NoValidCheckpoint(f"{store.directory} has no checkpoint of an evaluated step")
        if world.rank == 0:
            _warn_if_not_best(path, config["checkpoint"]["monitor"], directory)
    if path is not None:
        return store.named(path)[0]
    found = store.newest_valid()
    if found is None:
        raise NoValidCheckpoint(f"{store.directory} has no checkpoint")
    return found[0]


def _warn_if_not_best(path: Path, monitor: str, directory: RunDirectory) -> None:
    rows = directory.read_summary().get("metrics", {}).get(monitor.partition("/")[0], {})
    step = rows.get("best", {}).get("step")
    if step != step_of(path):
        LOGGER.warning("the best %s was that of step %s, of which there is no checkpoint any more (checkpoint.keep_best "
                       "keeps it): this is the best of those there are", monitor, step)  # fmt: skip


def _load(path: Path, module: nn.Module) -> str:
    """Return why a verified checkpoint could not be loaded, or an empty string."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        load_evaluated(path, module=module)
    except ValueError as error:
        return f"does not fit this run: {error}"
    except (OSError, SafetensorError, CheckpointException):
        gone = "the run goes on, and has deleted it meanwhile: give the command again"
        return gone if not path.exists() else "could not be read"
    return ""


def _load_final(path: Path, module: nn.Module) -> str:
    try:
        fit = load_file(path, module)
    except Invalid as error:
        return str(error)
    return f"does not fit this run: {'; '.join(fit.faults)}" if fit.faults else ""


def _all_well(fault: str, path: Path, *, world: World) -> None:
    for fault in world.gather(fault):
        if fault:
            raise NoValidCheckpoint(f"{path}: {fault}")
