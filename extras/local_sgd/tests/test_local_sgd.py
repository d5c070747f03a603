"""Local SGD is not one process, but it is what it says: the same as replicas trained one after the other by hand."""

import copy
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from extras.local_sgd import averaged_states
from extras.local_sgd.averaged_states import average_states
from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from framework.distributed.agreement import Agreement
from tests.harness import Says, assert_close, assert_same_bits, checked, command, finished, refused
from tests.test_resume import after_step, preempt

RANKS, SYNC_EVERY, SYNC_FIRST, STEPS = 3, 4, 2, 15
RUN = ["dataset=synthetic", "dataset.num_train=66", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
       "model=mlp", "model.dim=8", "precision=fp64", "global_batch_size=14", "trainer.max_epochs=null",
       f"trainer.max_steps={STEPS}", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=4", "optimizer=sgd",
       "optimizer.momentum=0.9", "scheduler=constant", "trainer.clip_grad_norm=1.0"]  # fmt: skip
LOCAL = ["parallel=local-sgd", f"launch.nproc_per_node={RANKS}", f"parallel.sync_every={SYNC_EVERY}",
         f"parallel.sync_first={SYNC_FIRST}"]  # fmt: skip

CHOICE = [*(word for word in RUN if not word.startswith("model")), "model._target_=tests.parallel.test_fsdp.Choice",
          "+model.of=layers", "+model.after=0"]  # fmt: skip


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


@pytest.mark.slow
def test_it_is_what_the_replicas_by_hand_are(tmp_path: Path) -> None:
    run, by_hand = finished(*RUN, *LOCAL, root=tmp_path / "runs"), simulated()
    for name, tensor in run.weights.items():
        assert torch.allclose(tensor, by_hand[name], rtol=0, atol=1e-10), name
    one_process = finished(*RUN, root=tmp_path / "one").weights
    assert any((run.weights[name] - one_process[name]).abs().max() > 1e-4 for name in one_process)  # it is not equal


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "stop"), [(1, 2), (5, 8), (8, 8)])  # a step later, or in the evaluation of step 8
def test_a_stop_waits_until_the_processes_agree_and_nothing_is_lost(cut: int, stop: int, tmp_path: Path) -> None:
    whole = finished(*RUN, *LOCAL, root=tmp_path / "whole")
    stopped = command(*RUN, *LOCAL, root=tmp_path / "runs", before=after_step(cut, preempt))
    assert stopped.code == 75, stopped.output
    assert stopped.summary["step"] == stop
    assert_same_bits(finished(*RUN, *LOCAL, root=tmp_path / "runs"), whole)


def test_evaluations_and_checkpoints_in_between_are_refused() -> None:
    assert refused(*RUN, *LOCAL, "trainer.eval_every=6", "checkpoint.every=2").splitlines() == [
        Says("trainer.eval_every: 6 ... parallel.sync_every=4"),
        Says("checkpoint.every: 2 ... parallel.sync_every=4"),
    ]


@pytest.mark.slow
def test_a_model_that_answers_no_question_is_trained_too(tmp_path: Path) -> None:
    line = [*RUN, *LOCAL, "dataset.image_size=32", "model=torchvision", "model.name=resnet18", "precision=fp32"]
    losses = [row["loss"] for row in finished(*[o for o in line if o != "model.dim=8"], root=tmp_path / "runs").rows]
    assert all(map(math.isfinite, losses)) and len(losses) == 15 + 4 + 1  # training, validation (the last at the end), test


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "gossip"])
def test_moments_of_a_parameter_without_dimensions_are_averaged_too(strategy: str, tmp_path: Path) -> None:
    line = [*(word for word in RUN if not word.startswith("optimizer")), "model._target_=tests.odd_models.Scalar",
            f"parallel={strategy}", "launch.nproc_per_node=3", "parallel.sync_every=4", "rehearse=false"]  # fmt: skip
    whole = finished(*line, root=tmp_path / "whole")
    stopped = command(*line, root=tmp_path / "runs", before=after_step(6, preempt))
    assert (stopped.code, stopped.summary["step"]) == (75, 8), stopped.output
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "gossip"])
def test_a_state_that_only_some_processes_have_is_averaged_over_these(strategy: str, tmp_path: Path) -> None:
    """Each process has trained one of two equal layers: neither may get the moments of the other."""
    line = [*(word for word in CHOICE if not word.startswith("optimizer")), f"parallel={strategy}", "launch.nproc_per_node=2", "parallel.sync_every=1",
            "trainer.eval_every=null", "checkpoint.every=1", "trainer.max_steps=6"]  # fmt: skip
    whole = finished(*line, root=tmp_path / "whole")
    held = {}
    for file in whole.directory.glob("checkpoints/step_00000006/*.safetensors"):
        held |= load_file(file)
    moments = [value for name, value in held.items() if re.search(r"layers\.[01]\.weight.*exp_avg$", name)]
    assert len(moments) == 4 and not any(torch.equal(one, other) for one, other in itertools.combinations(moments, 2))
    stopped = command(*line, root=tmp_path / "runs", before=after_step(1, preempt))
    assert stopped.code == 75, stopped.output
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


@pytest.mark.slow
def test_the_first_steps_sum_gradients_that_only_some_processes_have(tmp_path: Path) -> None:
    line = [*CHOICE, "trainer.max_steps=6", "trainer.eval_every=null", "checkpoint.every=null", "micro_batch_size=7", "launch.nproc_per_node=2"]  # fmt: skip
    ddp = finished(*line, "parallel=ddp", "parallel.find_unused_parameters=true", root=tmp_path / "ddp")
    assert_close(finished(*line, "parallel=local-sgd", "parallel.sync_first=6", root=tmp_path / "runs"), ddp)


def test_complex_moments_and_lists_of_tensors_are_averaged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[Tensor] = []
    monkeypatch.setattr(averaged_states, "sum_all", averaged.extend)
    optimizer = torch.optim.SGD([torch.ones(2, dtype=torch.complex64, requires_grad=True)], lr=0.1, momentum=0.9)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.abs().sum().backward()
    optimizer.step()
    optimizer.state[parameter]["factors"] = [
        torch.ones(2),
        {"right": torch.ones(3), "count": 4},
    ]  # as second-order methods have
    average_states(optimizer, [parameter], agreement=Agreement(None), num_ranks=2)
    assert [tensor.dtype for tensor in averaged] == [torch.float32, torch.float32, torch.complex64]
    left, more = optimizer.state[parameter]["factors"]
    assert left.tolist() == [0.5, 0.5] and more["right"].tolist() == [0.5] * 3 and more["count"] == 4


def test_states_are_averaged_in_one_order_whatever_order_a_checkpoint_has_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tensor lies in a message decides in which order a ring of three or more sums it."""
    averaged: list[Tensor] = []
    of_rank_0: list[Tensor] = []
    monkeypatch.setattr(averaged_states, "sum_all", averaged.extend)
    monkeypatch.setattr(averaged_states, "broadcast_all", lambda of_ranks: of_rank_0.extend(of_ranks[0]))
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["count"] = torch.tensor(3)  # a whole number has no mean
    orders = []
    for turn in (1, -1):
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = dict([*state.items()][::turn])
        averaged.clear()
        average_states(optimizer, [*module.parameters()], agreement=Agreement(None), num_ranks=1)
        orders.append([tensor.data_ptr() for tensor in averaged])
    # the counts of steps too, which stay equal
    assert orders[0] == orders[1] and len(orders[0]) == 6 and len(of_rank_0) == 2 * len(optimizer.state)
