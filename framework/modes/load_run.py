"""A run's model with the weights of one of its checkpoints, complete, before a strategy cuts it."""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from torch import nn

from framework.build.training import Builder
from framework.checkpoint.canonical import load_evaluated
from framework.checkpoint.manifest import read_state, step_of
from framework.checkpoint.plain_state import set_extra_state
from framework.checkpoint.state import stored_plain_state
from framework.checkpoint.weights import load_file
from framework.config.frozen_file import digest_of, recall
from framework.modules.structure import switch_off_dropout
from framework.runs.metrics_file import best_of_monitor
from framework.runs.provenance import Provenance
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.log import LOGGER
from framework.runtime.plain import Invalid


class LoadedModel(NamedTuple):
    """A model as training evaluates it (with the average of the weights, if the run has one), and its checkpoint."""

    module: nn.Module
    path: Path
    step: int | None  # None: the file does not contain it

    def facts(self, build: Builder) -> dict[str, str]:
        """Return what the metadata of a file from this model says about its origin."""
        digest = digest_of(recall(build.directory.path))
        return {"run_id": build.config.run.id, "config_hash": digest, "step": str(self.step)}


def load_run(build: Builder) -> LoadedModel:
    """Build the run's model and load the checkpoint that `run.checkpoint` names. Collective: the ranks verify it together.

    NoValidCheckpoint if it is damaged, or from another model.
    """
    directory, world = build.directory, build.world
    if world.rank == 0 and (lines := Provenance(directory.path).changes()):
        LOGGER.warning("the code has changed since the run's last start: %s", "; ".join(lines))
    module = build.model()
    switch_off_dropout(module)
    path = directory.checkpoint_path(build.config.run.checkpoint)
    if path is None or step_of(path) is not None:
        path = _verified(path, build)
    fault, step = _load(path, module), step_of(path)
    if path == directory.weights:
        step = directory.read_summary().get("step")
    for found in filter(None, world.agreement.distinct(fault).values()):
        raise NoValidCheckpoint(f"{path}: {found}")
    return LoadedModel(module, path, step)


def _verified(path: Path | None, build: Builder) -> Path:
    """Verify the requested checkpoint and return its path. Collective."""
    store = build.store()
    if path is None and build.config.run.checkpoint == "best":
        path, monitor = store.best(), build.config.checkpoint.monitor
        if path is None:
            raise NoValidCheckpoint(f"{store.directory} has no checkpoint of an evaluated step")
        _, step = best_of_monitor(build.directory.read_summary())
        if build.world.rank == 0 and step != step_of(path):
            LOGGER.warning("the best %s was at step %s, of which this run has no checkpoint (checkpoint.keep_best keeps it, in "
                           "the run that has taken the step): this is the best that is here", monitor, step)  # fmt: skip
    if path is not None:
        return store.named(path)[0]
    if (found := store.newest_valid()) is None:
        raise NoValidCheckpoint(f"{store.directory} has no checkpoint")
    return found[0]


def _load(path: Path, module: nn.Module) -> str:
    """Load a checkpoint, or a file of weights. Return why this is not possible, or an empty text."""
    is_file = step_of(path) is None
    try:
        if is_file:
            fit = load_file(path, module)
            return f"does not fit this run: {'; '.join(fit.faults)}" if fit.faults else ""
        load_evaluated(path, module=module)
        set_extra_state(module, stored_plain_state(read_state(path)).extra)
    except ValueError as error:
        return f"does not fit this run: {error}"
    except (OSError, SafetensorError, Invalid) as error:
        gone = "the active run has deleted it meanwhile: give the command again"
        return str(error) if is_file else gone if not path.exists() else "could not be read"
    return ""
