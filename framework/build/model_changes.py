"""The configuration's changes of a model before a strategy takes it: 8-bit layers, recomputation, compilation."""

from pathlib import Path
from typing import Literal

from torch import nn

from framework.config.schema import RunSection
from framework.config.trainer import TrainerSection
from framework.distributed.world import World
from framework.engine.seam import Task
from framework.modules.float8 import convert_linear
from framework.modules.parts import blocks_of, description
from framework.modules.recomputation import offload_activations, recompute_activations
from framework.modules.structure import compile_blocks
from framework.runtime.log import LOGGER
from framework.runtime.torch_compiler import has_compiler


def change_model(
    model: nn.Module, trainer: TrainerSection, *, task: Task, linear: Literal["float8"] | None, world: World, run: RunSection
) -> None:
    """Change the model in place; names and parameters stay the same. Compiled code is in `run.root`, for all runs there.

    With trainer.compile, also call the task's `compile_loss`, if it has this method.
    """
    convert_linear(model, to=linear, devices=world.devices)
    if not (trainer.activation_checkpointing or trainer.compile or trainer.activation_offload):
        return  # return early: to find the blocks, the model's forward would be traced
    blocks = blocks_of(model)
    if world.rank == 0 and (trainer.activation_checkpointing or trainer.compile):
        LOGGER.info("the model's blocks: %s", description(blocks, model))
    if trainer.compile and has_compiler():
        mode = trainer.compile if isinstance(trainer.compile, str) else None
        folder = Path(run.root if Path(run.dir).is_relative_to(run.root) else run.dir)
        compile_blocks(blocks or [model], folder=folder, mode=mode, dynamic=trainer.compile_dynamic)
        if callable(compile_loss := getattr(task, "compile_loss", None)):
            compile_loss()
    elif trainer.compile and world.rank == 0:
        LOGGER.warning("trainer.compile is off: no C++ compiler was found (install g++, or set CXX); training continues "
                       "without compilation")  # fmt: skip
    # outside of the compiled code: a compiler would treat the copies of the buffers and the CPU's memory as constants
    if trainer.activation_checkpointing:
        recompute_activations(blocks, which=trainer.activation_checkpointing)
    if trainer.activation_offload:
        offload_activations(blocks or [model])
