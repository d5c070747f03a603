"""The tensors that the stages of a pipeline send to each other: their shapes and dtypes, which both sides must know before."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from framework.engine.forward import Forward
from framework.modules.tensors import Tree, map_tensors
from framework.parallel.pipelining.chain import Listed
from framework.parallel.pipelining.own_forward import OwnForward
from framework.runtime.log import LOGGER
from framework.runtime.torch_internals import is_view, stand_ins

SendDtype = Literal["bf16"] | None
_DTYPES = {"bf16": torch.bfloat16, None: None}


class Sent:
    """The activations between the stages, each in the dtype that it has in one process; their gradients have the same dtype.

    Under autocast, this is bf16 or fp16 where a stage ends with a layer that computes in it, and the parameters' own dtype
    where a stage ends with a sum of both, such as a transformer's residual stream. `dtype` sends all activations in another
    dtype. This rounds them: half the bytes, but not the same as in one process.
    """

    def __init__(
        self, chain: Listed | OwnForward, spans: Sequence[range], *, forward: Forward, plain: torch.dtype, dtype: SendDtype
    ) -> None:
        self._chain = chain
        self._last = [span[-1] for span in spans[:-1]]  # the last link of each stage, except the last stage
        self._forward = forward
        self._plain = plain
        self._sent_as = _DTYPES[dtype]
        self._types: list[tuple[torch.dtype, ...]] = []  # of what the links send; not known before the first batch

    def like(self, inputs: Tree) -> list[tuple[Tensor, ...]]:
        """Return meta tensors like those that each stage but the last sends for such inputs."""
        outputs = self._chain.outputs(inputs)
        return [
            tuple(
                torch.empty(value.shape, dtype=self._sent_as or dtype, device="meta")
                for value, dtype in zip(outputs[link], self._computed(stage, inputs))
            )
            for stage, link in enumerate(self._last)
        ]

    def packed(self, values: Sequence[Tensor], *, stage: int, inputs: Tree) -> tuple[Tensor, ...]:
        """Return what a stage sends in the form in which it is sent.

        It is contiguous. It is not a view, which zero-bubble cannot detach, and not the wrapper of an unfinished collective.
        Of several, the stage may have computed one from another, or has received it: each is a tensor of its own.
        """
        types = self._computed(stage, inputs)
        sent = [value.to(self._sent_as or dtype).contiguous() for value, dtype in zip(values, types)]
        is_alone = len(sent) == 1
        return tuple(value if is_alone and not is_view(value) and type(value) is Tensor else value.clone() for value in sent)

    def unpacked(self, values: Sequence[Tensor], *, stage: int, inputs: Tree) -> tuple[Tensor, ...]:
        """Return what a stage has received from `stage` in the form in which it takes it."""
        return tuple(value.to(dtype) for value, dtype in zip(values, self._computed(stage, inputs))) if values else ()

    def _computed(self, stage: int, inputs: Tree) -> list[torch.dtype]:
        if not self._types:
            self._types = self._follow(inputs)
        types = self._types[self._last[stage]]
        return [dtype if dtype.is_floating_point or dtype.is_complex else self._plain for dtype in types]

    def _follow(self, inputs: Tree) -> list[tuple[torch.dtype, ...]]:
        outputs = self._chain.outputs(inputs)[:-1]
        if self._forward.autocast is None:
            return [tuple(value.dtype for value in output) for output in outputs]

        def stand_in(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._forward.device)

        def follow() -> list[tuple[torch.dtype, ...]]:
            return self._chain.types(map_tensors(stand_in, inputs), stand_in=stand_in)

        try:
            with stand_ins(), torch.no_grad():
                types: Any = self._forward.under_autocast(follow)
        except Exception as error:  # a user's model may raise anything if it reads numbers
            LOGGER.debug("the types between the stages are not known, and all are %s: %s", self._plain, error)
            types = [(self._plain,) * len(output) for output in outputs]
        return types
