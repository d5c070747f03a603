"""What `configure_callbacks` of a LightningModule returns, as keys of this framework."""

from collections.abc import Mapping, Sequence
from typing import Any

from extras.from_lightning.packages import is_of_lightning

_EVERY_RUN_DOES = {  # and it changes nothing of what a run computes
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
            wanted = _stopping(callback)
            other = [f"trainer.early_stopping.{key}={wanted[key]}" for key in wanted if early_stopping[key] != wanted[key]]
            if odd := [key for key in ("stopping_threshold", "divergence_threshold") if getattr(callback, key) is not None]:
                return f"EarlyStopping with {odd[0]} (self.trainer.should_stop = True in on_validation_epoch_end)"
            if other:
                return f"EarlyStopping, which is a key of this framework ({' '.join(other)})"
        elif name not in ("ModelCheckpoint", *_EVERY_RUN_DOES):
            return f"{type(callback).__name__}, which this framework does not call ({_KEYS.get(name, _OWN)})"
    return ""


def _name(callback: Any) -> str:
    """Return the name of a callback of Lightning; of another, an empty text."""
    return type(callback).__name__ if is_of_lightning(type(callback)) else ""


def _stopping(callback: Any) -> dict[str, Any]:
    return {
        "patience": callback.patience,
        "monitor": _column(callback.monitor),
        "mode": callback.mode,
        "min_delta": abs(callback.min_delta),
    }


def _column(monitor: str) -> str:
    return f"val/{monitor.removeprefix('val/')}"


def remark(module: Any) -> str:
    """Return a remark on the callbacks that have keys which compute nothing, or an empty text."""
    for callback in callbacks_of(module):
        if _name(callback) == "ModelCheckpoint" and callback.monitor is not None:
            keep = max(1, callback.save_top_k)
            keys = f"checkpoint.monitor={_column(callback.monitor)} checkpoint.mode={callback.mode} checkpoint.keep_best={keep}"
            return f"configure_callbacks returns ModelCheckpoint, but keys say which checkpoints are kept ({keys})"
    return ""
