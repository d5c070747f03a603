"""The packages that only some configurations need: the extras, as in `pip install 'steadfast[report]'`."""

import importlib.util
import sys

from framework.runtime.problem import Problem

_MODULES = {
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "slurm": ["submitit"],
    "search": ["optuna"],
    "report": ["bokeh"],
    "export": ["onnx", "onnxscript", "onnxruntime"],
}


def missing(extra: str) -> list[str]:
    """Return which packages of an extra are not installed."""
    return [name for name in _MODULES[extra] if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def install_command(extra: str) -> str:
    """Return how to install an extra."""
    return f"pip install 'steadfast[{extra}]', or {' '.join(_MODULES[extra])}"


def missing_extra(key: str, extra: str) -> list[Problem]:
    """Return a problem of `key` if a package of its extra is not installed."""
    names = missing(extra)
    return [Problem(key, f"{' and '.join(names)} not installed", install_command(extra))] if names else []
