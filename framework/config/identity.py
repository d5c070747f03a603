"""The identity of a run: a hash of all parts of its configuration that decide what is computed."""

from collections.abc import Iterable
from typing import Any

from framework.config.frozen_file import digest_of
from framework.config.init_from import init_identity
from framework.config.renamed import first_target

# Keys that decide how or where a run is executed, not what it computes. They are not part of its identity.
EXECUTION = (
    "launch", "logger", "device", "backend", "run", "mode", "eval", "export", "predict", "bench", "report", "hydra", "name",
    "rehearse", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.async_save",
    "checkpoint.max_failures",
    "dataset.num_workers", "dataset.source", "trainer.profile", "model.parts.blocks", "model.parts.tensor_plan",
    "model.parts.experts", "parallel.balance", "parallel.prefetch", "trainer.activation_offload",
)  # fmt: skip

# null is the behaviour of a run from before these keys existed
_LATER = ("trainer.limit_batches", "trainer.overfit_batches", "dataset.tokenizer", "optimizer.iteration",
          "trainer.deterministic", "trainer.channels_last", "parallel.send_dtype", "parallel.attention", "parallel.hook",
          "parallel.reduce_every", "parallel.drain_every")  # fmt: skip


def identity(config: dict[str, Any]) -> str:
    """Return the run's id: 12 hexadecimal digits, a hash of all keys that decide what is computed.

    The files of `model.init_from` count by their content, not by their paths.
    """
    kept = {key: value for key, value in flat(config).items() if not is_below(key, EXECUTION)}
    kept |= {key: first_target(value) for key, value in kept.items() if key.endswith("._target_") and isinstance(value, str)}
    kept = {key: value for key, value in kept.items() if value is not None or key not in _LATER}
    for mode in {"checkpoint.mode", "trainer.early_stopping.mode"} & kept.keys():
        kept[mode] = kept[mode] or "min"  # in earlier versions, null meant min
    if kept.get("parallel.sequence", True) is None:
        kept["parallel.sequence"] = False  # an earlier default: it decides where tokens are, but changes no number
    init_from = kept.pop("model.init_from", None)
    if init_from is not None:
        kept["model.init_from"] = init_identity(init_from)
    return digest_of(kept)[:12]


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `sections`, or is inside one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by their dotted keys. A list counts as one value."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            # lr=1 and lr=1.0 are the same command
            values[f"{prefix}{key}"] = int(value) if isinstance(value, float) and value.is_integer() else value
    return values
