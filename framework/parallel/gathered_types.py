"""The dtypes in which FSDP gathers parameters and sums gradients."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import functional as F

from framework.engine.forward import Forward
from framework.modules.parts import separate
from framework.modules.trace import Operation, follow
from framework.runtime.torch_internals import BATCH_NORMS

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
# the functions whose arguments autocast casts to 16 bits
_CAST = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.addmm, torch.mm, torch.matmul, Tensor.matmul, torch.bmm}


@dataclass(frozen=True)
class Types:
    """The dtypes in which parameters are gathered: a chosen dtype, or the dtypes in which autocast uses them.

    Under autocast, a linear layer casts its weight before it multiplies. Here the cast comes before the gather, with half the
    bytes and the same bits. Parameters that autocast uses in float32 (norms, embeddings) are gathered in float32. All gradients
    are float32 before they are summed over the ranks and over the micro-batches, as in one process.
    """

    compute: torch.dtype | None
    reduce: torch.dtype | None
    autocast: torch.dtype | None = None  # None: parameters are gathered in `compute`, or in their own dtype
    cast: frozenset[tuple[nn.Module, str]] = frozenset()  # the parameters that autocast casts and that no other operation uses
    apart: frozenset[nn.Module] = frozenset()  # modules with parameters that only their own calls use
    note: str = ""  # why parameters are gathered in float32 although autocast is on

    @classmethod
    def of(
        cls, model: nn.Module, *, forward: Forward, param_dtype: str | None = None, reduce_dtype: str | None = None
    ) -> "Types":
        """Return the types for the strategy's options and the run's autocast. Call it before layers are cut.

        Traces show how a model uses its parameters: one of a training pass, forward and backward, and one of an evaluation.
        If a trace is not complete, or if a user's own step may read a weight between forward and backward, all parameters are
        gathered in their own dtype. A trace does not show operations for some batches only, such as an occasional penalty.
        """
        reduce, autocast = _DTYPES[reduce_dtype], forward.autocast
        if autocast is None or param_dtype not in (None, "fp32"):
            return cls(_DTYPES[param_dtype], reduce)
        if param_dtype == "fp32":
            return cls(None, reduce)  # autocast starts from float32: inputs stay as they are
        if forward.trains_by_step or forward.example is None:
            why = "the task has its own step" if forward.trains_by_step else "the dataset does not describe a sample"
            return cls(None, reduce, note=f"in float32, since {why}")

        def is_cast(operation: Operation) -> bool:
            kind = forward.device.type
            is_on = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == autocast
            # without a cache, each use has its own rounded gradient; without gradients, the operation is in a backward pass or
            # in the forward of a torch.autograd.Function, which may keep its arguments
            return operation in _CAST and is_on and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()

        with torch.autocast(forward.device.type, dtype=autocast):
            traces = [follow(model, forward.example, training=mode, note=is_cast) for mode in (True, False)]
        if not all(trace.is_whole for trace in traces):
            return cls(None, reduce, note="in float32, since the model's forward or backward cannot be followed")
        uses = [event for trace in traces for event in trace.events if event.kind in ("use", "see")]
        used, otherwise = ({id(use.what) for use in uses if use.value is is_cast} for is_cast in (True, False))
        elsewhere = set[int]().union(*(trace.read_elsewhere() for trace in traces))
        entered = traces[0].entered() & traces[1].entered()
        cast, apart = list[tuple[nn.Module, str]](), list[nn.Module]()
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            cast += [(module, name) for name, p in own.items() if id(p) in used - otherwise and p.dtype is torch.float32]
            if module in entered and not any(id(p) in elsewhere for p in nn.Module.parameters(module)):
                apart.append(module)
        return cls(None, reduce, autocast, frozenset(cast), frozenset(apart))

    def policies(self, unit: nn.Module, model: nn.Module) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
        """Yield modules of a unit and their policies, innermost first: those kept in float32, then the unit with the rest."""
        plain = MixedPrecisionPolicy(reduce_dtype=self.reduce)
        if self.autocast is not None:
            kept = self._kept(unit)
            if unit in kept or not self.apart.issuperset(kept) or len(separate(kept, model)) < len(kept):
                yield unit, plain  # one dtype for all: autocast casts after the gather
                return
            yield from ((layer, plain) for layer in kept)
            reduce = self.reduce or torch.float32
            yield unit, MixedPrecisionPolicy(param_dtype=self.autocast, reduce_dtype=reduce, cast_forward_inputs=False)
            return
        if self.compute is not None:  # running statistics in 16 bits would not change
            norms = [layer for layer in _unsharded(unit) if isinstance(layer, BATCH_NORMS) and layer is not unit]
            yield from ((layer, MixedPrecisionPolicy()) for layer in norms)
        yield unit, MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)

    def _kept(self, module: nn.Module) -> list[nn.Module]:
        """Return the outermost modules, not sharded yet, with parameters that autocast does not cast."""
        if isinstance(module, FSDPModule):
            return []
        if any((module, name) not in self.cast for name, _ in module.named_parameters(recurse=False)):
            return [module]
        return list(dict.fromkeys(layer for child in module.children() for layer in self._kept(child)))


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, except the modules that are already sharded."""
    if not isinstance(module, FSDPModule):
        yield module
        for child in module.children():
            yield from _unsharded(child)
