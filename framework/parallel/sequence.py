"""Sequence parallelism: between the layers that tensor parallelism cuts, each process works on its part of the tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as styling

from framework.modules.parts import blocks_of, own_answer


def sequence_problems(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> list[str]:
    """Return why the tokens of this model's samples cannot be cut between the layers that `styles` names."""
    if torch.__version__ < "2.12":  # its DTensors of uneven parts give other gradients
        return [f"sequence=true: needs torch 2.12, and this is {torch.__version__}; take sequence=false"]
    blocks = {id(block) for block in blocks_of(model)}
    inside = [name for name, module in model.named_modules() if id(module) in blocks]
    kinds = {type(styles[name]) for name in styles if name.startswith(tuple(f"{block}." for block in inside))}
    if not {styling.ColwiseParallel, styling.RowwiseParallel} <= kinds:
        return [f"sequence=true: {type(model).__name__} has no blocks() in which its tensor_plan() cuts layers by columns and "
                "by rows; take sequence=false, or ddp, zero, fsdp or hsdp, which take most models"]  # fmt: skip
    return []


def applies(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> bool:
    """Return whether the tokens are cut without a word of the user: the model says by `mixers()` where tokens meet.

    Each mixer must be in a module with layers cut by columns, which gets all tokens. The rehearsal finds other models.
    """
    says = all(own_answer(model, name) is not None for name in ("mixers", "blocks"))
    return says and not sequence_problems(model, styles)


@dataclass(eq=False)
class CutTokens:
    """The tokens of the blocks' hidden state (B, T, D), of which each process has a run. The first block sees the shape."""

    shape: tuple[int, ...] = ()

    def cut(self, hidden_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this process's tokens of all tokens."""
        self.shape = tuple(hidden_BTD.shape)
        return (
            DTensor.from_local(hidden_BTD, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]).to_local()
        )

    def placed(self, own: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return this process's tokens as a DTensor of all tokens. The first processes have ceil(T / parts) tokens."""
        batch, num_tokens, _ = self.shape
        share = -(-num_tokens // mesh.size())
        expected = min(share, max(0, num_tokens - share * mesh.get_local_rank()))
        if own.ndim != 3 or own.shape[1] != expected:
            raise ValueError(f"a block returns a tensor of shape {[*own.shape]}, but this process has {expected} of "
                             f"{num_tokens} tokens of (B, T, D) (parallel.sequence=false)")  # fmt: skip
        whole = Size((batch, num_tokens, own.shape[2]))
        stride = (num_tokens * whole[2], whole[2], 1)
        return DTensor.from_local(own.contiguous(), mesh, [Shard(1)], run_check=False, shape=whole, stride=stride)

    def gathered(self, own: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return all tokens, as a DTensor."""
        return self.placed(own, mesh).redistribute(placements=[Replicate()])

    def whole(self, own: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return all tokens."""
        return self.gathered(own, mesh).to_local()


@dataclass(eq=False)
class Around(styling.ParallelStyle):
    """A style that changes a module's first input, or its output. With `replicates`, its weights are DTensors.

    The first input is the first argument, or the first tensor among the named ones.
    """

    enter: Callable[[Tensor, DeviceMesh], Tensor] | None = None
    leave: Callable[[Any, DeviceMesh], Tensor] | None = None
    replicates: bool = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter, leave = self.enter, self.leave

        def change(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            assert enter is not None
            if given:
                return (enter(given[0], device_mesh), *given[1:]), named
            name = next(name for name, value in named.items() if isinstance(value, Tensor))
            return given, {**named, name: enter(named[name], device_mesh)}

        for name, parameter in list(module.named_parameters(recurse=False)) if self.replicates else ():
            shared = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))
        if enter is not None:
            module.register_forward_pre_hook(change, with_kwargs=True)
        if leave is not None:
            module.register_forward_hook(lambda _, __, outputs: leave(outputs, device_mesh))
        return module


def _own_part(outputs: DTensor, mesh: DeviceMesh) -> Tensor:
    return outputs.redistribute(placements=[Shard(1)]).to_local()


def with_sequence(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> dict[str, styling.ParallelStyle]:
    """Return styles for blocks that pass on tensors (B, T, D) with cut tokens; the number of parts is free.

    Tokens are gathered where layers cut by columns need all of them, once for all layers of a module. Layers cut by rows
    give each process the sums for its own tokens. Layers that no style names (norms) work on these tokens.
    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = blocks_of(model)
    tokens = CutTokens()
    changed = dict(styles)
    for block in blocks:
        for name, layer in block.named_modules(prefix=names[id(block)]):
            own = list(layer.named_parameters(prefix=name))
            is_leaf = any(True for _ in nn.Module.parameters(layer, recurse=False))
            if is_leaf and name not in styles:  # like torch's SequenceParallel, which assumes parts of equal size
                changed[name] = Around(tokens.placed, _own_part, replicates=True)
            elif type(styles.get(name)) is styling.RowwiseParallel:
                changed[name] = styling.RowwiseParallel(output_layouts=Shard(1))
            elif own and all(parameter.rpartition(".")[0] in styles for parameter, _ in own) and name not in styles:
                changed[name] = Around(tokens.gathered)
    first, last = names[id(blocks[0])], names[id(blocks[-1])]
    changed[last] = Around(None, tokens.whole)
    changed[first] = Around(tokens.cut, tokens.whole if first == last else None)
    return changed
