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
        self._types: list[torch.dtype] = []  # the dtypes of the links' outputs; not known before the first batch

    def like(self, inputs: Tree) -> list[Tensor]:
        """Return meta tensors like the outputs that each stage but the last sends for such inputs."""
        outputs = self._chain.outputs(inputs)
        types = [self._sent_as or self._computed(number, inputs) for number in range(len(self._last))]
        shapes = [outputs[link].shape for link in self._last]
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, types)]

    def packed(self, value: Tensor, *, stage: int, inputs: Tree) -> Tensor:
        """Return a stage's output in the form in which it is sent.

        It is contiguous. It is not a view, which zero-bubble cannot detach, and not the wrapper of an unfinished collective.
        """
        value = value.to(self._sent_as or self._computed(stage, inputs)).contiguous()
        return value.clone() if is_view(value) or type(value) is not Tensor else value

    def unpacked(self, value: Tensor, *, stage: int, inputs: Tree) -> Tensor:
        """Return a received tensor in the form in which the next stage takes it."""
        return value.to(self._computed(stage, inputs))

    def _computed(self, stage: int, inputs: Tree) -> torch.dtype:
        if not self._types:
            self._types = self._follow(inputs)
        dtype = self._types[self._last[stage]]
        return dtype if dtype.is_floating_point or dtype.is_complex else self._plain

    def _follow(self, inputs: Tree) -> list[torch.dtype]:
        outputs = self._chain.outputs(inputs)[:-1]
        if self._forward.autocast is None:
            return [output.dtype for output in outputs]

        def stand_in(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._forward.device)

        def follow() -> list[torch.dtype]:
            return self._chain.types(map_tensors(stand_in, inputs), stand_in=stand_in)

        try:
            with stand_ins(), torch.no_grad():
                types: Any = self._forward.under_autocast(follow)
        except Exception as error:  # a user's model may raise anything if it reads numbers
            LOGGER.debug("the types between the stages are not known, and all are %s: %s", self._plain, error)
            types = [self._plain] * len(outputs)
        return types
