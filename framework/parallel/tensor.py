"""Tensor parallelism: each layer's matrices are cut over the processes, which all work on the same samples.

With sequence parallelism, each process works on its part of the tokens between these layers.
"""

import fnmatch
from collections import Counter
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as styling

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.modules.first_weights import fill, fills
from framework.modules.parts import blocks_of, own_answer
from framework.modules.structure import has_dropout
from framework.modules.trace import traced
from framework.runtime.torch_compiler import import_dynamo

import_dynamo()  # as in fsdp.py


@fills
def tensor(model: nn.Module, *, world: World, forward: Forward, tensor: int | None, sequence: bool) -> Engine:
    """Cut the model's linear layers over all processes, and with `sequence` the tokens between them. Collective."""
    mesh = world.mesh(tensor=tensor)
    cut_layers(model, mesh=mesh, sequence=sequence)
    fill(model, device=world.device)
    return DataParallelEngine(model, forward=forward, mesh=mesh, is_counted=world.rank == 0, broadcast=world.broadcast)


def problems(model: nn.Module, *, tensor: int, sequence: bool, **others: object) -> list[str]:
    """Return why this model cannot be cut over so many processes."""
    try:
        styles = styles_of(model, num_parts=tensor)
    except ValueError as error:
        return [str(error)]
    if tensor > 1 and has_dropout(model) and any(isinstance(style, styling.RowwiseParallel) for style in styles.values()):
        return ["the model has dropout, whose draws between layers cut by columns and by rows would depend on the number "
                "of processes; set model.dropout=0"]  # fmt: skip
    return sequence_problems(model, styles, num_parts=tensor) if sequence else []


def cut_layers(model: nn.Module, *, mesh: DeviceMesh, sequence: bool) -> None:
    """Shard the weights that the plan names over the one-dimensional mesh. Collective.

    The other weights stay whole, and every process computes the same with them.
    """
    styles = styles_of(model, num_parts=mesh.size())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    styling.parallelize_module(model, mesh, with_sequence(model, styles) if sequence else styles)
    own_outputs(model, styles)
    for name in frozen:  # SequenceParallel makes new parameters, which want a gradient
        model.get_parameter(name).requires_grad_(False)


class Gathered(styling.ColwiseParallel):
    """A layer cut by its outputs, which are gathered at once."""


def own_outputs(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> None:
    """Let gathered outputs have memory of their own: an activation may change them in place, which a view forbids."""
    for name, style in styles.items():
        if isinstance(style, Gathered):
            model.get_submodule(name).register_forward_hook(lambda _, __, output: output.clone())


def styles_of(model: nn.Module, *, num_parts: int) -> dict[str, styling.ParallelStyle]:
    """Return how each layer is cut, by its name.

    The plan is the model's own (`tensor_plan()`: a pattern of layer names -> colwise, rowwise, or gather, which is
    colwise with its outputs gathered at once), or else `derived_plan`. ValueError if the model does not fit it.
    """
    answer = own_answer(model, "tensor_plan")
    plan: dict[str, str] = answer() if answer is not None else derived_plan(model, num_parts=num_parts)
    styles: dict[str, styling.ParallelStyle] = {}
    for name, layer in model.named_modules():
        cut = next((cut for pattern, cut in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if cut is not None:
            styles[name] = _style(name, layer, cut, num_parts=num_parts)
    if not styles:
        raise ValueError(f"tensor={num_parts}: divides the features of no linear layer of {type(model).__name__}; let the "
                         "model answer tensor_plan(), or take ddp, zero, fsdp or hsdp, which take most models")  # fmt: skip
    heads = getattr(model, "num_heads", num_parts) if answer is not None else num_parts
    if heads % num_parts:  # half a head would attend to the wrong numbers
        raise ValueError(f"tensor={num_parts}: does not divide the {heads} heads of the model; take a divisor, or ddp, "
                         "zero, fsdp or hsdp, which take any number")  # fmt: skip
    return styles


def derived_plan(model: nn.Module, *, num_parts: int) -> dict[str, str]:
    """Return a plan that is right for any model: linear layers are cut by their outputs, which are gathered at once.

    Only layers whose features divide, that are nn.Linear itself (a subclass may use its weight in other ways), that share
    no weight and whose weight nothing else is seen to read.
    """
    uses = Counter(id(parameter) for layer in model.modules() for parameter in layer.parameters(recurse=False))
    trace = traced(model)
    read = trace.read_elsewhere() if trace is not None else set()
    return {name: "gather" for name, layer in model.named_modules()
            if type(layer) is nn.Linear and uses[id(layer.weight)] == 1 and layer.out_features % num_parts == 0
            and id(layer.weight) not in read}  # fmt: skip


def _style(name: str, layer: nn.Module, cut: str, *, num_parts: int) -> styling.ParallelStyle:
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"tensor_plan() says to cut {name}, a {type(layer).__name__}; only linear layers can be cut")
    size = layer.in_features if cut == "rowwise" else layer.out_features
    if size % num_parts:
        raise ValueError(f"tensor={num_parts}: does not divide the {size} features of {name}; take a divisor, or ddp, "
                         "zero, fsdp or hsdp, which take any number")  # fmt: skip
    if cut == "colwise":
        return styling.ColwiseParallel()
    if cut == "rowwise":
        return styling.RowwiseParallel()
    if cut == "gather":
        return Gathered(output_layouts=Replicate())
    raise ValueError(f"tensor_plan() says {cut!r} of {name}; it can say colwise, rowwise or gather")


def sequence_problems(model: nn.Module, styles: dict[str, styling.ParallelStyle], *, num_parts: int) -> list[str]:
    """Return why the tokens of this model's samples cannot be cut between the layers that `styles` names."""
    blocks = {id(block) for block in blocks_of(model)}
    inside = [name for name, module in model.named_modules() if id(module) in blocks]
    kinds = {type(styles[name]) for name in styles if name.startswith(tuple(f"{block}." for block in inside))}
    if not {styling.ColwiseParallel, styling.RowwiseParallel} <= kinds:
        return [f"sequence=true: {type(model).__name__} has no blocks() in which its tensor_plan() cuts layers by columns and "
                "by rows; take sequence=false, or ddp, zero, fsdp or hsdp, which take most models"]  # fmt: skip
    seq_len = getattr(model, "seq_len", num_parts)
    if seq_len % num_parts:
        return [f"sequence=true: tensor={num_parts} does not divide the {seq_len} tokens of a sample; take a divisor, or "
                "sequence=false"]  # fmt: skip
    return []


def with_sequence(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> dict[str, styling.ParallelStyle]:
    """Return the styles with which the model's blocks pass on tensors (B, T, D) whose tokens are cut.

    Tokens are gathered where layers cut by columns need them all, once for all layers of a module; layers cut by rows
    give each process the sums for its own tokens; layers that no style names (norms) work on these tokens.
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
                changed[name] = styling.SequenceParallel(use_local_output=True)
            elif isinstance(styles.get(name), styling.RowwiseParallel):
                changed[name] = styling.RowwiseParallel(output_layouts=Shard(1))
            elif own and all(parameter.rpartition(".")[0] in styles for parameter, _ in own) and name not in styles:
                changed[name] = styling.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    first, last = names[id(blocks[0])], names[id(blocks[-1])]
    inputs: dict[str, Any] = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    outputs: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    if first == last:
        changed[first] = styling.PrepareModuleInputOutput(**inputs, use_local_input=True, **outputs)
    else:
        changed[first] = styling.PrepareModuleInput(**inputs, use_local_output=True)
        changed[last] = styling.PrepareModuleOutput(**outputs)
    return changed
