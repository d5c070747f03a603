"""DiLoCo is not one process, but it is the paper's algorithm, and a run under it is exact after a kill and continues elsewhere."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from extras.local_sgd.tests.test_local_sgd import RUN as BARE
from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from framework.optim.optimizers import hidden_matrices, trainable
from tests.harness import Ended, Says, assert_same_bits, checked, command, finished, refused, together
from tests.test_any_to_any import RUN as TOKENS
from tests.test_any_to_any import line, note_state
from tests.test_divergence import SKIP, bad_batches
from tests.test_resume import after_step, crash, preempt

RANKS, EVERY, FIRST, STEPS, SIZE = 2, 4, 2, 15, 14
ADAMW = ["optimizer=adamw", "optimizer.lr=0.02", "optimizer.weight_decay=0.1"]
RUN = [*BARE[: BARE.index("optimizer=sgd")], "scheduler=constant", "trainer.clip_grad_norm=1.0", *ADAMW,
       "trainer.ema_decay=0.8", "trainer.freeze=[layers.0.0.weight]"]  # fmt: skip
DILOCO = ["parallel=diloco", f"launch.nproc_per_node={RANKS}", f"parallel.sync_every={EVERY}", f"parallel.sync_first={FIRST}"]
FOUR = ["trainer.eval_every=4", "checkpoint.every=4"]


def by_hand(lr: float, momentum: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters and their moving average after Algorithm 1, two workers in turn, with torch's own outer SGD."""
    config = checked(*RUN)
    shared = components.model(config.model, seed=config.seed).double()
    shared.layers[0][0].weight.requires_grad_(False)
    workers = [copy.deepcopy(shared) for _ in range(RANKS)]
    averages = [copy.deepcopy(shared) for _ in range(RANKS)]
    of_shared = [p for p in shared.parameters() if p.requires_grad]
    outer = torch.optim.SGD(of_shared, lr=lr, momentum=momentum, nesterov=momentum > 0)
    build = components.optimizer_builder(config.optimizer)
    inner = [build(trainable(worker, hidden=hidden_matrices(worker))) for worker in workers]
    dataset = components.dataset(config.dataset)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=SIZE, seed=0, drop_last=False)
    loaders = [
        Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=rank, dp_size=RANKS,
               device=torch.device("cpu"), dtype=torch.float64).train(0)
        for rank in range(RANKS)
    ]  # fmt: skip
    for step in range(STEPS):
        for worker, loader in zip(workers, loaders):
            part = next(loader)
            (micro_batch,) = part.micro_batches
            worker.zero_grad()
            total = cross_entropy(worker(micro_batch.inputs), micro_batch.targets, reduction="sum")
            (total / (part.num_samples if step < FIRST else len(micro_batch.targets))).backward()
        trained = [[p for p in worker.parameters() if p.requires_grad] for worker in workers]
        if step < FIRST:  # as one process
            for same in zip(*trained):
                total = sum(p.grad for p in same)
                for parameter in same:
                    parameter.grad = total.clone()
        for own, optimizer, worker, average in zip(trained, inner, workers, averages):
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()
            for p, mean in zip(worker.parameters(), average.parameters()):
                mean.data.lerp_(p.data, 0.2)
        if step < FIRST:
            shared.load_state_dict(workers[0].state_dict())
        elif (step + 1) % EVERY == 0 or step == STEPS - 1:
            for parameter, same in zip(of_shared, zip(*trained)):
                parameter.grad = parameter.data - sum(p.data for p in same) / RANKS
            outer.step()
            for worker in workers:
                worker.load_state_dict(shared.state_dict())
            states = [[optimizer.state[p][key] for optimizer, p in zip(inner, same)]
                      for same in zip(*trained) for key in ("exp_avg", "exp_avg_sq")]  # fmt: skip
            for same_tensors in [*states, *zip(*([p.data for p in average.parameters()] for average in averages))]:
                mean = sum(same_tensors) / RANKS
                for tensor in same_tensors:
                    tensor.copy_(mean)
    return ({name: p.detach() for name, p in shared.named_parameters()},
            {name: p.detach() for name, p in averages[0].named_parameters()})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5)])
def test_it_is_the_algorithm_of_the_paper(lr: float, momentum: float, tmp_path: Path) -> None:
    options = [f"parallel.outer_lr={lr}", f"parallel.outer_momentum={momentum}"]
    averaged = finished(*RUN, *DILOCO, *FOUR, *options, root=tmp_path / "average")
    bare = finished(*RUN, *DILOCO, *FOUR, *options, "trainer.ema_decay=null", root=tmp_path / "bare")
    for expected, run in zip(by_hand(lr, momentum), (bare, averaged)):
        for name, tensor in run.weights.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-10), name


ONE = ["parallel=diloco", f"parallel.sync_every={EVERY}"]
PLAIN = ["parallel.outer_lr=1.0", "parallel.outer_momentum=0.0"]


@pytest.mark.slow
def test_alone_and_without_an_outer_optimizer_it_is_plain_training(tmp_path: Path) -> None:
    diloco, single = (finished(*RUN, *FOUR, *more, root=tmp_path / f"{len(more)}") for more in ([*ONE, *PLAIN], []))
    assert all(torch.equal(tensor, single.weights[name]) for name, tensor in diloco.weights.items())
    other = finished(*RUN, *FOUR, *ONE, root=tmp_path / "other").weights
    assert any((tensor - other[name]).abs().max() > 1e-4 for name, tensor in single.weights.items())


@pytest.mark.slow
def test_without_an_outer_optimizer_it_is_local_sgd(tmp_path: Path) -> None:
    local = ["parallel=local-sgd", *DILOCO[1:]]
    diloco, sgd = (finished(*RUN, *FOUR, *more, root=tmp_path / f"{len(more)}") for more in ([*DILOCO, *PLAIN], local))
    assert all(torch.equal(tensor, sgd.weights[name]) for name, tensor in diloco.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("act", [preempt, crash])
@pytest.mark.parametrize("optimizer", [[], ["optimizer=sgd", "optimizer.momentum=0"]], ids=["adamw", "sgd without state"])
def test_stopped_or_killed_it_ends_with_the_same_bits(act: Callable[[], None], optimizer: list[str], tmp_path: Path) -> None:
    without = [word for word in RUN if not (optimizer and word in ADAMW)]
    run = [*without, *optimizer, *DILOCO, *FOUR]
    whole = finished(*run, root=tmp_path / "whole")
    stopped = command(*run, root=tmp_path / "runs", before=after_step(10, act))
    assert stopped.code != 0
    assert_same_bits(finished(*run, root=tmp_path / "runs"), whole)


def momenta(state: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in state.items() if name.endswith("/outer_momentum")}


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(tmp_path: Path) -> None:
    """And back: the outer momentum goes along, to the last bit."""
    run, five = [*TOKENS, "trainer.max_steps=15"], ["parallel=diloco", "parallel.sync_every=5"]
    hops = [[*five, "launch.nproc_per_node=3"], line("fsdp"), [*five, "launch.nproc_per_node=2"]]
    previous: Ended | None = None
    states = []  # saved by the first, and restored by the others
    for hop, how in enumerate(hops):
        resume = [f"run.resume={previous.directory}"] if previous else []
        stop = [after_step(5 * hop + 4, preempt)] if hop < 2 else []
        before = together(note_state(tmp_path / "state"), *stop)
        previous = command(*run, *how, *resume, root=tmp_path / str(hop), before=before)
        assert previous.code == (75 if hop < 2 else 0), previous.output
        assert previous.summary["step"] == 5 * hop + 5
        states.append(json.loads((tmp_path / "state").read_text()))
    assert states[1] == states[0] and momenta(states[0])
    assert momenta(states[2]) == momenta(states[0])  # fsdp has no use for it


SEVEN = ["trainer.max_steps=9", "trainer.eval_every=7", "checkpoint.every=7", "parallel.sync_every=7", SKIP]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "gossip"])
def test_processes_agree_also_after_a_step_that_was_left_out(strategy: str, tmp_path: Path) -> None:
    line = [*RUN, "trainer.ema_decay=null", *SEVEN, f"parallel={strategy}", "launch.nproc_per_node=2"]
    before = together(bad_batches(80), note_state(tmp_path / "state"))  # which asserts that no rank differs
    ended = finished(*line, root=tmp_path / "runs", before=before)
    assert "of step 7 is not finite: " in ended.output


def test_what_cannot_be_is_refused_before_the_start() -> None:
    line = [*RUN, *DILOCO, *FOUR]
    assert refused(*line, "trainer.eval_every=6") == Says("trainer.eval_every: 6 ... parallel.sync_every=4")
    assert refused(*line, "parallel.outer_momentum=1") == Says("parallel.outer_momentum: 1 ...")
