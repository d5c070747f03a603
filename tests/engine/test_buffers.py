"""Buffers: every micro-batch reads those of the step's start, and micro-batch 0 decides those of its end, however they are moved."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from framework.engine.buffers import Buffers
from tests.harness import Counting


class Holder(nn.Module):
    def __init__(self, move: Callable[["Holder"], None]) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(3))
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.norm = nn.BatchNorm1d(2)
        self.move = move


def in_place(holder: Holder) -> None:
    holder.value += 1


def through_data(holder: Holder) -> None:
    holder.value.data.add_(1)


def another_tensor(holder: Holder) -> None:
    holder.value = holder.value + 1


def longer(holder: Holder) -> None:
    holder.value = torch.cat([holder.value, torch.ones(1)]) + 1


MOVES = [in_place, through_data, another_tensor, longer]


def after_moves(move: Callable[[Holder], None], count: int) -> Tensor:
    holder = Holder(move)
    for _ in range(count):
        move(holder)
    return holder.value


@pytest.mark.parametrize("move", MOVES)
def test_each_micro_batch_reads_those_of_the_start_and_micro_batch_0_decides(move: Callable[[Holder], None]) -> None:
    holder = Holder(move)
    buffers = Buffers(holder)
    for step in range(2):
        buffers.begin_step(is_alone=False)
        for number in (2, 0, 1, None):  # in any order, padding too
            assert torch.equal(holder.value, after_moves(move, step))
            move(holder)
            buffers.end_forward(number)
        buffers.end_step()
        assert torch.equal(holder.value, after_moves(move, step + 1))


@pytest.mark.parametrize("move", MOVES)
def test_a_rank_without_micro_batch_0_has_what_it_had(move: Callable[[Holder], None]) -> None:
    holder = Holder(move)
    before = holder.value
    buffers = Buffers(holder)
    buffers.begin_step(is_alone=False)
    move(holder)
    buffers.end_forward(3)
    buffers.end_step()
    assert holder.value is before and torch.equal(before, torch.zeros(3))


@pytest.mark.parametrize("rests", [0, 2])
@pytest.mark.parametrize("move", MOVES[:3])
def test_rank_0_sends_what_its_forward_has_moved_and_nothing_else(move: Callable[[Holder], None], rests: int) -> None:
    """Running statistics wait for an evaluation or a checkpoint: no training forward reads them."""
    sent: list[list[Tensor]] = []

    def broadcast(tensors: Sequence[Tensor]) -> None:
        sent.append([tensor.clone() for tensor in tensors])

    holder = Holder(move)
    buffers = Buffers(holder, broadcast=broadcast)
    for step in range(-rests, 3):
        sent.clear()
        buffers.begin_step(is_alone=True)
        if step >= 0:
            move(holder)
        holder.norm(torch.randn(4, 2))
        buffers.end_forward(0)
        buffers.end_step()
        (flags,), moved = sent
        assert flags.tolist() == [step >= 0, 0] and flags.device.type == "cpu"  # whose numbers the host reads without waiting
        assert all(torch.equal(one, torch.full((3,), step + 1.0)) for one in moved) and len(moved) == (step >= 0)


def test_copies_are_made_by_type_not_one_by_one() -> None:
    """A launch for each buffer is what a GPU would wait for: resnet50 has 159."""
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(30)))
    buffers = Buffers(model)
    buffers.begin_step(is_alone=False)
    with Counting() as counting:
        for number in (0, 1):
            buffers.end_forward(number)
        buffers.end_step()
    assert counting.calls["clone"] == counting.calls["copy_"] == 0
    assert counting.calls["_foreach_copy_"] == 8, "of the floats and of the counters: kept once, put back twice, left once"


def test_statistics_alone_are_not_spoken_of() -> None:
    sent: list[Sequence[Tensor]] = []
    norm = nn.BatchNorm1d(2)
    buffers = Buffers(norm, broadcast=sent.append)
    buffers.begin_step(is_alone=True)
    norm(torch.randn(4, 2))
    buffers.end_forward(0)
    buffers.end_step()
    assert sent == []
