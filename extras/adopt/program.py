"""A Hydra program for Lightning, in the shape of lightning-hydra-template, becomes an experiment of this framework.

Source of the shape: github.com/ashleve/lightning-hydra-template. A file `configs/train.yaml` composes a LightningModule
(`model`), a LightningDataModule (`data`), the arguments of a Trainer (`trainer`), `callbacks` and `logger`.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict

from extras.from_lightning.callbacks import EVERY_RUN_DOES, best_of, column, instead_of, stopping_of

_OURS = [folder for folder in (Path(__file__).parents[2] / path for path in ("conf", "framework/conf")) if folder.is_dir()]
_PRECISIONS = {"16": "fp16", "16-true": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-true": "bf16", "bf16-mixed": "bf16",
               "32": "fp32", "32-true": "fp32", "64": "fp64", "64-true": "fp64"}  # fmt: skip
_STRATEGIES = {"ddp": "ddp", "ddp_spawn": "ddp", "ddp_fork": "ddp", "ddp_notebook": "ddp", "fsdp": "fsdp", "dp": "ddp",
               "ddp_find_unused_parameters_true": "ddp"}  # fmt: skip
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "auto": "auto"}
_LOGGERS = {"WandbLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow", "CometLogger": "comet",
            "AimLogger": "aim", "CSVLogger": ""}  # fmt: skip
_KEYS = {key: key for key in ("max_steps", "max_epochs", "overfit_batches", "deterministic", "sync_batchnorm")} | {
    "log_every_n_steps": "log_every"
}
_CHANGES_NOTHING = {  # of what a run computes
    "_target_", "default_root_dir", "enable_progress_bar", "enable_model_summary", "enable_checkpointing",
    "num_sanity_val_steps", "detect_anomaly", "profiler", "barebones", "benchmark", "inference_mode", "use_distributed_sampler",
}  # fmt: skip
_SECTIONS = {"model": "task.module", "data": "dataset.module", "datamodule": "dataset.module"}
_WRITTEN = ("val_check_interval", "check_val_every_n_epoch", "gradient_clip_val", "gradient_clip_algorithm")
_READ = (*_SECTIONS, "trainer", "callbacks", "logger", "task_name", "seed", "optimized_metric")
TRAINER = {  # Lightning's defaults
    "max_epochs": None, "max_steps": -1, "check_val_every_n_epoch": 1, "val_check_interval": 1.0, "min_epochs": 1,
    "gradient_clip_val": None, "gradient_clip_algorithm": "norm", "accumulate_grad_batches": 1, "limit_train_batches": 1.0,
    "limit_val_batches": 1.0, "limit_test_batches": 1.0, "limit_predict_batches": 1.0,
}  # fmt: skip


def experiment_of(file: Path, overrides: list[str]) -> tuple[str, str, list[str]]:
    """Compose a program's configuration. Return the name of its experiment, its file's text, and the words of its search."""
    config = _composed(file, overrides)
    values: dict[str, Any] = {"defaults": []}
    remarks: list[str] = []
    for section in filter(config.__contains__, _SECTIONS):
        group = _SECTIONS[section].partition(".")[0]
        values["defaults"].append({f"override /{group}": "lightning"})
        values[group] = {"module": _relative(config[section])}
    if "_target_" not in values.get("task", {}).get("module", {}):
        raise ValueError("the configuration has no LightningModule (a section `model` with a `_target_`)")
    data = values.get("dataset", {}).get("module", {})
    if isinstance(data.get("batch_size"), int):
        values["global_batch_size"] = data["batch_size"]
        data["batch_size"] = "${global_batch_size}"
    elif data:
        remarks.append("global_batch_size: write the batch_size of the training loader")
    values |= {key: config[name] for key, name in (("name", "task_name"), ("seed", "seed")) if name in config}
    sections: dict[str, dict[str, Any]] = {"trainer": {}, "checkpoint": {}, "launch": {}}
    remarks += trainer_keys(TRAINER | config.get("trainer", {}), values, sections)
    for name, callback in config.get("callbacks", {}).items():
        remarks += _callback(name, callback or {}, sections)
    remarks += _loggers(config.get("logger", {}), values)
    choice = config["choices"].get("experiment") or values.get("name", file.stem)
    lines = values | {name: section for name, section in sections.items() if section}
    text = "".join(["# @package _global_\n", *(f"# {remark}\n" for remark in remarks), yaml.safe_dump(lines, sort_keys=False)])
    return str(choice), text, _search(config)


def _composed(file: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the program's sections as plain data: without those of Hydra, but with its `sweeper` and `choices`."""
    project = file.absolute().parents[1]
    os.environ.setdefault("PROJECT_ROOT", str(project))  # what rootutils sets
    paths = ",".join(f"file://{folder}" for folder in _OURS)  # they have the options of Hydra's plug-ins
    with initialize_config_dir(str(file.absolute().parent), version_base=None):
        config = compose(file.stem, [f"hydra.searchpath=[{paths}]", *overrides], return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.update(output_dir=".", cwd=str(project))
    hydra: Any = HydraConfig.instance()
    before, hydra.cfg = hydra.cfg, config  # for ${hydra:runtime.cwd}
    try:
        found = {name: _plain(config[name], is_resolved=name != "logger") for name in _READ if config.get(name) is not None}
    finally:
        hydra.cfg = before
    return found | {"sweeper": _plain(config.hydra.sweeper), "choices": _plain(config.hydra.runtime.choices)}


def _plain(value: Any, *, is_resolved: bool = True) -> Any:
    return OmegaConf.to_container(value, resolve=is_resolved) if OmegaConf.is_config(value) else value


def _relative(value: Any) -> Any:
    """Return a value with the folders of the project as a path from here."""
    if isinstance(value, Mapping):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    here = f"{Path.cwd()}{os.sep}"
    return value.removeprefix(here).replace("${", "\\${") if isinstance(value, str) else value


def trainer_keys(given: Mapping[str, Any], values: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Write what the arguments of Lightning's Trainer are here. Yield a remark for each argument that has no key."""
    ours = sections["trainer"]
    if given["max_epochs"] in (None, -1):
        ours["max_epochs"] = 1000 if given["max_epochs"] is None and given["max_steps"] == -1 else None  # as in Lightning
    between, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    ours["eval_every"] = between if isinstance(between, int) else f"{between * (epochs or 1):g}ep"
    if clip := given["gradient_clip_val"]:
        ours["clip_grad_value" if given["gradient_clip_algorithm"] == "value" else "clip_grad_norm"] = clip
    num_processes = math.prod(count for name in ("devices", "num_nodes") if isinstance(count := given.get(name, 1), int))
    if num_processes > 1:
        yield f"global_batch_size: of all {num_processes} processes; Lightning's batch_size is that of one"
        given = {"strategy": "ddp", **given}
    for name, value in given.items():
        is_unset = value is None or value is False or value in (-1, "auto")
        if is_unset or name in (*_CHANGES_NOTHING, *_WRITTEN) or _is_default(name, value):
            continue
        if name == "fast_dev_run":
            ours["max_steps"] = int(value)
        elif name == "accelerator" and value in _DEVICES:
            values["device"] = _DEVICES[value]
        elif name == "precision" and str(value) in _PRECISIONS:
            values["defaults"].append({"override /precision": _PRECISIONS[str(value)]})
        elif name == "strategy" and value in _STRATEGIES:
            values["defaults"].append({"override /parallel": _STRATEGIES[value]})
        elif name in ("devices", "num_nodes") and isinstance(value, int):
            sections["launch"] |= {"nproc_per_node" if name == "devices" else "nnodes": value}
        elif name in _KEYS and isinstance(value, int):
            ours[_KEYS[name]] = value
        else:
            yield f"trainer.{name}={value} is not taken (docs/migration.md)"


def _is_default(name: str, value: Any) -> bool:
    """Return whether this is Lightning's default. (`limit_val_batches=1` is one batch, and 1.0 are all.)"""
    return name in TRAINER and (type(value), value) == (type(TRAINER[name]), TRAINER[name])


def _callback(name: str, given: Mapping[str, Any], sections: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Write what a callback of Lightning is here. Yield a remark if it has no keys."""
    kind = str(given.get("_target_", name)).rpartition(".")[2]
    if kind == "EarlyStopping":
        sections["trainer"]["early_stopping"] = stopping_of(instantiate(given))
        odd = [key for key in ("stopping_threshold", "divergence_threshold") if given.get(key) is not None]
        yield from (f"callbacks.{name}.{key} is not taken" for key in odd)
    elif kind == "ModelCheckpoint":
        callback = instantiate(given)
        sections["checkpoint"] |= best_of(callback) if callback.monitor is not None else {}
        if every := given.get("every_n_train_steps") or (f"{epochs}ep" if (epochs := given.get("every_n_epochs")) else None):
            sections["checkpoint"]["every"] = every
    elif kind not in EVERY_RUN_DOES:
        yield f"callbacks.{name}, a {kind}, is not taken ({instead_of(kind)})"


def _loggers(given: Mapping[str, Any], values: dict[str, Any]) -> Iterator[str]:
    kinds = [str(one.get("_target_", "")).rpartition(".")[2] for one in given.values()]
    yield from (f"logger: a {kind} is not taken" for kind in kinds if kind and kind not in _LOGGERS)
    if names := [name for kind in kinds if (name := _LOGGERS.get(kind))]:
        values["defaults"].append({"override /logger": names})


def _search(config: Mapping[str, Any]) -> list[str]:
    """Return the words of the same search, or an empty list."""
    sweeper = config["sweeper"]
    if not (params := sweeper.get("params")):
        return []
    words = ["-m"]
    for key, space in params.items():
        section, _, rest = key.partition(".")
        ours = f"{_SECTIONS.get(section, section)}.{rest}"
        words.append(f"{'global_batch_size' if ours == 'dataset.module.batch_size' else ours}={space}")
    if "optuna" in sweeper["_target_"]:
        words += ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={sweeper['n_trials']}"]
    if metric := config.get("optimized_metric"):
        mode = "max" if "max" in str(sweeper.get("direction")).lower() else "min"
        words += [f"checkpoint.monitor={column(metric)}", f"checkpoint.mode={mode}"]
    return words
