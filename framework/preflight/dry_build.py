"""Building the model and the optimizer for nothing, to find what only they know to be wrong, before the run starts."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.build import components
from framework.checkpoint.header import read_header
from framework.config.modes import MODES
from framework.distributed.mesh import MESH_AXES, resolve_axes
from framework.preflight.check import from_error
from framework.preflight.processes import most_processes
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

Config = dict[str, Any]


def try_out(config: Config) -> list[Problem]:
    """Build the model (without storage) and the optimizer, and run a batch's shape through, for what only they know.

    Imports torch, and what its optimizers import at their first step.
    """
    import torch

    from framework.modules.freeze_parameters import freeze
    from framework.modules.structure import switch_off_dropout
    from framework.optim.optimizers import hidden_matrices, trainable

    try:
        with torch.device("meta"):
            model = components.model(config)
    except Exception as error:
        return [from_error("model", error)]
    if config["mode"] in MODES:
        switch_off_dropout(model)
    if problems := _check_init(model, config["model"].get("init_from")):
        return problems
    try:
        freeze(model, config["trainer"]["freeze"])
    except ValueError as error:
        return [Problem("trainer.freeze", str(error))]
    try:
        components.component(config["optimizer"])(trainable(model, hidden=hidden_matrices(model)))
    except Exception as error:
        return [from_error("optimizer", error)]
    return _check_strategy(model, config) or _check_forward(model, components.example(components.dataset(config).info))


def _check_init(model: "nn.Module", init_from: str | None) -> list[Problem]:
    """Refuse a file to begin with of which nothing fits."""
    from framework.checkpoint.weights import Fit

    fit = Fit.of(read_header(Path(init_from)), model) if init_from else None
    if fit is None or fit.fitting:
        return []
    return [Problem("model.init_from", f"nothing in {init_from} fits this model", "; ".join(fit.faults))]


def _check_strategy(model: "nn.Module", config: Config) -> list[Problem]:
    """Ask the strategy's module, if it has a function `problems`, whether it can run this model."""
    module = importlib.import_module(config["parallel"]["_target_"].rpartition(".")[0])
    if config["invariance"] == "bitwise" and not hasattr(module, "invariant"):
        what = "bitwise, but this strategy sums in an order of its own collectives"
        return [Problem("invariance", what, "parallel=single, ddp or zero, or invariance=samples")]
    if not hasattr(module, "problems"):
        return []
    options = {name: value for name, value in config["parallel"].items() if name != "_target_"}
    axes = {name: options[name] for name in MESH_AXES if name in options}
    options |= resolve_axes(axes, world_size=most_processes(config) or 1)
    return [from_error("parallel", ValueError(line)) for line in module.problems(model, **options)]


def _check_forward(model: "nn.Module", batch: "Tensor | None") -> list[Problem]:
    """Refuse a model that cannot take a batch of this data: shapes alone, no number is computed."""
    import torch

    if batch is None:
        return []
    try:
        with torch.no_grad(), torch.device("meta"):
            model.eval()(batch)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, NotImplementedError) or "meta" in text:  # it asks for numbers, not only for shapes
            return []
        what = f"does not take a batch of shape {list(batch.shape)} of this dataset"
        return [Problem("model", what, f"{text[:200]}; choose another model or dataset")]
    return []
