"""Replicas of a pipeline sum their gradients while the backward pass goes on: the same messages on all, whatever comes first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed import buckets
from framework.distributed.world import World
from framework.parallel.pipelining import overlap
from framework.parallel.pipelining.engine import PipelineEngine
from framework.parallel.pipelining.overlap import OverlappedSums
from framework.runtime.exits import Unfit
from tests.harness import assert_close, finished
from tests.ranks import on_ranks
from tests.test_conformance import MODELS, RUN


def layers() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 5)) for _ in range(4)]


def backward(parameter: nn.Parameter, factor: float) -> None:
    (parameter.sin() * factor).sum().backward()


def test_each_gradient_is_summed_once_however_it_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 has its gradients in another order, and one parameter has none there; a weight is in both of the stages."""
    monkeypatch.setattr(buckets, "_BUCKET", 1)  # a message a tensor

    def act(world: World) -> Any:
        parameters, sent = layers(), list[int]()
        early, late = parameters[:2], parameters[1:]
        sums = OverlappedSums({0: early, 1: late}, group=dist.group.WORLD)
        plain = overlap.begin_sum

        def note(bucket: Any, *, group: Any) -> Any:
            sent.append(next(i for i, p in enumerate(parameters) if p.grad is bucket[0]))
            return plain(bucket, group=group)

        overlap.begin_sum = note  # type: ignore[assignment]
        for parameter in parameters:
            backward(parameter, 1.0 + world.rank)  # an earlier micro-batch
        sums.begin(early=True)
        backward(parameters[2], 3.0)  # no last backward pass is under way
        assert sent == []
        when = []
        with sums.last_backward(1):
            for parameter in late if world.rank else reversed(late):
                backward(parameter, 2.0)
                when.append(len(sent))
        with sums.last_backward(0):
            for parameter in early[1:] if world.rank else early:
                backward(parameter, 5.0)
        sums.finish()
        overlap.begin_sum = plain
        return sent, when, [p.grad.tolist() for p in parameters if p.grad is not None]

    (sent, when, ours), (also_sent, also_when, theirs) = on_ranks(2, act, scratch=tmp_path)
    assert sent == also_sent == [3, 2, 1, 0]
    assert when == [1, 2, 2] and also_when == [0, 0, 2]  # the weight of both stages waits for the other one
    factors = [2 * 1.5 + 5, 3 + 2 * 2 + 2 * 5, 3 + 2 * 3 + 2 * 2, 3 + 2 * 2]
    for index, (parameter, factor) in enumerate(zip(layers(), factors)):
        torch.testing.assert_close(torch.tensor(ours[index]), parameter.detach().cos() * factor)
    assert ours == theirs


def test_what_changes_after_the_backward_pass_is_summed_at_the_end(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        parameters = layers()
        sums = OverlappedSums({0: parameters}, group=dist.group.WORLD)
        sums.begin(early=False)
        with sums.last_backward(0):
            for parameter in parameters:
                backward(parameter, 1.0)
        for parameter in parameters:
            parameter.grad = parameter.grad + 1.0  # type: ignore[operator]
        sums.finish()
        return [p.grad.tolist() for p in parameters if p.grad is not None]

    for gradients in on_ranks(2, act, scratch=tmp_path):
        for parameter, gradient in zip(layers(), gradients, strict=True):
            torch.testing.assert_close(torch.tensor(gradient), 2 * (parameter.detach().cos() + 1))


def test_a_gradient_that_is_added_to_twice_ends_the_run(tmp_path: Path) -> None:
    def act(world: World) -> str:
        parameters = layers()
        sums = OverlappedSums({0: parameters}, group=dist.group.WORLD)
        sums.begin(early=True)
        with pytest.raises(Unfit, match="adds to a gradient twice"), sums.last_backward(0):
            for _ in range(2):
                backward(parameters[0], 1.0)
        return ""

    on_ranks(1, act, scratch=tmp_path)


def note_messages(path: Path) -> Callable[[], None]:
    """Return what makes rank 0 write down, of each step, in which order messages begin and last backward passes end."""

    def plant() -> None:
        buckets._BUCKET = 1 << 8
        events: list[str] = []
        plain_sum, plain_last, plain_step = overlap.begin_sum, OverlappedSums.last_backward, PipelineEngine.forward_backward

        def note(bucket: Any, *, group: Any) -> Any:
            events.append("begin")
            return plain_sum(bucket, group=group)

        def last_backward(self: Any, stage: int) -> Any:
            around = plain_last(self, stage)
            leave = around.__exit__

            class Noted:
                def __enter__(self) -> None:
                    around.__enter__()

                def __exit__(self, *error: Any) -> Any:
                    events.append(f"stage {stage}")
                    return leave(*error)

            return Noted()

        def forward_backward(self: Any, *args: Any, **options: Any) -> Any:
            events.clear()
            result = plain_step(self, *args, **options)
            if dist.get_rank() == 0:
                with path.open("a") as file:
                    file.write(json.dumps([events, len(self._sums._buckets)]) + "\n")
            return result

        overlap.begin_sum = note  # type: ignore[assignment]
        OverlappedSums.last_backward = last_backward  # type: ignore[method-assign,assignment]
        PipelineEngine.forward_backward = forward_backward  # type: ignore[method-assign]

    return plant


LINE = [*RUN, *MODELS["gpt, tied"]]
MESH = ["parallel=ddp+pp", "parallel.replicate=2", "launch.nproc_per_node=4"]


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow), pytest.param("zbv", marks=pytest.mark.slow)]
)
def test_messages_begin_within_the_last_backward_pass(schedule: str, tmp_path: Path) -> None:
    line = [*LINE, *MESH, f"parallel.schedule={schedule}"]
    run = finished(*line, root=tmp_path / "runs", before=note_messages(tmp_path / "events"))
    steps = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert len(steps) == 10
    early = []  # of each step, how many messages begin before the last backward pass has ended
    for events, num_buckets in steps:
        assert events.count("begin") == num_buckets > 2  # each bucket once, however many passes
        ends = [i for i, event in enumerate(events) if event != "begin"]
        early.append(events[: ends[-1]].count("begin"))
    # in a step that makes a schedule for its second pass, torch clears gradients, and all are summed at the end
    assert sum(count >= 2 for count in early) >= 8, early
    assert_close(run, finished(*LINE, root=tmp_path / "one"))


class Running(nn.Module):
    """A block that reads a buffer that it changes in training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x).tanh() * self.scale.clone()
        if self.training:
            self.scale.lerp_(x.detach().square().mean(), 0.1)
        return x


class Runner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(192, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Running(8) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_buffers_are_sent_after_the_sums_also_if_only_one_pipeline_has_a_short_micro_batch(tmp_path: Path) -> None:
    line = ["dataset=synthetic", "dataset.image_size=8", "dataset.num_train=70", "dataset.num_val=8", "dataset.num_test=8",
            "model._target_=tests.parallel.test_overlap.Runner", "precision=fp64", "global_batch_size=22", "micro_batch_size=4",
            "trainer.max_epochs=null", "trainer.max_steps=5", "trainer.eval_every=null", "checkpoint.every=null"]  # fmt: skip
    mesh = ["parallel=ddp+pp", "parallel.pipeline=2", "launch.nproc_per_node=4", "launch.timeout_s=40"]
    assert_close(finished(*line, *mesh, root=tmp_path / "runs"), finished(*line, root=tmp_path / "one"))
