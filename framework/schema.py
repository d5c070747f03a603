"""The typed schema of the configuration: what a key may hold, checked without importing torch."""

import ast
import difflib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the configuration, in the one line that the user sees."""

    key: str
    what: str
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f" ({self.expected})" if self.expected else "")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EarlyStopping(Section):
    patience: int | None
    monitor: str
    mode: Literal["min", "max"]
    min_delta: float


class Trainer(Section):
    max_steps: int | None
    max_epochs: int | None
    eval_every: int | None
    log_every: int
    clip_grad_norm: float | None
    compile: bool
    activation_checkpointing: bool
    ema_decay: float | None
    early_stopping: EarlyStopping


class Checkpoint(Section):
    every: int | None
    keep_last: int
    keep_best: int
    monitor: str
    mode: Literal["min", "max"]
    async_save: Literal[False]


class Run(Section):
    root: str
    resume: str
    id: str
    dir: str


class Launch(Section):
    kind: Literal["local"]
    nproc_per_node: int | None
    nnodes: int | str
    max_restarts: int
    timeout_s: float


class Named(Section):
    name: str


Component = dict[str, Any]


class Config(Section):
    """The root. The component groups are checked against their `_target_`'s signature (`component_problems`)."""

    name: str
    mode: Literal["train"]
    seed: int
    global_batch_size: int
    micro_batch_size: int | None
    drop_last: bool
    invariance: Literal["samples"]
    trainer: Trainer
    checkpoint: Checkpoint
    run: Run
    launch: Launch
    backend: Named
    precision: Named
    model: Component
    dataset: Component
    task: Component
    parallel: Component
    optimizer: Component
    scheduler: Component
    logger: dict[str, Component]


COMPONENTS = ("model", "dataset", "task", "parallel", "optimizer", "scheduler")
MESH_AXES = ("replicate", "shard", "tensor", "pipeline", "context")

# One idea, one word: so a word carries its range, in whichever group it stands. (name, least, most); the
# bounds are included unless marked with a tilde. `num_*` and `*_size` are sizes wherever no row says otherwise.
_AT_LEAST_ONE = (
    "dim depth patch_size image_size in_channels channels vocab_size seq_len max_steps max_epochs eval_every "
    "log_every every keep_last patience nproc_per_node hidden " + " ".join(MESH_AXES)
).split()
_AT_LEAST_ZERO = (
    "seed num_workers num_val keep_best weight_decay adamw_weight_decay warmup_steps decay_steps min_delta "
    "max_restarts milestones padding noise"
).split()
_ABOVE_ZERO = "lr adamw_lr eps adamw_eps clip_grad_norm timeout_s bucket_cap_mb rope_theta mlp_ratio max_bytes".split()
_FRACTION = "min_lr_ratio gamma val_fraction test_fraction".split()
_BELOW_ONE = "dropout momentum betas adamw_betas label_smoothing".split()


@dataclass(frozen=True)
class Range:
    text: str
    least: float
    most: float = float("inf")
    open_left: bool = False
    open_right: bool = False

    def holds(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(self.holds(item) for item in value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True  # the type is somebody else's business
        above = value > self.least if self.open_left else value >= self.least
        below = value < self.most if self.open_right else value <= self.most
        return above and below and value not in (float("inf"), float("-inf"))


def range_of(name: str) -> Range | None:
    """Return the range of the word `name`, or None where any value will do."""
    if name in _AT_LEAST_ZERO:
        return Range("at least 0", 0)
    if name in _ABOVE_ZERO:
        return Range("above 0", 0, open_left=True)
    if name in _FRACTION:
        return Range("from 0 to 1", 0, 1)
    if name in _BELOW_ONE:
        return Range("at least 0 and below 1", 0, 1, open_right=True)
    if name == "ema_decay":
        return Range("above 0 and below 1", 0, 1, open_left=True, open_right=True)
    if name in _AT_LEAST_ONE or name.startswith("num_") or name.endswith("_size"):
        return Range("at least 1", 1)
    return None


@dataclass(frozen=True)
class Argument:
    """One keyword-only argument of a component: what the user may set."""

    annotation: Any
    required: bool


@cache
def _definition(target: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Find the class or function `package.module.Name` in its source, without running it."""
    module, _, name = target.rpartition(".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    return None


def arguments_of(target: str) -> dict[str, Argument] | None:
    """Return the keyword-only arguments of the dotted path `target`, read from its source; None if there is no such thing.

    Reading instead of importing keeps a configuration error at a second: most targets import torch. What a
    component takes by position, or with a type that is not plain data, is the framework's to give, not the user's.
    """
    node = _definition(target)
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if node is None:
            return {}
    if node is None:
        return None
    arguments = {}
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        annotation = _plain_type(argument.annotation)
        if annotation is not None:
            arguments[argument.arg] = Argument(annotation=annotation, required=default is None)
    return arguments


_PLAIN = {t.__name__: t for t in (int, float, bool, str, list, dict)} | {"Literal": Literal}


def _plain_type(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return eval(compile(ast.Expression(node), "annotation", "eval"), {"__builtins__": {}}, dict(_PLAIN))
    except (NameError, TypeError, AttributeError, SyntaxError):
        return None


def component_problems(group: str, node: dict[str, Any]) -> list[Problem]:
    """Check one component's node against the signature of its `_target_`."""
    target = node.get("_target_")
    if not isinstance(target, str):
        return [Problem(f"{group}._target_", "is missing", "the dotted path of a class or function")]
    arguments = arguments_of(target)
    if arguments is None:
        return [Problem(f"{group}._target_", f"nothing at {target!r}", "the dotted path of a class or function")]
    fields: dict[str, Any] = {n: (a.annotation, ... if a.required else None) for n, a in arguments.items()}
    values = {key: value for key, value in node.items() if key != "_target_"}
    if group == "model":  # null means "from the data", which `build.complete_model` judges
        fields = {name: (annotation, None) for name, (annotation, _) in fields.items()}
        values = {key: value for key, value in values.items() if value is not None or key not in fields}
    model = create_model(group, __config__=ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields)
    return _pydantic_problems(model, values, prefix=f"{group}.", known=[f"{group}.{n}" for n in arguments])


def _pydantic_problems(model: type[BaseModel], values: Any, *, prefix: str, known: list[str]) -> list[Problem]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        merged: dict[str, Problem] = {}
        for item in error.errors():
            problem = _problem(item, prefix=prefix, known=known)
            merged.setdefault(problem.key, problem)  # a union reports each of its members: the first will do
        return list(merged.values())
    return []


def _problem(item: Any, *, prefix: str, known: list[str]) -> Problem:
    location = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        key = prefix + ".".join(location)
        return Problem(key, "unknown key", did_you_mean(key, known) or "see python train.py --cfg job")
    # below a key, pydantic names list positions and union members: neither is a key of the configuration
    path = prefix + location[0]
    for part in location[1:]:
        if f"{path}.{part}" not in known:
            break
        path = f"{path}.{part}"
    if item["type"] == "missing":
        return Problem(path, "is missing", "give it a value")
    expected = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    if item["type"] == "literal_error":
        options = [o.strip("'") for o in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        expected = "one of " + ", ".join(options) if len(options) > 1 else f"only {options[0]} in this version"
        expected += "; " + close if (close := did_you_mean(str(item["input"]), options)) else ""
    return Problem(path, f"{item['input']!r} is not valid", expected.replace("dictionary", "group of keys"))


def did_you_mean(word: str, choices: list[str]) -> str:
    """Return `did you mean X?`, X being the nearest of `choices`, or an empty string if nothing is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.75)
    if not close:  # the right word in the wrong place, or without its group
        last = [choice.rpartition(".")[2] for choice in choices]
        near = difflib.get_close_matches(word.rpartition(".")[2], last, n=1, cutoff=0.6)
        close = [choices[last.index(near[0])]] if near else []
    return f"did you mean {close[0]}?" if close else ""


def known_keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Return every dotted key of `config`."""
    keys = []
    for key, value in config.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += known_keys(value, prefix + key + ".")
    return keys


def schema_problems(config: dict[str, Any]) -> list[Problem]:
    """Return every unknown key, wrong type and value out of its range in the composed, resolved `config`."""
    known = [f"{key}" for key in _schema_keys(Config)]
    known += [f"{group}.{name}" for group in COMPONENTS if isinstance(config.get(group), dict)
              for name in arguments_of(str(config[group].get("_target_"))) or {}]
    problems = _pydantic_problems(Config, config, prefix="", known=known)
    for group in COMPONENTS:
        if isinstance(config.get(group), dict):
            problems += component_problems(group, config[group])
    for name, node in (config.get("logger") or {}).items():
        if isinstance(node, dict):
            problems += component_problems(f"logger.{name}", node)
    wrong = {problem.key for problem in problems}
    return problems + [problem for problem in _range_problems(config) if problem.key not in wrong]


def _schema_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _schema_keys(field.annotation, prefix + name + ".")
    return keys


def _range_problems(config: dict[str, Any], prefix: str = "") -> list[Problem]:
    problems = []
    for key, value in config.items():
        if isinstance(value, dict):
            problems += _range_problems(value, f"{prefix}{key}.")
        elif (allowed := range_of(key)) is not None and not allowed.holds(value):
            problems.append(Problem(prefix + key, f"{value} is out of range", allowed.text))
    return problems
