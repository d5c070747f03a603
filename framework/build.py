"""The composition root: the one place that turns the configuration's nodes into objects."""

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config import content_of, option_node, options
from framework.data.source import Dataset
from framework.log import LOGGER
from framework.problems import Problem
from framework.signatures import arguments_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from framework.engine import Engine, Task
    from framework.gradients import ChangeGradients
    from framework.loggers.sink import Sink
    from framework.optim import Trainable
    from framework.run_directory import RunDirectory
    from framework.speed import Speed
    from framework.trainer import Trainer
    from framework.world import World

Config = dict[str, Any]

INIT = ("init_from", "init_digest")  # of the model's node, but no arguments of the model


def component(node: Config, **given: Any) -> Any:
    """Return the node's target, with the node's values bound; `given` overrides them. Call it with what is not data.

    ValueError if it cannot be imported. Not `hydra.utils.instantiate`: its partials look their target up anew at every
    call, 0.1 ms in every step.
    """
    target = node["_target_"]
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's own module: anything can come out of it
        text = " ".join(str(error).split())
        raise ValueError(f"_target_={target} cannot be imported ({type(error).__name__}: {text})") from error
    return functools.partial(found, **{key: value for key, value in (node | given).items() if key != "_target_"})


def dataset(config: Config) -> Dataset:
    """Build the dataset. It reads no file yet; torch is not imported. ValueError for bad arguments."""
    return component(config["dataset"])()


def complete_model(config: Config, info: dict[str, int]) -> tuple[Config, list[Problem]]:
    """Take what follows from the data (`num_classes`, ...) into the model's node, where the user gave no value."""
    node, problems = dict(config["model"]), []
    node |= {name: info[name] for name in arguments_of(str(node.get("_target_"))) or {}
             if node.get(name) is None and name in info}  # fmt: skip
    fitting = ", ".join(
        f"model={name}" for name in options("model") if not _unfilled(option_node("model", name) | dict(info))
    )
    if node.get("init_from"):
        node["init_digest"] = content_of(node["init_from"])
    for name in _unfilled(node):
        problems.append(Problem(f"model.{name}", "needs a value, and the dataset does not give one",
                                f"it gives {', '.join(info) or 'nothing'}, which fits {fitting or 'no model here'}"))  # fmt: skip
    return config | {"model": node}, problems


def _unfilled(node: Config) -> list[str]:
    """Return the arguments of a model's node that are null and cannot be."""
    arguments = arguments_of(str(node.get("_target_"))) or {}
    return [n for n, a in arguments.items() if node.get(n, "") is None and a.annotation in (int, float, str, bool)]


def complete_task(config: Config, dataset: Dataset) -> Config:
    """Take what only the dataset knows (`bytes_per_token`) into the task's node, where the user gave no value."""
    node = {name: getattr(dataset, name, None) if value is None else value for name, value in config["task"].items()}
    return config | {"task": node}


def task(config: Config) -> "Task":
    return component(config["task"])()


def derived(config: Config) -> "Callable[[dict[str, float]], dict[str, float]]":
    """Return the task's function from the means over samples to the metrics that follow from them."""
    return getattr(task(config), "derived", lambda means: {})


def model(config: Config) -> "nn.Module":
    """Build the model, its weights drawn from the run's seed: the same on every rank, under every strategy."""
    import torch

    from framework.keys import key
    from framework.torchvision_import import make_torchvision_importable

    make_torchvision_importable()
    torch.manual_seed(key(config["seed"], "weights"))
    return component({name: value for name, value in config["model"].items() if name not in INIT})()


def example(info: Mapping[str, int], *, dtype: "torch.dtype | None" = None) -> "Tensor | None":
    """Return two samples' inputs, without storage, as a dataset's `info` describes them; None for data of another kind."""
    import torch

    if {"in_channels", "image_size"} <= info.keys():
        return torch.empty(2, info["in_channels"], info["image_size"], info["image_size"], dtype=dtype, device="meta")
    if {"vocab_size", "seq_len"} <= info.keys():
        return torch.empty(2, info["seq_len"], dtype=torch.long, device="meta")
    return None


def engine(config: Config, module: "nn.Module", *, world: "World") -> "Engine":
    """Put the model under the chosen precision and strategy. Collective."""
    import torch

    from framework.engine import Forward
    from framework.modules import blocks_of, chain_of, compile_blocks, has_compiler, has_dropout, recompute_activations
    from framework.precision import PRECISIONS
    from framework.sync_batchnorm import synchronise

    precision = PRECISIONS[config["precision"]["name"]]
    torch.set_float32_matmul_precision(precision.matmul)
    module.to(precision.parameters)
    if config["trainer"]["activation_checkpointing"]:
        recompute_activations(module)
    if config["trainer"]["compile"] and has_compiler():
        compile_blocks(module)
    elif config["trainer"]["compile"] and world.rank == 0:
        LOGGER.warning("trainer.compile is off: no C++ compiler was found (install g++, or set CXX); training goes on "
                       "without, at the model's own speed")  # fmt: skip
    forward = Forward(
        task(config),
        seed=config["seed"],
        devices=world.devices,
        autocast=precision.autocast,
        example=example(dataset(config).info, dtype=precision.parameters),
    )
    if has_dropout(module):
        forward.key_draws(chain_of(module) or blocks_of(module))
    if config["invariance"] == "bitwise":
        target = config["parallel"]["_target_"].rpartition(".")[0]
        node = {"_target_": f"{target}.invariant", "micro_batch_size": config["micro_batch_size"]}
    else:
        node = config["parallel"]
    built: Engine = component(node)(module, world=world, forward=forward)
    if config["trainer"]["sync_batchnorm"] and built.dp_size > 1:
        assert built.dp_size == world.world_size  # the preflight has refused strategies in which it is not
        synchronise(module, group=world.new_group(), forward=forward)
    return built


def sinks(config: Config) -> "dict[str, Sink]":
    """Return the run's sinks by name, every logger in a process of its own, which is forked here."""
    from framework.loggers.background import TIMEOUT_S, Background
    from framework.loggers.console import Console

    def background(node: Config) -> Background:
        return Background(lambda: component(node)(), timeout_s=node.get("timeout_s", TIMEOUT_S))

    return {"console": Console()} | {name: background(node) for name, node in config["logger"].items()}


class Loaders(dict):  # type: ignore[type-arg]  # str -> Loader
    """A run's loaders by split, each loaded when it is first asked for. Asking is collective."""

    def __init__(self, config: Config, *, world: "World", engine: "Engine") -> None:
        super().__init__()
        self.config = config
        self.world = world
        self.engine = engine
        self.dataset = dataset(config)

    def __missing__(self, split: Any) -> Any:
        from framework.data.loader import Loader
        from framework.data.order import Order
        from framework.data.sharing import load_shared
        from framework.precision import PRECISIONS

        config = self.config
        source = load_shared(self.dataset, split, world=self.world)
        order = Order(
            num_samples=len(source),
            global_batch_size=config["global_batch_size"],
            seed=config["seed"],
            drop_last=config["drop_last"] and split == "train",
        )
        self[split] = Loader(
            self.dataset,
            source,
            order=order,
            micro_batch_size=config["micro_batch_size"],
            dp_rank=self.engine.dp_rank,
            dp_size=self.engine.dp_size,
            device=self.world.device,
            dtype=PRECISIONS[config["precision"]["name"]].parameters,
        )
        return self[split]


def gradient_changes(config: Config, trained: "list[Trainable]") -> "list[ChangeGradients]":
    """Return what is done to the gradient between its backward pass and the optimizer, in order."""
    from framework.gradients import ClipValues, Noise

    settings, changes = config["trainer"], []  # type: Config, list[ChangeGradients]
    if settings["clip_grad_value"] is not None:
        changes.append(ClipValues(trained, max_value=settings["clip_grad_value"]))
    if settings["grad_noise"]["eta"] is not None:
        changes.append(Noise(trained, seed=config["seed"], **settings["grad_noise"]))
    return changes


def speed(config: Config, *, world: "World") -> "Speed":
    """Build what measures a run's speed. What the model needs is counted only where the device's peak is known."""
    import torch

    from framework import flops
    from framework.speed import Speed

    info = dataset(config).info
    batch, needed = example(info), None
    peak = flops.peak_flops(world.device, precision=config["precision"]["name"])
    if peak is not None and batch is not None:
        with torch.device("meta"):
            needed = flops.flops_per_sample(model(config), batch)
        peak *= world.world_size * len(world.devices)
    return Speed(world.device, tokens_per_sample=info.get("seq_len"), flops_per_sample=needed, peak_flops=peak)


def initial_model(config: Config, *, world: "World", is_new: bool) -> "nn.Module":
    """Build the model with what is frozen in it; a new run's begins with `model.init_from`. Collective."""
    from framework.freezing import freeze
    from framework.precision import PRECISIONS
    from framework.warm_start import warm_start

    module = model(config)
    freeze(module, config["trainer"]["freeze"])
    if config["model"].get("init_from") and is_new:
        module.to(PRECISIONS[config["precision"]["name"]].parameters)
        warm_start(module, Path(config["model"]["init_from"]), digest=config["model"]["init_digest"], world=world)
    return module


def trainer(config: Config, *, world: "World", directory: "RunDirectory") -> "Trainer":
    """Build a run's trainer, at step 0. Collective."""
    from framework.averaging import AveragedWeights
    from framework.checkpoint.saver import Saver
    from framework.checkpoint.store import CheckpointStore
    from framework.divergence import Divergence
    from framework.metrics import Patience, Tracker
    from framework.optim import hidden_matrices, trainable
    from framework.precision import PRECISIONS
    from framework.profile import Profile
    from framework.progress import Plan
    from framework.recorder import Recorder
    from framework.trainer import Trainer

    settings, saving = config["trainer"], config["checkpoint"]
    recorder = Recorder(directory, world=world, sinks=sinks(config) if world.rank == 0 else {})
    store = CheckpointStore(
        directory.checkpoints,
        world=world,
        keep_last=saving["keep_last"],
        keep_best=saving["keep_best"],
        mode=saving["mode"],
    )
    module = initial_model(config, world=world, is_new=store.is_empty)
    hidden = hidden_matrices(module)
    built = engine(config, module, world=world)
    loaders = Loaders(config, world=world, engine=built)
    trained = trainable(built.module, hidden=hidden)
    order = loaders["train"].order
    steps = [settings["max_steps"], settings["max_epochs"] and settings["max_epochs"] * order.steps_per_epoch]
    optimizer = built.make_optimizer(component(config["optimizer"]), trained)
    is_profiled = settings["profile"] == "all" or (settings["profile"] and world.rank == 0)
    return Trainer(
        world=world,
        engine=built,
        optimizer=optimizer,
        lr=config["optimizer"].get("lr", optimizer.param_groups[0]["lr"]),
        schedule=component(config["scheduler"]),
        loaders=loaders,
        store=store,
        saver=Saver(store, world=world, is_async=saving["async_save"], max_failures=saving["max_failures"]),
        recorder=recorder,
        plan=Plan(
            total_steps=min(count for count in steps if count is not None),
            log_every=settings["log_every"],
            eval_every=settings["eval_every"],
            checkpoint_every=saving["every"],
            clip_grad_norm=settings["clip_grad_norm"],
            grace_s=config["launch"]["grace_s"],
        ),
        tracker=Tracker(monitor=saving["monitor"], mode=saving["mode"]),
        patience=Patience(**settings["early_stopping"]),
        divergence=Divergence(**settings["divergence"]),
        loss_scale=PRECISIONS[config["precision"]["name"]].loss_scale(),
        changes=gradient_changes(config, trained),
        average=AveragedWeights(trained, decay=settings["ema_decay"]) if settings["ema_decay"] else None,
        profile=Profile(directory.profile, world=world) if is_profiled else None,
        derive=derived(config),
        speed=speed(config, world=world),
        facts={"num_samples": order.num_samples, "optimizer": config["optimizer"]["_target_"]},
    )
