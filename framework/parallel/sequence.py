"""Sequence parallelism: between layers cut by tensor parallelism, each process works on its part of the tokens."""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from framework.modules.structure import blocks_of


def problems(model: nn.Module, styles: dict[str, ParallelStyle], *, num_parts: int) -> list[str]:
    """Say why the tokens of this model's samples cannot be cut between the layers that `styles` names."""
    blocks = {id(block) for block in blocks_of(model)}
    inside = [name for name, module in model.named_modules() if id(module) in blocks]
    kinds = {type(styles[name]) for name in styles if name.startswith(tuple(f"{block}." for block in inside))}
    if not {ColwiseParallel, RowwiseParallel} <= kinds:
        return [f"sequence=true: {type(model).__name__} has no blocks() in which its tensor_plan() cuts layers by columns and "
                "by rows; take sequence=false, or ddp, zero, fsdp or hsdp, which take any model"]  # fmt: skip
    seq_len = getattr(model, "seq_len", num_parts)
    if seq_len % num_parts:
        return [f"sequence=true: tensor={num_parts} does not divide the {seq_len} tokens of a sample; take a divisor, or "
                "sequence=false"]  # fmt: skip
    return []


def with_sequence(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the styles by which tensors (B, T, D) go through the model's blocks with their tokens cut.

    Tokens are gathered where layers cut by columns need them all, once for all layers of a module; layers cut by rows
    give each process the sums for its own tokens; layers that no style names (norms) work on those.
    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = blocks_of(model)
    changed = dict(styles)
    for block in blocks:
        for name, layer in block.named_modules(prefix=names[id(block)]):
            own = list(layer.named_parameters(prefix=name))
            is_leaf = any(True for _ in layer.parameters(recurse=False))
            if is_leaf and name not in styles:
                changed[name] = SequenceParallel(use_local_output=True)
            elif isinstance(styles.get(name), RowwiseParallel):
                changed[name] = RowwiseParallel(output_layouts=Shard(1))
            elif own and all(parameter.rpartition(".")[0] in styles for parameter, _ in own) and name not in styles:
                changed[name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    first, last = names[id(blocks[0])], names[id(blocks[-1])]
    whole, part = Replicate(), Shard(1)
    if first == last:
        changed[first] = PrepareModuleInputOutput(
            input_layouts=whole,
            desired_input_layouts=part,
            use_local_input=True,
            output_layouts=part,
            desired_output_layouts=whole,
        )
    else:
        changed[first] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=True)
        changed[last] = PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole)
    return changed
