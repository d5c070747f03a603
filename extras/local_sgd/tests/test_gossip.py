"""Gossip is not one process, but it is what it says: replicas that each average with one other after every step."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from extras.local_sgd.gossip import distance
from extras.local_sgd.tests.test_local_sgd import RUN, STEPS, SYNC_EVERY, SYNC_FIRST
from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from tests.harness import Says, assert_same_bits, checked, command, finished, refused
from tests.test_resume import after_step, crash, preempt

ALL = [f"parallel.sync_every={SYNC_EVERY}", f"parallel.sync_first={SYNC_FIRST}"]


def line(num_ranks: int) -> list[str]:
    return ["parallel=gossip", f"launch.nproc_per_node={num_ranks}", *ALL]


def by_hand(num_ranks: int) -> dict[str, torch.Tensor]:
    """Train the replicas in turn, in one process."""
    config = checked(*RUN)
    first = components.model(config.model, seed=config.seed).double()
    models = [first, *(copy.deepcopy(first) for _ in range(num_ranks - 1))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=config.optimizer["lr"], momentum=0.9) for model in models]
    dataset = components.dataset(config.dataset)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    loaders = [
        Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=rank, dp_size=num_ranks,
               device=torch.device("cpu"), dtype=torch.float64).train(0)
        for rank in range(num_ranks)
    ]  # fmt: skip
    num_mixed = 0
    for step in range(1, STEPS + 1):
        parts = [next(loader) for loader in loaders]
        for model, part in zip(models, parts):
            model.zero_grad()
            (micro_batch,) = part.micro_batches
            total = cross_entropy(model(micro_batch.inputs), micro_batch.targets, reduction="sum")
            (total / (part.num_samples if step <= SYNC_FIRST else len(micro_batch.targets))).backward()
        if step <= SYNC_FIRST:
            for same in zip(*(model.parameters() for model in models)):
                total = sum(p.grad for p in same)
                for parameter in same:
                    parameter.grad = total.clone()
        for model, optimizer in zip(models, optimizers):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        is_common = step % SYNC_EVERY == 0 or step == STEPS
        far = {2: [1], 3: [1, 2], 4: [1, 2]}[num_ranks]
        far_now = far[(step - 1) % len(far)]
        num_mixed += step > SYNC_FIRST and not is_common
        for same in zip(*(model.parameters() for model in models)):
            momenta = [optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, same)]
            if is_common:
                for tensors in ([p.data for p in same], momenta):
                    mean = sum(tensors) / num_ranks
                    for tensor in tensors:
                        tensor.copy_(mean)
            elif step > SYNC_FIRST:
                before = [p.detach().clone() for p in same]
                for rank, parameter in enumerate(same):
                    parameter.data.copy_((before[rank] + before[rank - far_now]) / 2)
    assert num_mixed == 9
    return {name: value.detach() for name, value in first.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_it_is_what_the_replicas_by_hand_are(num_ranks: int, tmp_path: Path) -> None:
    run, expected = finished(*RUN, *line(num_ranks), root=tmp_path / "runs"), by_hand(num_ranks)
    for name, tensor in run.weights.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-10), name
    local = finished(*RUN, "parallel=local-sgd", *line(num_ranks)[1:], root=tmp_path / "local").weights
    assert any((tensor - local[name]).abs().max() > 1e-6 for name, tensor in run.weights.items())


@pytest.mark.slow
def test_alone_it_is_plain_training(tmp_path: Path) -> None:
    alone, single = finished(*RUN, *line(1), root=tmp_path / "alone"), finished(*RUN, root=tmp_path / "single")
    for name, tensor in single.weights.items():
        assert torch.allclose(alone.weights[name], tensor, rtol=0, atol=1e-12), name


ADAMW = [*(word for word in RUN if not word.startswith("optimizer")), "optimizer=adamw"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gossip", "local-sgd", "diloco"])
@pytest.mark.parametrize("act", [preempt, crash])
def test_stopped_or_killed_it_ends_with_the_same_bits(act: Callable[[], None], strategy: str, tmp_path: Path) -> None:
    run = [*ADAMW, f"parallel={strategy}", *line(3)[1:]]
    whole = finished(*run, root=tmp_path / "whole")
    stopped = command(*run, root=tmp_path / "runs", before=after_step(10, act))
    assert stopped.code != 0
    assert_same_bits(finished(*run, root=tmp_path / "runs"), whole)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 13])
def test_after_as_many_steps_as_there_are_distances_each_has_a_share_of_all(num_ranks: int) -> None:
    shares = torch.eye(num_ranks, dtype=torch.float64)  # of each process's weights (columns) in each process (rows)
    steps = max(1, (num_ranks - 1).bit_length())
    for step in range(5, 5 + steps):
        shares = (shares + shares.roll(distance(step, num_ranks=num_ranks), dims=0)) / 2
    assert (shares > 0).all()
    assert torch.allclose(shares.mean(0), torch.full((num_ranks,), 1 / num_ranks, dtype=torch.float64))  # the mean stays


def test_evaluations_and_checkpoints_in_between_are_refused() -> None:
    assert refused(*RUN, *line(2), "trainer.eval_every=6") == Says("trainer.eval_every: 6 ... parallel.sync_every=4")
