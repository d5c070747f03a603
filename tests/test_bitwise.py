"""invariance=bitwise: the same SHA-256 of parameters, buffers and optimizer state for every number of processes."""

import hashlib
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from framework.parallel import invariant
from framework.parallel.invariant import TreeSum
from tests.harness import Ended, command, exact_rows, finished, once
from tests.product import trained
from tests.test_conformance import SMALL, TOKENS
from tests.test_resume import after_step, preempt

# seven micro-batches, the last one short; an epoch's last batch has five
RUN = ["invariance=bitwise", "global_batch_size=14", "micro_batch_size=2", "trainer.max_epochs=null", "trainer.max_steps=8",
       "trainer.log_every=1", "trainer.eval_every=3", "trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.9",
       "checkpoint.every=null"]  # fmt: skip
CNN = [*SMALL, "model=cnn", "model.channels=[4,8,8]", "model.norm=batch", "model.dropout=0.2", "global_batch_size=13"]
GPT = [*TOKENS, "model=gpt", "model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.1"]
LINES = {
    "cnn": [*RUN, *CNN],
    "cnn, augmented, bf16": [*RUN, *CNN, "precision=bf16"],
    "gpt, fp64, sgd": [*RUN, *GPT, "precision=fp64", "optimizer=sgd", "optimizer.lr=0.1"],
}


def digest(ended: Ended) -> str:
    """Return the hash of the newest checkpoint's tensors, by name: parameters, buffers, optimizer, average."""
    (last,) = sorted((ended.directory / "checkpoints").glob("step_*"))[-1:]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(last.glob("*.safetensors")):
        tensors |= load_file(file)
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode() + tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [9, 2, 3, 5, 7])  # of nine, two have nothing to do
@pytest.mark.parametrize("line", LINES)
def test_any_number_of_processes_gives_the_same_bits(line: str, ranks: int, tmp_path: Path) -> None:
    run = finished(*LINES[line], "parallel=ddp", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert digest(run) == digest(once(*LINES[line]))
    assert exact_rows(run) == exact_rows(once(*LINES[line]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_so_does_a_sharded_optimizer(ranks: int, tmp_path: Path) -> None:
    run = finished(*LINES["cnn"], "parallel=zero", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert digest(run) == digest(once(*LINES["cnn"]))


@pytest.mark.slow
def test_a_run_may_change_its_number_of_processes(tmp_path: Path) -> None:
    for ranks, stop in [(3, 2), (1, 4), (2, 5), (7, None)]:  # several agree a step later
        before = after_step(stop, preempt) if stop else None
        line = ["parallel=ddp", f"launch.nproc_per_node={ranks}"]
        ended = command(*LINES["cnn"], *line, root=tmp_path / "runs", before=before)
        assert ended.code == (75 if stop else 0), ended.output
    assert digest(ended) == digest(once(*LINES["cnn"]))
    assert exact_rows(ended) == exact_rows(once(*LINES["cnn"]))


@pytest.mark.slow
def test_without_it_the_bits_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    line = [*LINES["cnn"], "invariance=samples", "parallel=ddp", "launch.nproc_per_node=3"]
    assert digest(finished(*line, root=tmp_path / "runs")) != digest(once(*LINES["cnn"]))


def in_order(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The sum along the tree, written down."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return in_order(leaves[:half]) + in_order(leaves[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 21, 64, 100])
def test_leaves_may_come_in_any_order_and_few_sums_are_kept(count: int) -> None:
    rng = random.Random(count)
    leaves = [torch.randn(5, generator=torch.Generator().manual_seed(number)) for number in range(count)]
    tree, order = TreeSum([0, count], rank=0), rng.sample(range(count), count)
    for number in order:
        tree.add(number, leaves[number].clone())
    assert torch.equal(tree.total(like=leaves[0]), in_order(leaves))
    tree, most = TreeSum([0, count], rank=0), 0
    for number in range(count):
        tree.add(number, leaves[number].clone())
        most = max(most, len(tree._sums))
    assert most <= count.bit_length()


class Counting:
    """Takes torch.distributed's place: what a rank sends and receives on the way to the total is counted."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def send(self, value: torch.Tensor, dst: int) -> None:
        self.sent += 1

    def recv(self, value: torch.Tensor, src: int) -> None:
        self.received += 1

    def broadcast(self, value: torch.Tensor, src: int) -> None: ...


@pytest.mark.parametrize("count", [2, 3, 7, 8, 16, 25, 33, 64, 97])
def test_no_rank_sends_or_receives_more_sums_than_the_logarithm_of_the_leaves(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.zeros(1)
    for num_ranks in range(2, count + 1):
        bounds = [-(-rank * count // num_ranks) for rank in range(num_ranks + 1)]
        for rank in range(num_ranks):
            monkeypatch.setattr(invariant, "dist", counting := Counting())
            tree = TreeSum(bounds, rank=rank)
            for leaf in range(bounds[rank], bounds[rank + 1]):
                tree.add(leaf, value.clone())
            tree.total(like=value)
            assert max(counting.sent, counting.received) <= (count - 1).bit_length()


@pytest.mark.slow
def test_an_evaluation_has_the_same_bits_however_large_its_sums_are(tmp_path: Path) -> None:
    line = [
        *RUN, *SMALL, "model=mlp", "model.dim=4", "task._target_=tests.faulty.Large", "precision=fp64",
        "trainer.eval_every=1",
    ]  # fmt: skip
    rows = [
        trained([*line, "parallel=ddp"], ranks=ranks, root=tmp_path / str(ranks), stops=[None])[0].rows for ranks in (1, 2, 3)
    ]
    losses = [[row["loss"] for row in some if row["split"] != "train"] for some in rows]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 9 and min(losses[0]) > 2**29
