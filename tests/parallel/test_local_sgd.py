"""Local SGD is not one process, but it is what it says: the same as replicas trained one after the other by hand."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from framework.parallel import local_sgd
from framework.parallel.local_sgd import LocalSGD
from tests.harness import Says, assert_same_bits, checked, command, finished, slow_but
from tests.test_resume import after_step, preempt

RANKS, SYNC_EVERY, SYNC_FIRST, STEPS = 3, 4, 2, 15
RUN = ["dataset=synthetic", "dataset.num_train=66", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
       "model=mlp", "model.dim=8", "precision=fp64", "global_batch_size=14", "trainer.max_epochs=null",
       f"trainer.max_steps={STEPS}", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=4", "optimizer=sgd",
       "optimizer.momentum=0.9", "scheduler=constant", "trainer.clip_grad_norm=1.0"]  # fmt: skip
LOCAL = ["parallel=local-sgd", f"launch.nproc_per_node={RANKS}", f"parallel.sync_every={SYNC_EVERY}",
         f"parallel.sync_first={SYNC_FIRST}"]  # fmt: skip


def simulated() -> dict[str, torch.Tensor]:
    """Train the replicas in turn, step by step, in one process and without the framework's loop."""
    config = checked(*RUN)
    first = components.model(config.model, seed=config.seed).double()
    models = [first, *(copy.deepcopy(first) for _ in range(RANKS - 1))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=config.optimizer["lr"], momentum=0.9) for model in models]
    dataset = components.dataset(config.dataset)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    loaders = [
        Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=rank, dp_size=RANKS,
               device=torch.device("cpu"), dtype=torch.float64).train(0)
        for rank in range(RANKS)
    ]  # fmt: skip
    for step in range(STEPS):
        parts = [next(loader) for loader in loaders]
        for model, part in zip(models, parts):
            model.zero_grad()
            (micro_batch,) = part.micro_batches
            total = cross_entropy(model(micro_batch.inputs), micro_batch.targets, reduction="sum")
            (total / (part.num_samples if step < SYNC_FIRST else len(micro_batch.targets))).backward()
        if step < SYNC_FIRST:
            for parameters in zip(*(model.parameters() for model in models)):
                total = sum(p.grad for p in parameters)
                for parameter in parameters:
                    parameter.grad = total.clone()
        for model, optimizer in zip(models, optimizers):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if (step + 1) % SYNC_EVERY == 0 or step == STEPS - 1:
            for parameters in zip(*(model.parameters() for model in models)):
                for tensors in (
                    [p.data for p in parameters],
                    [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, parameters)],
                ):
                    mean = sum(tensors) / RANKS
                    for tensor in tensors:
                        tensor.copy_(mean)
    return {name: value.detach() for name, value in first.state_dict().items()}


def test_it_is_what_the_replicas_by_hand_are(tmp_path: Path) -> None:
    run, by_hand = finished(*RUN, *LOCAL, root=tmp_path / "runs"), simulated()
    for name, tensor in run.weights.items():
        assert torch.allclose(tensor, by_hand[name], rtol=0, atol=1e-10), name
    one_process = finished(*RUN, root=tmp_path / "one").weights
    assert any((run.weights[name] - one_process[name]).abs().max() > 1e-4 for name in one_process)  # it is not equal


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "stop"), [(1, 2), (5, 8), (8, 12)])  # the ranks agree on a stop a step later
def test_a_stop_waits_until_the_processes_agree_and_nothing_is_lost(cut: int, stop: int, tmp_path: Path) -> None:
    whole = finished(*RUN, *LOCAL, root=tmp_path / "whole")
    stopped = command(*RUN, *LOCAL, root=tmp_path / "runs", before=after_step(cut, preempt))
    assert stopped.code == 75, stopped.output
    assert stopped.summary["step"] == stop
    assert_same_bits(finished(*RUN, *LOCAL, root=tmp_path / "runs"), whole)


def test_evaluations_and_checkpoints_in_between_are_refused(tmp_path: Path) -> None:
    refused = command(*RUN, *LOCAL, "trainer.eval_every=6", "checkpoint.every=2", root=tmp_path / "runs")
    assert refused.code == 78
    assert refused.output.splitlines() == [
        Says("trainer.eval_every: 6 ... parallel.sync_every=4"),
        Says("checkpoint.every: 2 ... parallel.sync_every=4"),
    ]


@pytest.mark.slow
def test_a_model_that_answers_no_question_is_trained_too(tmp_path: Path) -> None:
    line = [*RUN, *LOCAL, "dataset.image_size=32", "model=torchvision", "model.name=resnet18", "precision=fp32"]
    losses = [row["loss"] for row in finished(*[o for o in line if o != "model.dim=8"], root=tmp_path / "runs").rows]
    assert all(map(math.isfinite, losses)) and len(losses) == 15 + 4 + 1  # training, validation (the last at the end), test


@pytest.mark.parametrize("strategy", slow_but(["local-sgd"], ["local-sgd", "diloco", "gossip"]))
def test_moments_of_a_parameter_without_dimensions_are_averaged_too(strategy: str, tmp_path: Path) -> None:
    line = [*(word for word in RUN if not word.startswith("optimizer")), "model._target_=tests.odd_models.Scalar",
            f"parallel={strategy}", "launch.nproc_per_node=3", "parallel.sync_every=4", "rehearse=false"]  # fmt: skip
    whole = finished(*line, root=tmp_path / "whole")
    stopped = command(*line, root=tmp_path / "runs", before=after_step(6, preempt))
    assert (stopped.code, stopped.summary["step"]) == (75, 8), stopped.output
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


def test_states_are_averaged_in_one_order_whatever_order_a_checkpoint_has_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tensor lies in a message decides in which order a ring of three or more sums it."""
    averaged: list[Tensor] = []
    monkeypatch.setattr(local_sgd, "sum_all", averaged.extend)
    of_rank_0: list[Tensor] = []
    monkeypatch.setattr(local_sgd, "broadcast_all", lambda of_ranks: of_rank_0.extend(of_ranks[0]))
    module = torch.nn.Linear(2, 2)
    engine = LocalSGD(
        SimpleNamespace(module=module, task=None, mesh=None, observers=[], dp_rank=0, dp_size=3), sync_every=1, sync_first=0
    )  # type: ignore[arg-type]
    optimizer = engine.make_optimizer(lambda _: torch.optim.AdamW(module.parameters()), [])
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    counts = [state.setdefault("count", torch.tensor(3)) for state in optimizer.state.values()]  # a whole number has no mean
    orders = []
    for turn in (1, -1):
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = dict([*state.items()][::turn])
        averaged.clear()
        assert engine.meet(1, is_last=False)
        orders.append([tensor.data_ptr() for tensor in averaged])
    assert (
        orders[0] == orders[1] and len(orders[0]) == 8 and len(of_rank_0) == 2 * len(counts)
    )  # the counts of steps too, which stay equal
