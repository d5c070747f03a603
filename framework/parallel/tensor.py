"""Tensor parallelism: the matrices of each layer are cut over the processes, which all work on the same samples.

With sequence parallelism, each process works on its part of the tokens between these layers.
"""

import fnmatch
from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as styling

from framework.modules.parts import own_answer
from framework.modules.trace import traced
from framework.parallel.sequence import applies, sequence_problems, with_sequence
from framework.parallel.vocabulary import Vocabulary, row_problem, rows_of
from framework.runtime.log import LOGGER
from framework.runtime.torch_compiler import import_dynamo

import_dynamo()  # as in shard.py


def problems(model: nn.Module, *, tensor: int, sequence: bool | None) -> list[str]:
    """Return why this model cannot be cut over so many processes."""
    try:
        styles = styles_of(model, num_parts=tensor)
    except ValueError as error:
        return [str(error)]
    return sequence_problems(model, styles) if sequence else []


def cut_layers(model: nn.Module, *, mesh: DeviceMesh, sequence: bool | None, keeps_cut: bool, evenly: bool = False) -> None:
    """Shard the weights that the plan names over the one-dimensional mesh. Collective.

    The other weights stay whole, and every process computes the same with them. With `evenly`, vocabularies that the number of
    processes does not divide stay whole too. Logits cut by the vocabulary are gathered, unless `keeps_cut`.
    """
    styles = styles_of(model, num_parts=mesh.size(), keeps_cut=keeps_cut)
    styles = even(styles, model, num_parts=mesh.size()) if evenly else styles
    if sequence is None:
        sequence = mesh.size() > 1 and applies(model, styles)
        LOGGER.debug("parallel.sequence: the tokens between the layers are %s", "cut" if sequence else "whole")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    styling.parallelize_module(model, mesh, with_sequence(model, styles) if sequence else styles)
    own_outputs(model, styles)
    for name in frozen:  # SequenceParallel makes new parameters that require a gradient
        model.get_parameter(name).requires_grad_(False)


class Gathered(styling.ColwiseParallel):
    """A layer that is cut by its outputs; the outputs are gathered immediately."""


def own_outputs(model: nn.Module, styles: dict[str, styling.ParallelStyle]) -> None:
    """Give gathered outputs their own memory: an activation may change them in place, which a view forbids."""
    for name, style in styles.items():
        if isinstance(style, Gathered):
            model.get_submodule(name).register_forward_hook(lambda _, __, output: output.clone())


def even(styles: dict[str, styling.ParallelStyle], model: nn.Module, *, num_parts: int) -> dict[str, styling.ParallelStyle]:
    """Return the styles without vocabularies that the number of processes does not divide."""
    return {name: style for name, style in styles.items()
            if not isinstance(style, Vocabulary) or rows_of(model.get_submodule(name)) % num_parts == 0}  # fmt: skip


def styles_of(model: nn.Module, *, num_parts: int, keeps_cut: bool = False) -> dict[str, styling.ParallelStyle]:
    """Return the style of each layer, by its name.

    The plan is `derived_plan`, or the model's own `tensor_plan()`: a pattern of layer names -> colwise, rowwise, vocabulary, or
    gather (colwise, with outputs gathered immediately). ValueError if the model does not fit the plan.
    """
    answer = own_answer(model, "tensor_plan")
    plan: dict[str, str] = answer() if answer is not None else derived_plan(model, num_parts=num_parts)
    styles: dict[str, styling.ParallelStyle] = {}
    vocabulary = Vocabulary(keeps_cut)
    for name, layer in model.named_modules():
        cut = _said(plan, name)
        if cut is not None:
            by_rows = cut == "vocabulary"
            styles[name] = vocabulary if by_rows else _style(name, layer, cut, num_parts=num_parts)
            if by_rows and (why := _vocabulary_problem(model, name, layer, plan, num_parts=num_parts)):
                raise ValueError(f"tensor={num_parts}: {name} {why}; take other processes, or ddp, zero, fsdp or hsdp, which "
                                 "take any number")  # fmt: skip
    if not styles:
        raise ValueError(f"tensor={num_parts}: divides the features of no linear layer of {type(model).__name__}; let the "
                         "model answer tensor_plan(), or take ddp, zero, fsdp or hsdp, which take most models")  # fmt: skip
    heads = getattr(model, "num_heads", num_parts) if answer is not None else num_parts
    if heads % num_parts:  # a process with half a head would attend with wrong numbers
        raise ValueError(f"tensor={num_parts}: does not divide the {heads} heads of the model; take a divisor, or ddp, "
                         "zero, fsdp or hsdp, which take any number")  # fmt: skip
    return styles


def derived_plan(model: nn.Module, *, num_parts: int) -> dict[str, str]:
    """Return a plan that is right for any model: linear layers are cut by their outputs, which are gathered immediately.

    It names a layer only if the processes divide its features, it is nn.Linear itself (a subclass may use its weight
    differently), it shares no weight, and the trace shows no other reader of its weight.
    """
    uses = Counter(id(parameter) for layer in model.modules() for parameter in nn.Module.parameters(layer, recurse=False))
    trace = traced(model)
    read = trace.read_elsewhere() if trace is not None else set()
    return {name: "gather" for name, layer in model.named_modules()
            if type(layer) is nn.Linear and uses[id(layer.weight)] == 1 and layer.out_features % num_parts == 0
            and id(layer.weight) not in read}  # fmt: skip


def _said(plan: dict[str, str], name: str) -> str | None:
    return next((cut for pattern, cut in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _vocabulary_problem(model: nn.Module, name: str, layer: nn.Module, plan: dict[str, str], *, num_parts: int) -> str:
    """Return why a layer cannot be cut by the vocabulary: because of its rows, or of another layer with the same weight."""
    if why := row_problem(layer, num_parts=num_parts):
        return why
    uncut = [other for other, module in model.named_modules() if _said(plan, other) != "vocabulary"
             and any(parameter is layer.weight for parameter in nn.Module.parameters(module, recurse=False))]  # fmt: skip
    return f"is cut by the vocabulary, and {uncut[0]}, which has the same weight, is not (tensor_plan())" if uncut else ""


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
    raise ValueError(f"tensor_plan() says {cut!r} of {name}; it can say colwise, rowwise, gather or vocabulary")
