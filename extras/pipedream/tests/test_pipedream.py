"""PipeDream is not one process, but it is what it says: each stage steps by gradients of fixed staleness, of one forward's weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from framework.modules.parts import chain_of
from framework.parallel.pipelining.chain import Listed
from tests.harness import Ended, Says, assert_close, assert_same_bits, checked, command, finished, once, refused
from tests.test_conformance import MODELS
from tests.test_conformance import RUN as SHARED
from tests.test_resume import after_step, crash, preempt

RANKS, EVERY, STEPS, SIZE, MAX_NORM = 3, 6, 15, 14, 0.5
RUN = ["dataset=synthetic", "dataset.num_train=66", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
       "model=mlp", "model.dim=8", "model.num_layers=3", "precision=fp64", f"global_batch_size={SIZE}", "trainer.max_epochs=null",
       f"trainer.max_steps={STEPS}", "trainer.log_every=1", f"trainer.eval_every={EVERY}", f"checkpoint.every={EVERY}",
       "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.02", "scheduler=constant",
       f"trainer.clip_grad_norm={MAX_NORM}"]  # fmt: skip
PIPEDREAM = ["parallel=pipeline", "parallel.schedule=pipedream", f"launch.nproc_per_node={RANKS}"]
DRAINED = [*PIPEDREAM, f"parallel.drain_every={EVERY}"]


def by_hand() -> dict[str, torch.Tensor]:
    """Train in one process: the gradient of a batch is taken at once, and each stage steps by it later."""
    config = checked(*RUN)
    model = components.model(config.model, seed=config.seed).double()
    dataset = components.dataset(config.dataset)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=SIZE, seed=0, drop_last=False)
    loader = Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=0, dp_size=1,
                    device=torch.device("cpu"), dtype=torch.float64).train(0)  # fmt: skip
    links = chain_of(model)
    assert links is not None
    chain = Listed(model, links)
    spans = chain.spans(chain.costs(components.example(dataset.info)), num_stages=RANKS)
    stages = [[p for link in span for p in links[link].parameters()] for span in spans]
    optimizers = [torch.optim.SGD(stage, lr=config.optimizer["lr"], momentum=0.9) for stage in stages]
    waiting: list[list[list[torch.Tensor]]] = [[] for _ in stages]
    for step in range(STEPS):
        part = next(loader)
        (micro_batch,) = part.micro_batches
        loss = cross_entropy(model(micro_batch.inputs), micro_batch.targets, reduction="sum") / part.num_samples
        for number, (stage, optimizer) in enumerate(zip(stages, optimizers)):
            waiting[number].append([*torch.autograd.grad(loss, stage, retain_graph=True)])
            is_drained = (step + 1) % EVERY == 0 or step == STEPS - 1
            num_late = 0 if is_drained else RANKS - 1 - number
            if len(waiting[number]) > num_late:
                count = len(waiting[number]) - num_late
                batches, waiting[number] = waiting[number][:count], waiting[number][count:]
                for parameter, *gradients in zip(stage, *batches):
                    parameter.grad = torch.stack(gradients).sum(0)
                torch.nn.utils.clip_grad_norm_(stage, MAX_NORM)
                optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def whole() -> Ended:
    return once(*RUN, *DRAINED)


@pytest.mark.slow
def test_each_stage_steps_by_older_gradients_of_its_old_weights(tmp_path: Path) -> None:
    expected = by_hand()
    for name, tensor in whole().weights.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-10), name
    one_process = finished(*RUN, root=tmp_path / "one").weights
    assert any((tensor - one_process[name]).abs().max() > 1e-4 for name, tensor in whole().weights.items())


def test_the_staleness_is_reported() -> None:
    rows = {row["step"]: row["staleness"] for row in whole().rows if row["split"] == "train"}
    # the mean over the backward passes of a step: as it fills, then 2, 1 and 0; as it is drained; and empty again
    expected = [0, 0, (0 + 1 + 0) / 3, (1 + 1 + 0) / 3, (2 + 1 + 0) / 3, (2 + 1 + 0 + 1 + 0 + 0) / 6, 0]
    assert [rows[step] for step in range(1, 8)] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn with BatchNorm", "gpt"])
def test_drained_in_every_step_it_is_one_process(model: str, tmp_path: Path) -> None:
    """Micro-batches, uneven batches, BatchNorm, dropout, and a loss that is a mean over tokens."""
    line = [*SHARED, *MODELS.get(model, [*MODELS["gpt, tied"], "model.tie_embeddings=false", "model.dropout=0.1"])]
    line += ["optimizer=adamw", "trainer.clip_grad_norm=null"]
    one = finished(*line, root=tmp_path / "one")
    run = finished(*line, *PIPEDREAM, "parallel.drain_every=1", root=tmp_path / "runs")
    for row, expected in zip(run.rows, one.rows):
        assert abs(row["loss"] - expected["loss"]) < 1e-10
        assert row.get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), abs=1e-10)
    for name, tensor in one.weights.items():
        assert torch.allclose(run.weights[name], tensor, rtol=0, atol=1e-10), name


@pytest.mark.slow
def test_recomputed_activations_find_the_old_weights_too(tmp_path: Path) -> None:
    line = [
        *SHARED,
        *MODELS["gpt, tied"],
        "model.tie_embeddings=false",
        "model.dropout=0.1",
        *PIPEDREAM,
        "parallel.drain_every=5",
    ]
    plain, recomputed = (finished(*line, f"trainer.activation_checkpointing={word}", root=tmp_path / word)
                         for word in ("false", "true"))  # fmt: skip
    assert_close(recomputed, plain)


@pytest.mark.slow
@pytest.mark.parametrize("act", [preempt, crash])
def test_stopped_or_killed_it_ends_with_the_same_bits(act: Callable[[], None], tmp_path: Path) -> None:
    stopped = command(*RUN, *DRAINED, root=tmp_path / "runs", before=after_step(8, act))
    assert stopped.code != 0
    if act is preempt:  # it waits until nothing is under way
        assert stopped.code == 75 and stopped.summary["step"] == 12
    assert_same_bits(finished(*RUN, *DRAINED, root=tmp_path / "runs"), whole())


@pytest.mark.slow
def test_another_strategy_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    stopped = command(*RUN, *DRAINED, root=tmp_path / "runs", before=after_step(8, preempt))
    ended = finished(*RUN, f"run.resume={stopped.directory}", root=tmp_path / "one")
    assert [row["step"] for row in ended.rows if row["split"] == "train"] == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_an_early_end_waits_until_it_is_drained(tmp_path: Path) -> None:
    early = [
        "trainer.early_stopping.monitor=train/loss",
        "trainer.early_stopping.patience=1",
        "trainer.early_stopping.min_delta=100",
    ]
    ended = finished(*RUN, *DRAINED, *early, root=tmp_path / "runs")
    assert ended.summary["step"] == EVERY  # the patience ends in step 2


def test_what_cannot_be_is_refused_before_the_start() -> None:
    line = [*RUN, *DRAINED]
    assert refused(*line, "checkpoint.every=4", "trainer.divergence.action=skip").splitlines() == [
        Says("trainer.divergence.action: skip ... pipedream"),
        Says("checkpoint.every: 4 ... parallel.drain_every=6"),
    ]
    assert refused(*line, "part=swa") == Says("part: swa ... pipedream")
    assert refused(*line, "parallel.schedule=1f1b") == Says("parallel.drain_every: unknown key ...")
    assert refused(*line, "parallel.schedule=pipedreem", "~parallel.drain_every") == Says(
        "parallel.schedule: ... 1f1b ... pipedream"
    )
    assert refused(*line, "parallel.drain_every=0") == Says("parallel.drain_every: 0 ...")
    assert refused(*line, *MODELS["gpt, tied"], "dataset.num_val=8", "~model.num_layers") == Says(
        "parallel.schedule: pipedream ... is in several layers ... 1f1b"
    )
