"""Tensor parallelism: the matrices of each layer are cut over the processes, which all work on the same samples.

With sequence parallelism, each process works on its part of the tokens between these layers.
"""

import fnmatch
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as styling

from framework.engine.seam import Task, says_itself
from framework.modules.parts import own_answer
from framework.modules.tensors import local, whole
from framework.modules.trace import traced
from framework.parallel.sequence import applies, sequence_problems, with_sequence
from framework.runtime.log import LOGGER
from framework.runtime.torch_compiler import import_dynamo
from framework.runtime.torch_internals import check_on_device

import_dynamo()  # as in shard.py

_LOSS_PARALLEL = ExitStack()  # open until the process ends: the backward pass of a loss of cut logits needs it too


def problems(model: nn.Module, *, tensor: int, sequence: bool | None) -> list[str]:
    """Return why this model cannot be cut over so many processes."""
    try:
        styles = styles_of(model, num_parts=tensor)
    except ValueError as error:
        return [str(error)]
    return sequence_problems(model, styles) if sequence else []


def stays_cut(task: Task) -> bool:
    """Return whether a task takes cut logits: a DTensor in which each process has the logits of some tokens."""
    return says_itself(task, "takes_cut_logits")


def cut_layers(model: nn.Module, *, mesh: DeviceMesh, sequence: bool | None, keeps_cut: bool, evenly: bool = False) -> None:
    """Shard the weights that the plan names over the one-dimensional mesh. Collective.

    The other weights stay whole, and every process computes the same with them.
    """
    styles = styles_of(model, num_parts=mesh.size(), keeps_cut=keeps_cut, evenly=evenly)
    if sequence is None:
        sequence = mesh.size() > 1 and applies(model, styles)
        LOGGER.debug("parallel.sequence: the tokens between the layers are %s", "cut" if sequence else "whole")
    cut_by(with_sequence(model, styles) if sequence else styles, model, mesh=mesh)


def cut_by(styles: Mapping[str, styling.ParallelStyle], model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Cut the layers that the styles name. Shared weights stay shared, and frozen weights stay frozen. Collective."""
    before = dict(model.named_parameters(remove_duplicate=False))
    styling.parallelize_module(model, mesh, dict(styles))
    after: dict[int, nn.Parameter] = {}
    for name, parameter in before.items():
        holder, _, own_name = name.rpartition(".")
        module = model.get_submodule(holder)
        made = after.setdefault(id(parameter), module.get_parameter(own_name))
        setattr(module, own_name, made.requires_grad_(parameter.requires_grad))


class ByOutputs(styling.ColwiseParallel):
    """A layer cut by its outputs, which are gathered immediately; in training with `keeps_cut`, they stay cut, as a DTensor."""

    def __init__(self, *, keeps_cut: bool = False) -> None:
        super().__init__(use_local_output=False)
        self.keeps_cut = keeps_cut

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.keeps_cut:
            _LOSS_PARALLEL.enter_context(styling.loss_parallel())
        super()._apply(module, device_mesh)
        module.register_forward_hook(self._leave)
        return module

    def _leave(self, module: nn.Module, _: Any, outputs: Tensor) -> Tensor:
        if self.keeps_cut and module.training and torch.is_grad_enabled():
            return outputs
        return whole(outputs).clone()  # an activation may change its memory in place, which a view forbids


class ByTokens(styling.RowwiseParallel):
    """An embedding cut by its rows: each process looks up its own tokens, and the sum over the processes has all tokens."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(_refuse_others)
        module.register_forward_hook(lambda _, __, outputs: outputs.clone())  # as in ByOutputs
        return module


def _refuse_others(layer: nn.Module, given: tuple[Any, ...]) -> None:
    """Raise an error for a token outside of the vocabulary, which no process would have: its sum would be zero."""
    size, tokens = rows_of(layer), local(given[0])
    is_token = (tokens >= 0) & (tokens < size)
    check_on_device(is_token.all(), f"a token is out of range of a vocabulary of {size}")


def row_problem(layer: nn.Module, *, num_parts: int) -> str:
    """Return why a layer's rows cannot be cut over so many processes; "" if they can."""
    if type(layer) is nn.Embedding:
        options = {"max_norm": layer.max_norm, "scale_grad_by_freq": layer.scale_grad_by_freq, "sparse": layer.sparse}
        if set_ := [name for name, value in options.items() if value]:
            return f"has {set_[0]}, which needs all rows"
    elif type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, and only an nn.Embedding or nn.Linear has rows for tokens"
    num_rows = rows_of(layer)
    if -(-num_rows // num_parts) * (num_parts - 1) >= num_rows:
        return f"has {num_rows} rows, too few for {num_parts} processes"
    return ""


def rows_of(layer: nn.Module) -> int:
    """Return the number of rows of the weight: the size of the vocabulary."""
    return int(layer.weight.shape[0])  # type: ignore[index,union-attr]


def styles_of(
    model: nn.Module, *, num_parts: int, keeps_cut: bool = False, evenly: bool = False
) -> dict[str, styling.ParallelStyle]:
    """Return the style of each layer, by its name.

    The plan is `derived_plan`, or the model's own `tensor_plan()`: a pattern of layer names -> colwise, rowwise, vocabulary, or
    gather (colwise, with outputs gathered immediately). Logits cut by the vocabulary are gathered too, unless `keeps_cut`. With
    `evenly`, vocabularies that the number of processes does not divide stay whole. ValueError if the model does not fit the
    plan.
    """
    answer = own_answer(model, "tensor_plan")
    plan: dict[str, str] = answer() if answer is not None else derived_plan(model, num_parts=num_parts)
    styles: dict[str, styling.ParallelStyle] = {}
    evenly = evenly or torch.__version__ < "2.12"  # its DTensors of uneven parts give other gradients
    for name, layer in model.named_modules():
        cut = _said(plan, name)
        if cut != "vocabulary":
            styles |= {name: _style(name, layer, cut, num_parts=num_parts)} if cut is not None else {}
        elif why := _vocabulary_problem(model, name, layer, plan, num_parts=num_parts):
            raise ValueError(f"tensor={num_parts}: {name} {why}; take other processes, or ddp, zero, fsdp or hsdp, which "
                             "take any number")  # fmt: skip
        elif not evenly or rows_of(layer) % num_parts == 0:
            styles[name] = ByTokens() if isinstance(layer, nn.Embedding) else ByOutputs(keeps_cut=keeps_cut)
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
        return ByOutputs()
    raise ValueError(f"tensor_plan() says {cut!r} of {name}; it can say colwise, rowwise, gather or vocabulary")
