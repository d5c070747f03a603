"""Which range a number may come from. One idea, one word: so a word carries its range, in whichever group it stands."""

import math
from dataclasses import dataclass
from typing import Any

from framework.distributed.mesh import MESH_AXES
from framework.runtime.problem import Problem, shown

_AT_LEAST_ONE = (
    "dim depth patch_size image_size in_channels channels vocab_size seq_len max_steps max_epochs eval_every "
    "log_every every sync_every keep_last back limit patience nproc_per_node hidden n_trials "
    "time_min cpus_per_task gpus_per_node signal_s array_parallelism " + " ".join(MESH_AXES)
).split()
_AT_LEAST_ZERO = (
    "seed num_workers keep_best weight_decay adamw_weight_decay warmup_steps decay_steps min_delta "
    "max_restarts max_failures sync_first milestones padding noise decode_once_gib"
).split()
_ABOVE_ZERO = "memory_gib mem_gb lr adamw_lr eps adamw_eps clip_grad_norm clip_grad_value eta timeout_s grace_s bucket_cap_mb rope_theta mlp_ratio max_bytes bytes_per_token".split()
_FRACTION = "min_lr_ratio gamma val_fraction test_fraction".split()
_BELOW_ONE = "dropout momentum betas adamw_betas label_smoothing".split()
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """An interval; its ends are in it unless they are open."""

    text: str
    least: float
    most: float = math.inf
    open_left: bool = False
    open_right: bool = False

    def holds(self, value: int | float) -> bool:
        above = value > self.least if self.open_left else value >= self.least
        return above and (value < self.most if self.open_right else value <= self.most)


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
    if name == "n_jobs":
        return Range("at least 1, or -1 for one each CPU", -1)
    if name == "ema_decay":
        return Range("above 0 and below 1", 0, 1, open_left=True, open_right=True)
    if name in _AT_LEAST_ONE or name.startswith("num_") or name.endswith("_size"):
        return Range("at least 1", 1)
    return None


def range_problems(config: dict[str, Any], prefix: str = "") -> list[Problem]:
    """Return every number in `config` that is out of its word's range, not finite, or beyond 64 bits."""
    problems = []
    for key, value in config.items():
        if isinstance(value, dict):
            problems += range_problems(value, f"{prefix}{key}.")
        elif expected := _expected(key, value if isinstance(value, list) else [value]):
            problems.append(Problem(prefix + key, f"{shown(value)} is out of range", expected))
    return problems


def _expected(name: str, values: list[Any]) -> str:
    """Return which range `values` miss, or an empty string. Their types are somebody else's business."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    allowed = range_of(name)
    if allowed is not None and not all(n != n or allowed.holds(n) for n in numbers):
        return allowed.text
    if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
        return "a finite number" + (f" {allowed.text}" if allowed else "")
    if any(abs(n) > _LARGEST for n in numbers if isinstance(n, int)):
        return f"at most {_LARGEST}, which is what 64 bits hold"
    return ""
