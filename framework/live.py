"""Objects of a program or a notebook as the components of a draft: `run(model=net, dataset=data, task=loss, ...)`."""

import copy
import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from framework.runtime.problem import Problem
from framework.runtime.program import typed_override

_SPLITS = ("train", "val", "test")
_HELD: dict[str, Any] = {}  # the objects of the last call that has some


def words_of(given: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
    """Return the overrides for keyword arguments, and hold those that are objects for the functions below."""
    words, problems, held = list[str](), list[Problem](), dict[str, Any]()
    for key, value in given.items():
        if _is_plain(value):
            words += _overrides(key, value)
        elif key == "dataset":
            words += _of_data(value, held)
        elif key in ("model", "task", "optimizer"):
            held[key] = value
            words.append(f"{key}._target_={__name__}.held_{key}")
        else:
            what = f"a {type(value).__name__} is not a value of this key"
            problems.append(Problem(key, what, "an object can be a model, a dataset, a task or an optimizer"))
    if held:
        _HELD.clear()
        _HELD.update(held)
        words.append("draft=true")
    return words, problems


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    is_list = isinstance(value, (list, tuple)) and all(map(_is_plain, value))
    return value is None or is_list or isinstance(value, (bool, int, float, str))


def _overrides(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [word for name, item in value.items() for word in _overrides(f"{key}.{name}", item)]
    return [f"{key}={_text(value)}"]


def _text(value: Any) -> str:
    """Return a plain value in Hydra's grammar."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str):
        return shlex.split(typed_override("", value))[0][1:]
    return "{}" if isinstance(value, Mapping) else json.dumps(value)


def _of_data(data: Any, held: dict[str, Any]) -> list[str]:
    from torch import Tensor
    from torch.utils.data import TensorDataset

    from framework.data.map_style import has_index, unwrapped

    splits = data if isinstance(data, Mapping) and data.keys() <= {*_SPLITS} else {"train": data}
    if "val" in splits:  # then no share of train is left out
        splits = {"test": splits["val"], **splits}
    kinds = set()
    for split, samples in splits.items():
        is_tensors = isinstance(samples, tuple) and all(isinstance(one, Tensor) for one in samples)
        held[split] = TensorDataset(*samples) if is_tensors else samples
        kinds.add("map_style" if has_index(unwrapped(held[split], key=f"dataset.{split}")[0]) else "stream")
    return [f"dataset={max(kinds)}", *(f"dataset.{split}={{_target_: {__name__}.held_{split}}}" for split in splits)]


# --- what the configuration names


def held_model() -> Any:
    return copy.deepcopy(_held("model"))


def held_train() -> Any:
    return _held("train")


def held_val() -> Any:
    return _held("val")


def held_test() -> Any:
    return _held("test")


def held_task() -> Any:
    given = _held("task")
    return given if hasattr(given, "loss") or hasattr(given, "step") else LossFunction(given)


def held_optimizer(parameters: Iterable[Any]) -> Any:
    """Return the optimizer for these parameters: of a class or function, or like an optimizer that exists."""
    given = _held("optimizer")
    if callable(given):
        return given(parameters)
    if len(given.param_groups) > 1:
        raise ValueError(
            "optimizer: it has several groups of parameters (a function that takes the parameters; optimizer.groups)"
        )
    known = inspect.signature(type(given)).parameters
    return type(given)(parameters, **{name: value for name, value in given.defaults.items() if name in known})


class LossFunction:
    """A task of `function(outputs, targets)`: the mean loss over the samples of a batch, or a loss for each."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function

    def loss(self, outputs: Any, targets: Any) -> Any:
        from framework.modules.tensors import first_tensor

        found, tensor = self.function(outputs, targets), first_tensor(targets)
        count = len(tensor if tensor is not None else targets)
        return (found * count if found.ndim == 0 else found.reshape(count, -1).mean(1).sum()), count

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {}


def _held(name: str) -> Any:
    if name not in _HELD:
        raise ValueError("was an object of a program, and exists only there (the weights are in the run's model.safetensors)")
    return _HELD[name]
