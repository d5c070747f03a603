"""The composition root: a run's configuration as the objects that train and measure it."""

from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from framework.build import components
from framework.checkpoint.saver import Saver
from framework.checkpoint.store import CheckpointStore
from framework.checkpoint.weights import warm_start
from framework.config.renamed import first_target
from framework.config.schema import Node, RunConfig
from framework.config.targets import component
from framework.data.loader import Loader, Splits, load_shared
from framework.data.order import Order
from framework.data.source import Dataset, Split
from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine, Task
from framework.loggers.background import Background
from framework.loggers.console import Console
from framework.loggers.sink import Sink
from framework.modules import flops, structure
from framework.optim.optimizers import Trainable, hidden_matrices, trainable
from framework.optim.precision import PRECISIONS
from framework.optim.update import AveragedWeights, ChangeGradients, ClipValues, Noise, Update
from framework.parallel.sync_batchnorm import synchronise
from framework.runs.directory import RunDirectory
from framework.runtime.log import LOGGER
from framework.runtime.torch_internals import has_compiler
from framework.training.profile import Profile
from framework.training.recorder import Recorder
from framework.training.recovery import Recovery
from framework.training.speed import Speed
from framework.training.tracking import Patience, Tracker
from framework.training.trainer import Plan, Trainer


class Builder:
    """Builds what a frozen configuration names, on one rank of its world."""

    def __init__(self, config: RunConfig, *, world: World) -> None:
        self.config = config
        self.world = world
        self.precision = PRECISIONS[config.precision.name]

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run.dir))

    @cached_property
    def dataset(self) -> Dataset:
        return components.dataset(self.config.dataset)

    @cached_property
    def task(self) -> Task:
        return components.task(self.config.task)

    def model(self) -> nn.Module:
        """Return the model with its weights drawn from the seed, in the precision's type."""
        return components.model(self.config.model, seed=self.config.seed).to(self.precision.parameters)

    def engine(self, module: nn.Module) -> Engine:
        """Put the model under the chosen strategy. Collective."""
        config, precision = self.config, self.precision
        torch.set_float32_matmul_precision(precision.matmul)
        if config.trainer.activation_checkpointing:
            structure.recompute_activations(module)
        if config.trainer.compile and has_compiler():
            structure.compile_blocks(module)
        elif config.trainer.compile and self.world.rank == 0:
            LOGGER.warning("trainer.compile is off: no C++ compiler was found (install g++, or set CXX); training goes on "
                           "without, at the model's own speed")  # fmt: skip
        example = components.example(self.dataset.info, dtype=precision.parameters)
        forward = Forward(self.task, seed=config.seed, devices=self.world.devices, autocast=precision.autocast, example=example)
        if structure.has_dropout(module):
            forward.key_draws(structure.chain_of(module) or structure.blocks_of(module))
        bitwise = {"bitwise": config.micro_batch_size} if config.invariance == "bitwise" else {}
        built: Engine = component(config.parallel)(module, world=self.world, forward=forward, **bitwise)
        if config.trainer.sync_batchnorm and built.dp_size > 1:
            assert built.dp_size == self.world.world_size  # the preflight has refused other strategies
            synchronise(module, group=self.world.groups.new_group(), forward=forward)
        return built

    def splits(self, engine: Engine) -> Splits:
        """Return this rank's part of the dataset, loaded at its first use."""
        return Splits(partial(self._load, dp_rank=engine.dp_rank, dp_size=engine.dp_size))

    def _load(self, split: Split, *, dp_rank: int, dp_size: int) -> Loader:
        config = self.config
        source = load_shared(self.dataset, split, world=self.world)
        size, drop_last = config.global_batch_size, config.drop_last and split == "train"
        return Loader(
            self.dataset,
            source,
            order=Order(num_samples=len(source), global_batch_size=size, seed=config.seed, drop_last=drop_last),
            micro_batch_size=config.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            device=self.world.device,
            dtype=self.precision.parameters,
        )

    def store(self) -> CheckpointStore:
        kept = self.config.checkpoint
        return CheckpointStore(
            self.directory.checkpoints, world=self.world, keep_last=kept.keep_last, keep_best=kept.keep_best, mode=kept.mode
        )

    def trainer(self) -> Trainer:
        """Build a run's trainer, at step 0. Collective."""
        config, world, store, saving = self.config, self.world, self.store(), self.config.checkpoint
        sinks = build_sinks(config.logger) if world.rank == 0 else {}
        recorder = Recorder(self.directory, world=world, sinks=sinks)
        module = self.model()
        structure.freeze_parameters(module, config.trainer.freeze)
        if config.model.get("init_from") and store.is_empty:
            warm_start(module, Path(config.model["init_from"]), digest=config.model["init_digest"], world=world)
        hidden = hidden_matrices(module)
        engine = self.engine(module)
        splits = self.splits(engine)
        order = splits.loader("train").order
        plan = self._plan(steps_per_epoch=order.steps_per_epoch)
        update = self._update(engine, trainable(engine.module, hidden=hidden), total_steps=plan.total_steps)
        facts = {"num_samples": order.num_samples, "optimizer": first_target(config.optimizer["_target_"])}
        saver = Saver(store, world=world, is_async=saving.async_save, max_failures=saving.max_failures, facts=facts)
        divergence = config.trainer.divergence
        return Trainer(
            world=world,
            engine=engine,
            update=update,
            splits=splits,
            saver=saver,
            recorder=recorder,
            plan=plan,
            tracker=self.tracker(),
            recovery=Recovery(divergence, world=world, engine=engine, update=update, saver=saver, recorder=recorder),
            speed=self._speed(),
        )

    def tracker(self) -> Tracker:
        saving, patience = self.config.checkpoint, Patience(self.config.trainer.early_stopping)
        return Tracker(monitor=saving.monitor, mode=saving.mode, patience=patience, derive=components.derived(self.task))

    def _plan(self, *, steps_per_epoch: int) -> Plan:
        settings = self.config.trainer
        steps = [settings.max_steps, settings.max_epochs and settings.max_epochs * steps_per_epoch]
        total_steps = min(count for count in steps if count is not None)
        return Plan(total_steps, settings, checkpoint_every=self.config.checkpoint.every, grace_s=self.config.launch.grace_s)

    def _update(self, engine: Engine, trained: list[Trainable], *, total_steps: int) -> Update:
        config = self.config
        optimizer = engine.make_optimizer(components.optimizer_builder(config.optimizer), trained)
        lr = config.optimizer.get("lr", optimizer.param_groups[0]["lr"])
        settings, changes = config.trainer, list[ChangeGradients]()  # in this order
        if settings.clip_grad_value is not None:
            changes.append(ClipValues(trained, max_value=settings.clip_grad_value))
        if settings.grad_noise.eta is not None:
            changes.append(Noise(trained, seed=config.seed, eta=settings.grad_noise.eta, gamma=settings.grad_noise.gamma))
        schedule = components.share_of_peak(config.scheduler, total_steps=total_steps, lr=lr)
        average = AveragedWeights(trained, decay=settings.ema_decay) if settings.ema_decay else None
        return Update(
            optimizer, peak_lr=lr, schedule=schedule, loss_scale=self.precision.loss_scale(), changes=changes, average=average
        )

    def _speed(self) -> Speed:
        """Build what measures a run's speed. The model's operations are counted only if the device's peak is known."""
        info, world = self.dataset.info, self.world
        batch, needed = components.example(info), None
        peak = flops.peak_flops(world.device, precision=self.config.precision.name)
        if peak is not None and batch is not None:
            with torch.device("meta"):
                model = components.model(self.config.model, seed=self.config.seed)
                needed = flops.flops_per_sample(model, batch)
            peak *= world.world_size * len(world.devices)
        setting = self.config.trainer.profile
        is_profiled = setting == "all" or (setting and world.rank == 0)
        profile = Profile(self.directory.profile, world=world) if is_profiled else None
        return Speed(
            world.device, tokens_per_sample=info.get("seq_len"), flops_per_sample=needed, peak_flops=peak, profile=profile
        )


def build_sinks(nodes: dict[str, Node]) -> dict[str, Sink]:
    """Return the run's sinks by name; each logger runs in a process of its own, which is forked here."""
    loggers = {name: Background(component(node), timeout_s=node.get("timeout_s")) for name, node in nodes.items()}
    return {"console": Console(), **loggers}
