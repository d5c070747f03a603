"""The composition root: a run's configuration as a trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config.renamed import first_target
from framework.runtime.log import LOGGER

if TYPE_CHECKING:
    from torch import nn

    from framework.distributed.world import World
    from framework.engine.seam import Engine
    from framework.loggers.sink import Sink
    from framework.optim.gradients import ChangeGradients
    from framework.optim.optimizers import Trainable
    from framework.runs.directory import RunDirectory
    from framework.training.speed import Speed
    from framework.training.trainer import Trainer
from framework.build.components import Config, component, dataset, derived, example, model, task


def engine(config: Config, module: "nn.Module", *, world: "World") -> "Engine":
    """Put the model under the chosen precision and strategy. Collective."""
    import torch

    from framework.engine.forward import Forward
    from framework.modules.compile import compile_blocks, has_compiler, recompute_activations
    from framework.modules.structure import blocks_of, chain_of, has_dropout
    from framework.optim.precision import PRECISIONS
    from framework.parallel.sync_batchnorm import synchronise

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
        from framework.optim.precision import PRECISIONS

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
    from framework.optim.gradients import ClipValues, Noise

    settings, changes = config["trainer"], []  # type: Config, list[ChangeGradients]
    if settings["clip_grad_value"] is not None:
        changes.append(ClipValues(trained, max_value=settings["clip_grad_value"]))
    if settings["grad_noise"]["eta"] is not None:
        changes.append(Noise(trained, seed=config["seed"], **settings["grad_noise"]))
    return changes


def speed(config: Config, *, world: "World") -> "Speed":
    """Build what measures a run's speed. What the model needs is counted only where the device's peak is known."""
    import torch

    from framework.modules import flops
    from framework.training.speed import Speed

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
    from framework.checkpoint.warm_start import warm_start
    from framework.modules.freeze_parameters import freeze
    from framework.optim.precision import PRECISIONS

    module = model(config)
    freeze(module, config["trainer"]["freeze"])
    if config["model"].get("init_from") and is_new:
        module.to(PRECISIONS[config["precision"]["name"]].parameters)
        warm_start(module, Path(config["model"]["init_from"]), digest=config["model"]["init_digest"], world=world)
    return module


def trainer(config: Config, *, world: "World", directory: "RunDirectory") -> "Trainer":
    """Build a run's trainer, at step 0. Collective."""
    from framework.checkpoint.saver import Saver
    from framework.checkpoint.store import CheckpointStore
    from framework.optim.averaging import AveragedWeights
    from framework.optim.optimizers import hidden_matrices, trainable
    from framework.optim.precision import PRECISIONS
    from framework.training.profile import Profile
    from framework.training.progress import Plan
    from framework.training.recorder import Recorder
    from framework.training.recovery import Divergence
    from framework.training.tracking import Patience, Tracker
    from framework.training.trainer import Trainer

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
        facts={"num_samples": order.num_samples, "optimizer": first_target(config["optimizer"]["_target_"])},
    )
