"""The composition root: it turns a run's configuration into the objects that train and measure it."""

import inspect
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import nn

from framework.build import components
from framework.build import splits as splits_of
from framework.build.example import example_inputs
from framework.build.measure import stopwatch
from framework.build.model_changes import change_model
from framework.build.schedules import peak_lr, schedules
from framework.build.sources import Sources
from framework.build.user_code import noting_files, seed_imports
from framework.checkpoint.saver import Saver
from framework.checkpoint.state import Progress
from framework.checkpoint.store import CheckpointStore
from framework.checkpoint.weights import warm_start
from framework.config.init_from import entries_of
from framework.config.period import seconds_of
from framework.config.schema import RunConfig
from framework.config.targets import component, instantiated, locate
from framework.data.load import load_in_turns, load_split
from framework.data.loader import Loader, Splits
from framework.data.order import Order
from framework.data.source import Dataset, Selected, Source, Split
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward, modules_of
from framework.engine.seam import Observe, Task
from framework.modules import structure
from framework.modules.parts import chain_of, repeated
from framework.modules.trace import give_example
from framework.optim import update as updates
from framework.optim.optimizers import Trainable, hidden_matrices, trainable
from framework.optim.precision import PRECISIONS, with_bf16_states
from framework.optim.turns import turns_of
from framework.optim.update import Average, AveragedWeights, Update
from framework.parallel.first_weights import put_aside
from framework.parallel.sync_batchnorm import replace_sync, synchronise
from framework.runs.directory import RunDirectory
from framework.runtime import torch_internals
from framework.runtime.lock import Claim
from framework.runtime.numerics import set_numerics
from framework.training.loop import Trainer
from framework.training.loop_view import Loop
from framework.training.metrics import Metrics
from framework.training.parts import Blame, LoopParts
from framework.training.plan import Plan
from framework.training.recorder import Recorder
from framework.training.speed import Speed
from framework.training.tracking import Patience, Tracker

_Builder = TypeVar("_Builder", bound="Builder")


class Builder:
    """A builder of the objects that a frozen configuration names, on one rank of its world."""

    def __init__(self, config: RunConfig, *, world: World, token: str = "") -> None:
        seed_imports()  # also in a process that checks nothing
        self.config, self.world, self._token = config, world, token  # the token of the claim to the run's directory
        self.micro_batch_size = config.known_micro_batch_size
        self.precision = PRECISIONS[config.precision.name]
        self.summary: list[dict[str, Any]] = []  # of the model's modules, the model first, if a preflight has built it
        self.loaded: dict[Split, Source] = {}  # splits that are loaded already
        self.of_run = self  # the builder that this one has been altered from: in a rehearsal, the run's own

    def altered(self: _Builder, *, world: World | None = None, **fields: Any) -> _Builder:
        """Return a builder for the same configuration with some fields changed, or in another world."""
        new = type(self)(self.config.model_copy(update=fields), world=world or self.world, token=self._token)
        new.of_run = self.of_run
        if "micro_batch_size" not in fields:
            new.micro_batch_size = self.micro_batch_size
        return new

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run.dir))

    @cached_property
    def _sources(self) -> Sources:
        load = partial(load_in_turns, seed=self.config.seed, world=self.world)
        return Sources(self.config.dataset, seed=self.config.seed, load=load)

    @property
    def dataset(self) -> Dataset:
        return self._sources.dataset

    def source(self, split: Split) -> Source:
        """Load a split, if it is not loaded already. Collective."""
        return self.loaded[split] if split in self.loaded else self._sources.source(split)

    def _train_samples(self) -> Source:
        """Load the training samples, with those of all folds. Not collective."""
        source = self.loaded.get("train") or load_split(self.dataset, "train", seed=self.config.seed)
        self.loaded |= {"train": source} if components.fold_of(self.config.dataset) is None else {}
        return source

    @cached_property
    def task(self) -> Task:
        """Build the task. The draws of its modules depend on the run's seed, like a model's weights."""
        task = components.task(self.config.task, seed=self.config.seed)
        for module in modules_of(task).values():
            torch_internals.cast(module, self.precision.parameters).to(self.world.device)
        return task

    @cached_property
    def metrics(self) -> Metrics:
        """Build the metrics that take the model's outputs in evaluations."""
        found, seed = components.metrics(self.config.metric), self.config.seed
        pairs = getattr(self.task, "predictions", lambda outputs, targets: (outputs, targets))
        return Metrics(found, pairs=pairs, device=self.world.device, seed=seed)

    @cached_property
    def answering(self) -> dict[str, Any]:
        """The run's parts by name, for questions that they answer without a state."""
        return components.loop_parts(self.config.part)

    @cached_property
    def observers(self) -> list[Observe]:
        """The functions that take the outputs in evaluations; the loop's parts are added for each engine."""
        return [self.metrics.observe] if self.config.metric else []

    def model(self, *, on_meta: bool = False) -> nn.Module:
        """Return the model with its first weights, in the precision's dtype; with `on_meta`, without numbers."""
        model = components.model(self.config.model, seed=self.config.seed, on_meta=on_meta)
        return torch_internals.cast(model, self.precision.parameters)

    @property
    def is_sent(self) -> bool:
        """Whether the strategy lets rank 0 alone build the model's numbers, and sends each rank its part."""
        fills = getattr(inspect.getmodule(locate(self.config.parallel["_target_"])), "fills", None)
        return fills is not None and bool(fills(self.config.parallel))

    def engine(self, module: nn.Module) -> Engine:
        """Put the model under the chosen strategy. Collective."""
        config, precision = self.config, self.precision
        set_numerics(matmul=precision.matmul, deterministic=config.is_deterministic and self.world.device.type == "cuda")
        forward = self.forward()
        if config.trainer.sync_batchnorm or self.world.world_size == 1:  # else torch's own synchronises, with rehearse=false
            replace_sync(module)
        give_example(module, partial(example_inputs, self.dataset, self._train_samples, dtype=precision.parameters))
        change_model(module, config.trainer, task=self.task, linear=precision.linear, world=self.world, run=config.run)
        links = chain_of(module)
        forward.key_draws(links or repeated(module), are_all=bool(links))
        if self.is_sent:
            put_aside(module)
        bitwise = {"bitwise": self.micro_batch_size} if config.invariance == "bitwise" else {}
        built: Engine = component(config.parallel)(module, world=self.world, forward=forward, **bitwise)
        if config.trainer.sync_batchnorm and built.dp_size > 1:
            assert built.dp_size == self.world.world_size  # the preflight has refused other strategies
            synchronise(module, group=self.world.groups.new_group(), forward=forward)
        return built

    def forward(self) -> Forward:
        config, precision = self.config, self.precision
        return Forward(
            self.task, seed=config.seed, devices=self.world.devices, autocast=precision.autocast, observers=[*self.observers]
        )

    def splits(self, *, dp_rank: int = 0, dp_size: int = 1) -> Splits:
        """Return a rank's part of the dataset; a split is loaded when it is first used."""
        names = partial(splits_of.names_of_validations, self.config.dataset, built=self.dataset)
        return Splits(partial(self._load, dp_rank=dp_rank, dp_size=dp_size), validations=names)

    def _load(self, split: Split, *, dp_rank: int, dp_size: int) -> Loader:
        stored: Split = split if self.config.trainer.overfit_batches is None else "train"
        return self.loader(self.source(stored), split, dp_rank=dp_rank, dp_size=dp_size)

    def loader(self, source: Source, split: Split, *, dp_rank: int, dp_size: int) -> Loader:
        """Return a rank's part of a split that is already loaded."""
        config, is_training = self.config, split == "train"
        size, limit = config.global_batch_size, config.trainer.limit_batches
        if (in_order := hasattr(source, "is_stream")) and is_training:
            splits_of.check_stream(source, config.sampler, config.trainer, config.checkpoint.every, config.scheduler)
        if config.trainer.overfit_batches is not None:
            order = Order(num_samples=len(source), global_batch_size=size, seed=config.seed, drop_last=False, in_order=in_order)
            source = Selected(source, order.first(config.trainer.overfit_batches))
        elif limit is not None and not is_training:
            source = Selected(source, np.arange(min(len(source), limit * size)))
        is_sampled = is_training and config.trainer.overfit_batches is None
        with noting_files():
            sampler: Any = component(config.sampler)() if is_sampled and config.sampler else None
        draw = partial(sampler.epoch, source=source, seed=config.seed) if sampler is not None else None
        growing = [part.batch_size for part in self.answering.values() if hasattr(part, "batch_size") and is_training]
        grow = partial(growing[0], global_batch_size=size) if growing else None
        order = Order(
            num_samples=len(source), global_batch_size=size, seed=config.seed, drop_last=config.drop_last and is_training,
            limit=limit if is_training else None, sample_tokens=self.dataset.info.get("seq_len"), in_order=in_order,
            draw=draw, grow=grow,
        )  # fmt: skip
        return Loader(
            self.dataset,
            source,
            order=order,
            micro_batch_size=self.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            device=self.world.device,
            dtype=self.precision.parameters,
            batch_transform=instantiated(config.dataset.get("batch_transform")) if is_training else None,
            split=split,
            keep_on_cpu=components.kept_on_cpu(config.dataset),
            channels_last=bool(config.trainer.channels_last),
        )

    def store(self) -> CheckpointStore:
        kept, claim = self.config.checkpoint, Claim(self.directory.path, self._token)
        return CheckpointStore(
            self.directory.checkpoints, world=self.world, keep_last=kept.keep_last, keep_best=kept.keep_best,
            mode=kept.direction, claim=claim, keeps_scheduled=self.config.trainer.divergence.action == "rollback",
        )  # fmt: skip

    def trainer(self) -> Trainer:
        """Build a run's trainer, at step 0. Collective."""
        config, world, store, saving = self.config, self.world, self.store(), self.config.checkpoint
        sinks = components.sinks(config.logger) if world.rank == 0 else {}
        recorder = Recorder(self.directory, world=world, sinks=sinks, accepts_code=config.run.code == "accept")
        module = self.model(on_meta=self.is_sent and world.rank > 0)
        module.train()  # once, as in any loop: a library may return it in eval mode, and an author may override train()
        structure.freeze_parameters(module, config.trainer.freeze)
        if config.model.get("init_from") and store.is_empty:
            warm_start(module, entries_of(config.model["init_from"]), digests=config.model["init_digest"], world=world)
        hidden = hidden_matrices(module)
        engine = self.engine(module)
        splits = self.splits(dp_rank=engine.dp_rank, dp_size=engine.dp_size)
        order = splits.loader("train").order
        plan = Plan.of(config.trainer, order, checkpoint_every=saving.every, grace_s=config.launch.grace_s)
        trained = trainable(engine.module, hidden=hidden)
        update = self.update(engine, trained, total_steps=plan.total_steps, order=order)
        facts = {"optimizer": config.optimizer["_target_"]}
        saver = Saver(store, world=world, is_async=saving.async_save, max_failures=saving.max_failures, facts=facts)
        return Trainer(
            world=world,
            engine=engine,
            update=update,
            splits=splits,
            saver=saver,
            recorder=recorder,
            plan=plan,
            tracker=self.tracker(),
            speed=self.stopwatch(),
            parts=self.parts(engine, update, total_steps=plan.total_steps, splits=splits, recorder=recorder),
        )

    def tracker(self) -> Tracker:
        saving, patience = self.config.checkpoint, Patience(self.config.trainer.early_stopping)
        derive: Any = getattr(self.task, "derived", lambda means: {})  # from the means over samples
        return Tracker(monitor=saving.monitor, mode=saving.direction, patience=patience, derive=derive, metrics=self.metrics)

    def parts(
        self, engine: Engine, update: Update, *, total_steps: int, splits: Splits, recorder: Recorder,
        blame: Blame = lambda name: nullcontext(),
    ) -> LoopParts:  # fmt: skip
        """Build the run's parts, at step 0. Collective."""
        loop = Loop(
            world=self.world, engine=engine, task=self.task, dataset=self.dataset, splits=splits, update=update,
            directory=recorder.directory.path, seed=self.config.seed, total_steps=total_steps, recorder=recorder,
            progress=Progress(step=0, samples_seen=0, wall_s=0.0),
        )  # fmt: skip
        parts = components.loop_parts(self.config.part)
        engine.observers += [part.observe for part in parts.values() if hasattr(part, "observe")]
        return LoopParts(parts, loop, blame=blame, by_clock=seconds_of(self.config.trainer.eval_every) is not None)

    def update(self, engine: Engine, trained: list[Trainable], *, total_steps: int, order: Order) -> Update:
        config, build = self.config, components.optimizer_builder(self.config.optimizer)
        with noting_files():
            optimizer = engine.optimizer(with_bf16_states(build) if config.precision.optimizer_state else build, trained)
        settings, changes = config.trainer, list[updates.ChangeGradients]()  # in this order
        if settings.clip_grad_value is not None:
            changes.append(updates.ClipValues(trained, max_value=settings.clip_grad_value))
        with noting_files():
            found = schedules(config.scheduler, optimizer, of=config.optimizer, total_steps=total_steps, order=order)
        average: Average | None = None
        shares = [part.average_share for part in self.answering.values() if hasattr(part, "average_share")]
        if updates.averages_itself(optimizer):
            average = updates.OwnAverage(optimizer, trained)
        elif shares:
            average = AveragedWeights(trained, share=partial(shares[0], total_steps=total_steps))
        elif settings.ema_decay is not None:
            share = 1 - settings.ema_decay
            average = AveragedWeights(trained, share=lambda step: share)
        engine.average = average
        return Update(
            optimizer, seed=config.seed, peak_lr=peak_lr(config.optimizer, optimizer), schedule=found.pop(""), schedules=found,
            loss_scale=self.precision.loss_scale(), changes=changes, average=average, turns=turns_of(config.optimizer),
            trained=trained,
        )  # fmt: skip

    def stopwatch(self) -> Speed:
        config, directory = self.config, self.directory
        model, precision = partial(components.shapes_of, config.model, seed=config.seed), config.precision.name
        info, trainer = self.dataset.info, config.trainer
        return stopwatch(model, info, world=self.world, precision=precision, trainer=trainer, directory=directory)
