"""Compressed gradients: what is sent is what the definition says, and a model still learns."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from extras.compression.hooks import BLOCK, SHARE, Int8, TopK
from tests.harness import Ended, assert_same_bits, command, finished, once, refused
from tests.test_resume import after_step, preempt

RUN = ["model=mlp", "model.dim=64", "trainer.max_epochs=6", "trainer.eval_every=null", "checkpoint.every=null",
       "optimizer.lr=5e-3", "parallel=ddp", "launch.nproc_per_node=2"]  # fmt: skip
NAMES = ["fp16", "bf16", "int8", "top_k", "powersgd"]


def plain() -> Ended:
    return once(*RUN)


def final_loss(ended: Ended) -> float:
    return ended.summary["metrics"]["test"]["last"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_learns_nearly_as_well_from_compressed_gradients(name: str, tmp_path: Path) -> None:
    run = finished(*RUN, f"parallel.compression={name}", root=tmp_path / "runs")
    chance = math.log(10)  # the loss of ten digits drawn blindly; `top_k` has sent 5 % of each gradient
    assert chance - final_loss(run) > 0.93 * (chance - final_loss(plain()))
    assert any(not torch.equal(run.weights[key], plain().weights[key]) for key in plain().weights)  # it was compressed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_sums_are_exact_after_a_resume(name: str, tmp_path: Path) -> None:
    line = [*RUN, f"parallel.compression={name}"]
    whole = finished(*line, root=tmp_path / "whole")
    stopped = command(*line, root=tmp_path / "runs", before=after_step(33, preempt))
    assert stopped.code == 75, stopped.output
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


SHORT = [*RUN, "trainer.max_epochs=null", "trainer.max_steps=6", "precision=fp64", "rehearse=false"]
OWN = ["parallel.hook._target_=tests.own_parts.half_mean", "parallel.hook._partial_=true"]


@pytest.mark.slow
def test_a_hook_of_ones_own_takes_the_mean_of_the_gradients(tmp_path: Path) -> None:
    plain = finished(*SHORT, root=tmp_path / "plain")
    own = finished(*SHORT, *OWN, "parallel.hook.factor=4.0", root=tmp_path / "own")
    now = finished(
        *SHORT, "parallel.hook._target_=tests.own_parts.mean_now", "parallel.hook._partial_=true", root=tmp_path / "now"
    )
    for name, value in plain.weights.items():
        assert torch.allclose(value, own.weights[name], rtol=0, atol=1e-12)
        assert torch.allclose(value, now.weights[name], rtol=0, atol=1e-12)


def test_a_hook_may_be_an_object_that_keeps_a_state_and_what_it_returns_is_taken(tmp_path: Path) -> None:
    """Replicas that never exchange gradients go apart, which the run finds out before it saves them."""
    line = [*SHORT, "parallel.hook._target_=tests.own_parts.Silent"]
    ended = command(*line, root=tmp_path)
    assert ended.code != 0 and "is not the same on ranks 0 and 1" in ended.output, ended.output


def test_a_hook_and_what_excludes_it_are_refused() -> None:
    line = [*SHORT, *OWN, "parallel.hook.factor=1.0"]
    assert "parallel.compression: fp16 sets parallel.hook" in refused(*line, "parallel.compression=fp16")
    assert "parallel.hook" in refused(*line, "invariance=bitwise", "micro_batch_size=8")
    assert "parallel.hook.group" in refused(*SHORT, OWN[0], "parallel.hook.factor=1.0")


@pytest.mark.parametrize("hook", ["parallel.compression=top_k", "parallel.hook._target_=tests.own_parts.Silent"])
def test_values_that_no_checkpoint_holds_refuse_checkpoints_before_the_end(hook: str) -> None:
    for word in ("checkpoint.every=2", "checkpoint.keep_best=1"):
        assert f"{word.replace('=', ': ')}, but parallel.hook" in refused(*SHORT, hook, word)


@pytest.mark.slow
def test_asked_to_stop_a_run_with_such_values_computes_what_it_does_undisturbed(tmp_path: Path) -> None:
    line = [*SHORT, "parallel.compression=top_k"]
    whole = finished(*line, root=tmp_path / "whole")
    command(*line, root=tmp_path / "runs", before=after_step(3, preempt))
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


class Bucket:
    """What a hook sees of DDP's bucket."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return 0


@pytest.fixture
def alone(tmp_path: Path):  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("hook", [Int8(), TopK()])
def test_what_is_not_sent_now_is_sent_later(hook, alone) -> None:  # type: ignore[no-untyped-def]
    """The sum of what was sent over many steps is the sum of the gradients, but for one remainder."""
    generator = torch.Generator().manual_seed(0)
    wanted, sent = torch.zeros(1000), torch.zeros(1000)
    for _ in range(50):
        gradient = torch.randn(1000, generator=generator)
        wanted += gradient
        sent += hook(alone, Bucket(gradient.clone())).wait()
    (remainder,) = hook.errors.values()
    assert torch.allclose(sent + remainder, wanted, atol=1e-4)


def test_int8_rounds_each_block_to_its_own_scale(alone) -> None:  # type: ignore[no-untyped-def]
    gradient = torch.cat([torch.linspace(-1, 1, BLOCK), 1000 * torch.linspace(-1, 1, BLOCK)])
    got = Int8()(alone, Bucket(gradient.clone())).wait()
    for block, scale in ((slice(0, BLOCK), 1 / 127), (slice(BLOCK, None), 1000 / 127)):
        assert (got[block] - gradient[block]).abs().max() <= 0.5001 * scale


def test_top_k_sends_the_largest(alone) -> None:  # type: ignore[no-untyped-def]
    gradient = torch.arange(100.0)
    got = TopK()(alone, Bucket(gradient.clone())).wait()
    assert got.nonzero().flatten().tolist() == list(range(100 - int(100 * SHARE), 100))
    assert torch.equal(got[-5:], gradient[-5:])
