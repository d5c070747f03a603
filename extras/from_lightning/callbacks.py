"""The callbacks of Lightning as keys of this framework."""

from collections.abc import Mapping, Sequence
from typing import Any

from extras.from_lightning.packages import is_of_lightning

EVERY_RUN_DOES = {  # and it changes nothing of what a run computes
    "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor", "ModelSummary", "RichModelSummary", "ProgressBar",
    "TQDMProgressBar", "RichProgressBar", "OnExceptionCheckpoint",
}  # fmt: skip
_KEYS = {
    "StochasticWeightAveraging": "part=swa",
    "WeightAveraging": "trainer.ema_decay, part=swa",
    "EMAWeightAveraging": "trainer.ema_decay",
    "GradientAccumulationScheduler": "part=batch_warmup",
    "Timer": "trainer.max_steps",
    "BatchSizeFinder": "micro_batch_size=auto",
    "LearningRateFinder": "a sweep of the rate",
    "BackboneFinetuning": "part=unfreeze",
}
_OWN = "its methods as hooks of the module, or a part of the loop: docs/training.md"


def callbacks_of(module: Any) -> Sequence[Any]:
    found = module.configure_callbacks()
    return found if isinstance(found, Sequence) else [found]


def refusal(module: Any, *, early_stopping: Mapping[str, Any]) -> str:
    """Return why a run with these `trainer.early_stopping` does not do what a module's callbacks do, or an empty text."""
    for callback in callbacks_of(module):
        name = _name(callback)
        if name == "EarlyStopping":
            wanted = stopping_of(callback)
            other = [f"trainer.early_stopping.{key}={wanted[key]}" for key in wanted if early_stopping[key] != wanted[key]]
            if odd := [key for key in ("stopping_threshold", "divergence_threshold") if getattr(callback, key) is not None]:
                return f"EarlyStopping with {odd[0]} (self.trainer.should_stop = True in on_validation_epoch_end)"
            if other:
                return f"EarlyStopping, which is a key of this framework ({' '.join(other)})"
        elif name not in ("ModelCheckpoint", *EVERY_RUN_DOES):
            return f"{type(callback).__name__}, which this framework does not call ({instead_of(name)})"
    return ""


def _name(callback: Any) -> str:
    """Return the name of a callback of Lightning; of another, an empty text."""
    return type(callback).__name__ if is_of_lightning(type(callback)) else ""


def instead_of(name: str) -> str:
    """Return what to do here instead of a callback with this name."""
    return _KEYS.get(name, _OWN)


def stopping_of(callback: Any) -> dict[str, Any]:
    """Return the values of `trainer.early_stopping` for an EarlyStopping."""
    return {
        "patience": callback.patience,
        "monitor": column(callback.monitor),
        "mode": callback.mode,
        "min_delta": abs(callback.min_delta),
    }


def best_of(callback: Any) -> dict[str, Any]:
    """Return the values of `checkpoint` for a ModelCheckpoint with a monitor."""
    return {"monitor": column(callback.monitor), "mode": callback.mode, "keep_best": max(1, callback.save_top_k)}


def column(monitor: str) -> str:
    """Return our name of the column that a module logs under a name."""
    return monitor if monitor.startswith("train/") else f"val/{monitor.removeprefix('val/')}"


def remark(module: Any) -> str:
    """Return a remark on the callbacks that have keys which compute nothing, or an empty text."""
    for callback in callbacks_of(module):
        if _name(callback) == "ModelCheckpoint" and callback.monitor is not None:
            keys = " ".join(f"checkpoint.{key}={value}" for key, value in best_of(callback).items())
            return f"configure_callbacks returns ModelCheckpoint, but keys say which checkpoints are kept ({keys})"
    return ""
