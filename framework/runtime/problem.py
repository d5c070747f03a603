"""A problem of a configuration, in one line for the user. Also: the missing packages of extras."""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from framework.runtime.exits import Exit, place_of
from framework.runtime.secrets import redact


@dataclass(frozen=True)
class Problem:
    """One problem of the configuration, as one line for the user. A run starts in spite of a warning."""

    key: str
    what: str
    expected: str = ""
    code: Exit = Exit.CONFIGURATION
    is_warning: bool = False

    @classmethod
    def of_line(cls, line: str) -> "Problem":
        """Return the problem that a component writes as a line: `KEY: WHAT`."""
        key, _, what = line.partition(": ")
        return cls(key, what)

    @classmethod
    def of_error(cls, group: str, error: BaseException) -> "Problem":
        """Return a component's error as a problem, under the key that it names (`seq_len=0: ...`), else under its group."""
        text = " ".join(str(error).split("\n")[0].split())
        if not text or isinstance(error, (LookupError, SystemExit)):  # the text of a KeyError is only the key
            has_place = text and not isinstance(error, SystemExit)
            text = f"{type(error).__name__}: {text}".rstrip(": ") + ("" if has_place else f", at {place_of(error)}")
        if re.match(r"[a-z]\w*(\.\w+)+: ", text):
            return cls.of_line(text)
        named = re.match(rf"(?:{group}\.)?(\w+)=(.*)", text)
        hint = ""  # YAML has neither
        if isinstance(error, AttributeError) and text.startswith("'dict' object has no attribute"):
            hint = f"{group}._convert_=none gives it DictConfigs, as hydra.utils.instantiate does; or annotate the argument so"
        elif re.search(r"'list'|\btuple\b", text):
            hint = "instead of a list [1, 2], {_target_: builtins.tuple, _args_: [[1, 2]]}; or annotate the argument so"
        return cls(f"{group}.{named[1]}", named[2]) if named else cls(group, text, hint)

    def __str__(self) -> str:
        return redact(f"{self.key}: {self.what}" + (f" ({self.expected})" if self.expected else ""))


def shown(value: Any) -> str:
    """Return a value in the form of YAML and the command line, with at most 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(shown(item) for item in value[:20]) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, int) and abs(value) >= 10**60:
        text = f"{value // 10 ** (value.bit_length() * 3 // 10 - 20)}..."  # str() fails for thousands of digits
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


_MODULES = {
    **{name: [name] for name in ("wandb", "tensorboard", "mlflow", "trackio", "clearml", "swanlab", "aim")},
    "comet": ["comet_ml"],
    "slurm": ["submitit"],
    "search": ["optuna"],
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "float8": ["torchao"],
    "metrics": ["torchmetrics"],
    "data": ["datasets", "pyarrow"],
    "object-store": ["fsspec", "s3fs"],
}


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [name for name in _MODULES[extra] if importlib.util.find_spec(name) is None]


def extra_with(module: str) -> str | None:
    """Return the extra that contains a package, or None."""
    return next((extra for extra, modules in _MODULES.items() if module in modules), None)


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'steadfast[{extra}]', or {' '.join(_MODULES[extra])}"


def missing_extra(key: str, extra: str) -> list[Problem]:
    """Return a problem of `key` if a package of its extra is not installed."""
    names = missing(extra)
    return [Problem(key, f"{' and '.join(names)} not installed", install_command(extra))] if names else []
