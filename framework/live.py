"""Objects of a program or a notebook as the components of a draft: `run(model=net, dataset=data, task=loss, ...)`."""

import copy
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from framework.config.targets import TOTALS
from framework.runtime.log import LOGGER
from framework.runtime.problem import Problem
from framework.runtime.program import typed_override

_HELD: dict[str, Any] = {}  # the objects of the last call that has some
_OTHER_NAMES = {"validation": "val"}  # of splits


def words_of(given: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
    """Return the overrides for keyword arguments, and hold those that are objects for the functions below."""
    words, problems, held = list[str](), list[Problem](), dict[str, Any]()
    for key, value in given.items():
        try:
            if _is_plain(value):
                words += _overrides(key, value)
            elif key == "dataset":
                words += _of_data(value, held)
            elif key in ("model", "task", "optimizer", "scheduler"):
                held[key] = value
                words.append(f"{key}._target_={__name__}.held_{key}{_kind(key, value)}")
            else:
                what = f"a {type(value).__name__} is not a value of this key"
                raise ValueError(f"{what} (a model, a dataset, a task, an optimizer and a scheduler can be objects)")
            if key == "optimizer":
                _require_whole(value, given.get("model"))
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if held and not problems:
        _HELD.clear()
        _HELD.update(held)
        words.append("draft=true")
    return words, problems


def module_names(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules that define the objects among keyword arguments; a notebook's own cells are none."""
    names = set[str]()
    for value in given.values():
        if isinstance(value, Mapping):
            names |= {*module_names(value)}
        elif not _is_plain(value):
            names.add(str(getattr(getattr(value, "func", value), "__module__", None)))
    return sorted(names - {"__main__", "None"})


def _require_whole(optimizer: Any, model: Any) -> None:
    """ValueError if an optimizer that exists does not hold the parameters of the model that are trained."""
    groups, parameters = getattr(optimizer, "param_groups", None), getattr(model, "parameters", None)
    if groups is None:
        if getattr(optimizer, "args", ()):
            raise ValueError("is a partial with its parameters (without them; or the optimizer itself, with its groups)")
        return
    if len(groups) > 1 and parameters is None:
        raise ValueError("has several groups of parameters, of a model that is no object here (both as objects)")
    held = {id(one) for group in groups for one in group["params"]}
    trained = {id(one) for one in parameters() if one.requires_grad} if parameters is not None else held
    every = {id(one) for one in parameters()} if parameters is not None else held
    if getattr(optimizer, "state", None):
        LOGGER.warning(
            "optimizer: this optimizer has a state, but the run begins with a new optimizer of its class, groups and settings"
        )
    if not trained <= held <= every:
        what = f"holds {len(held)} parameters, and the model trains {len(trained)}"
        what += f" others: {len(trained - held)} are not held" if len(held) == len(trained) else ""
        raise ValueError(f"{what} (requires_grad_(False) for those that stay, and the others in the optimizer)")


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
    """Return the overrides for data, and hold each split. ValueError for what no run can read."""
    from framework.data.map_style import has_index, unwrapped

    splits = {"train": data}
    if isinstance(data, Mapping) and "train" in data:
        splits = {_OTHER_NAMES.get(name, str(name)): value for name, value in data.items()}
    if isinstance(val := splits.get("val"), Mapping):
        splits |= {"val": next(iter(val.values())), **{f"val.{name}": one for name, one in val.items()}}
    if odd := [name for name in splits if not re.fullmatch(r"train|val(\.\w+)?|test", name)]:
        raise ValueError(f"{odd[0]} is no split (train, val, test; or several in val, by name)")
    if "val" in splits:  # then no share of train is left out
        splits.setdefault("test", splits["val"])
    splits = {name: _readable(value, name) for name, value in splits.items()}
    made = {name: unwrapped(_made(value), key=name)[0] for name, value in splits.items()}
    kinds = {"map_style" if has_index(one) else "stream" for one in made.values()}
    if len(kinds) > 1:
        raise ValueError("some splits have an index, and others are streams (all of one kind)")
    held |= splits
    if any(name.startswith("val.") for name in splits):
        del splits["val"]
    nodes = {name: f"{{_target_: {__name__}.held_split, name: {name}}}" for name in splits}
    return [f"dataset={kinds.pop()}", *(f"dataset.{name}={node}" for name, node in nodes.items())]


def _readable(samples: Any, split: str) -> Any:
    import numpy as np
    from torch import Tensor, as_tensor
    from torch.utils.data import TensorDataset

    if isinstance(samples, Iterator):
        raise ValueError(f"{split} is an iterator, which can be read once (the function that makes it)")
    if not isinstance(samples, tuple) or not all(isinstance(one, (Tensor, np.ndarray)) for one in samples):
        return samples
    if len({len(one) for one in samples}) != 1:
        raise ValueError(f"{split} has tensors of {' and '.join(str(len(one)) for one in samples)} samples (the same number)")
    return TensorDataset(*map(as_tensor, samples))


def _made(samples: Any) -> Any:
    is_function = callable(samples) and not hasattr(samples, "__iter__") and not hasattr(samples, "__getitem__")
    return samples() if is_function else samples


# --- what the configuration names


def held_model() -> Any:
    return copy.deepcopy(_held("model"))


def held_split(name: str) -> Any:
    """Return a dataset or a stream; of a function, what it makes."""
    return _made(_held(name))


def held_task() -> Any:
    given = _held("task")
    return given if hasattr(given, "loss") or hasattr(given, "step") else LossFunction(given)


def held_optimizer(parameters: list[dict[str, Any]]) -> Any:
    """Return the optimizer for these groups of parameters, as a class or function makes it."""
    made = _held("optimizer")(parameters)
    known, own = ({id(one) for group in groups for one in group["params"]} for groups in (parameters, made.param_groups))
    if not own <= known:
        what = "the function returns an optimizer of parameters that it is not given"
        raise ValueError(f"{what} (those of its argument; or the optimizer itself, with its groups)")
    return made


def held_optimizer_that_exists(trained: list[Any]) -> Any:
    """Return an optimizer with the class, the groups and the settings of one that exists."""
    from framework.modules.tensors import by_mesh

    given = _held("optimizer")
    named = _HELD["model"].named_parameters() if hasattr(_HELD.get("model"), "named_parameters") else ()
    numbers = {id(one): number for number, group in enumerate(given.param_groups) for one in group["params"]}
    number_of = {name: numbers.get(id(one), 0) for name, one in named}
    groups = list[dict[str, Any]]()
    for number, group in enumerate(given.param_groups):
        mine = [item.parameter for item in trained if number_of.get(item.name, 0) == number]
        groups += [{**group, "params": members} for members in by_mesh(mine)]
    known = inspect.signature(type(given)).parameters.keys() - {"params"}
    return type(given)(groups, **{name: value for name, value in given.param_groups[0].items() if name in known})


def held_scheduler(optimizer: Any) -> Any:
    """Return the scheduler of this optimizer, as a class or function makes it."""
    return _held("scheduler")(optimizer)


def held_scheduler_of_steps(optimizer: Any, total_steps: int | None = None) -> Any:
    """Return the scheduler of a class that takes the number of its steps, or of a partial of it, which may have the number."""
    given = _held("scheduler")
    (name,) = _total_of(given)
    is_known = {name, "epochs"} & getattr(given, "keywords", {}).keys()
    return given(optimizer, **({} if is_known else {name: total_steps}))


def _total_of(scheduler: Any) -> set[str]:
    return TOTALS & inspect.signature(getattr(scheduler, "func", scheduler)).parameters.keys()


def _kind(key: str, value: Any) -> str:
    """Return the end of the name of the function that makes a held object. ValueError for a scheduler that exists."""
    if key == "scheduler" and not callable(value):
        kind = type(value).__name__
        raise ValueError(f"a {kind} has its optimizer already (a function of the optimizer: partial({kind}, ...))")
    if key == "optimizer" and not callable(value):
        return "_that_exists"
    return "_of_steps" if key == "scheduler" and _total_of(value) else ""


class LossFunction:
    """A task of `function(outputs, targets)`: the mean loss over the samples of a batch, or a loss for each."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        own_state = [*getattr(function, "buffers", list)()] and not type(function).__module__.startswith("torch.")
        self.function, self._is_checked = function, bool(own_state)  # which two more calls would change

    def loss(self, outputs: Any, targets: Any) -> Any:
        from framework.modules.tensors import first_tensor

        found, tensor = self.function(outputs, targets), first_tensor(targets)
        count = len(tensor if tensor is not None else targets)
        if found.ndim:
            return found.reshape(count, -1).mean(1).sum(), count
        if not self._is_checked and count > 1:
            self._is_checked = True
            self._look_at_halves(outputs, targets, count, found)
        return found * count, count

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {}

    def _look_at_halves(self, outputs: Any, targets: Any, count: int, whole: Any) -> None:
        """Warn of a loss that is no mean over the samples: its gradients depend on how a step is cut."""
        from framework.modules.tensors import map_tensors

        def loss_of(part: slice) -> float:
            cut = (map_tensors(lambda one: one.detach()[part] if len(one) == count else one, tree) for tree in both)
            return float(self.function(*cut)) * len(range(count)[part])

        both, expected = (outputs, targets), float(whole.detach()) * count
        if abs(loss_of(slice(0, count // 2)) + loss_of(slice(count // 2, count)) - expected) > 1e-3 * abs(expected):
            what = "it depends on how a step is cut into micro-batches and processes (reduction='mean'; or a task of your own)"
            LOGGER.warning("task: the loss of a batch is not the mean of its samples' losses: %s", what)


def _held(name: str) -> Any:
    if name not in _HELD:
        raise ValueError("was an object of a program, and exists only there (the weights are in the run's model.safetensors)")
    return _HELD[name]
