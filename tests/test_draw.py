"""`steadfast draw`: what is drawn of a plan is what a run then does."""

import json
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from framework.build.training import Builder
from framework.cli.plan_memory import planned_memory
from framework.cli.plan_mesh import planned_mesh
from framework.cli.plan_pipeline import planned_pipeline
from framework.cli.plan_schedule import planned_steps
from framework.config.folders import option_node, options
from framework.distributed.world import World
from framework.optim.update import Update
from framework.preflight.processes import axes_of
from framework.training.loop import Trainer
from tests.harness import checked, finished, slow_but, typed
from tests.test_loop import TINY
from tests.test_turns import GAN

GPT = ["model=gpt", "dataset=text", "device=cpu", "dataset.seq_len=16", "model.dim=32", "model.num_layers=8"]


def build(*line: str) -> Builder:
    return Builder(checked(*line), world=World.alone())


# --- schedule


@pytest.mark.parametrize("more", [
    ["scheduler=cosine", "scheduler.warmup_steps=3"],
    ["scheduler=wsd", "scheduler.warmup_steps=2", "scheduler.decay_steps=4"],
    ["scheduler=constant", "part=batch_warmup", "part.batch_warmup.start=4", "part.batch_warmup.samples=60"],
    ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=3", "+scheduler.every=step", "optimizer=muon"],
], ids=["cosine", "wsd", "warmup", "torch"])  # fmt: skip
def test_the_drawn_rates_evaluations_and_epochs_are_those_of_the_run(more: list[str], tmp_path: Path) -> None:
    line = [*TINY, "trainer.max_epochs=3", "trainer.eval_every=2", "trainer.log_every=1", "rehearse=false", *more]
    plan = planned_steps(build(*line))
    run = finished(*line, root=tmp_path / "runs")
    rows = [json.loads(text) for text in (run.directory / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["split"] == "train"]
    assert (plan.steps, plan.rates["lr"]) == ([row["step"] for row in train], [row["lr"] for row in train])
    assert plan.evaluations == [row["step"] for row in rows if row["split"] == "val"]
    assert plan.epochs == [one["step"] for one, after in zip(train, train[1:]) if one["epoch"] < after["epoch"]] + [
        train[-1]["step"]
    ]
    assert len(plan.epochs) == 3 and plan.total_steps == run.summary["total_steps"]


def test_turns_with_a_schedule_of_their_own_are_drawn_beside_lr() -> None:
    plan = planned_steps(build(*GAN))
    assert plan.total_steps == 6 and [*plan.rates][0] == "lr"
    others = {name.partition(",")[0]: rates for name, rates in plan.rates.items() if name != "lr"}
    assert others["turn generator"] == [0.01] * 6


# --- mesh


def test_the_mesh_is_in_the_order_of_the_strategy_and_nodes_are_counted() -> None:
    line = [*GPT, "parallel=pp+fsdp+tp", "parallel.pipeline=2", "parallel.shard=2", "parallel.tensor=2"]
    plan = planned_mesh(build(*line, "launch.nproc_per_node=4", "launch.nnodes=2"))
    assert plan.axes == {"pipeline": 2, "shard": 2, "tensor": 2}
    assert plan.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.groups("shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    text = {line.partition(":")[0]: line for line in plan.lines()}
    assert "each on one node" in text["tensor"] and "4 of them over several nodes" in text["pipeline"]
    assert len(plan.drawn().axes) == 3


def test_the_mesh_is_the_one_that_the_ranks_of_a_run_have(tmp_path: Path) -> None:
    line = [*TINY, "parallel=hsdp", "parallel.shard=2", "launch.nproc_per_node=4", "trainer.max_steps=1", "rehearse=false"]

    def note() -> None:
        original = World.mesh

        def mesh(self: World, **axes: int | None) -> torch.distributed.device_mesh.DeviceMesh:
            made = original(self, **axes)
            names = made.mesh_dim_names or ()
            groups = {name: torch.distributed.get_process_group_ranks(made.get_group(name)) for name in names}
            (tmp_path / f"mesh_{self.rank}.json").write_text(json.dumps(groups))
            return made

        World.mesh = mesh  # type: ignore[method-assign]

    plan = planned_mesh(build(*line))
    finished(*line, root=tmp_path / "runs", before=note)
    for rank in range(4):
        for axis, group in json.loads((tmp_path / f"mesh_{rank}.json").read_text()).items():
            assert rank in group and group in plan.groups(axis)


# --- pipeline


@pytest.mark.parametrize(("schedule", "share"), [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("zbv", 3 / 51)])
def test_the_pipeline_has_the_micro_batches_of_the_run_s_step(schedule: str, share: float) -> None:
    line = [*GPT, "parallel=pipeline", f"parallel.schedule={schedule}", "launch.nproc_per_node=4", "global_batch_size=32",
            "micro_batch_size=4"]  # fmt: skip
    plan = planned_pipeline(build(*line))
    assert (plan.num_micro_batches, [*plan.placed]) == (8, [0, 1, 2, 3])
    assert plan.waiting == pytest.approx(share)
    assert f"{100 * plan.waiting:.1f} %" in plan.lines()[-1]
    bars = sum(action.start < 80 for row in plan.placed.values() for action in row)
    assert len(plan.drawn().axes[0].patches) == bars


def test_each_of_several_pipelines_has_its_share_and_a_short_micro_batch_is_alone() -> None:
    line = [*GPT, "parallel=ddp+pp", "parallel.replicate=2", "launch.nproc_per_node=4", "global_batch_size=30"]
    plan = planned_pipeline(build(*line, "micro_batch_size=4"))  # 8 micro-batches, of which the last has 2 samples
    assert plan.num_micro_batches == 4
    alone = planned_pipeline(
        build(*GPT, "parallel=pipeline", "launch.nproc_per_node=2", "global_batch_size=30", "micro_batch_size=4")
    )
    assert alone.num_micro_batches == 7 and "a micro-batch of 2 samples follows" in alone.lines()[1]


# --- memory


def measure(folder: Path) -> None:
    """Let each rank of a run write how many bytes it has after a step."""
    fit, take = Trainer.fit, Update.take
    trainers: list[Trainer] = []

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            mine = value.to_local() if isinstance(value, DTensor) else value
            return mine.numel() * mine.element_size()
        return sum(map(size, value.values())) if isinstance(value, dict) else 0

    def noted_fit(self: Trainer) -> bool:
        trainers.append(self)
        return fit(self)

    def noted_take(self: Update, step: int, **options: Any) -> None:
        take(self, step, **options)
        module = trainers[0].engine.module
        found = {
            "parameters": size(dict(module.named_parameters())),
            "buffers": size(dict(module.named_buffers())),
            "gradients": sum(size(parameter.grad) for parameter in module.parameters()),
            "optimizer": size(dict(self.optimizer.state)),
            "average": size(self.average.tensors) if self.average is not None else 0,
        }
        (folder / f"bytes_{trainers[0].world.rank}.json").write_text(json.dumps(found))

    Trainer.fit, Update.take = noted_fit, noted_take  # type: ignore[method-assign]


@pytest.mark.parametrize(("strategy", "ranks"), slow_but(
    [("single", 1), ("zero", 2), ("fsdp", 2)],
    [("single", 1), ("ddp", 2), ("zero", 2), ("fsdp", 2), ("zero", 3), ("fsdp", 3), ("tensor", 2), ("hsdp", 4), ("pipeline", 2),
     ("context", 2), ("ddp+pp", 4)], unpack=True))  # fmt: skip
def test_the_bytes_are_those_of_a_run_s_ranks(strategy: str, ranks: int, tmp_path: Path) -> None:
    line = [*GPT, "model.num_layers=2", f"parallel={strategy}", f"launch.nproc_per_node={ranks}", "trainer.max_steps=2",
            "trainer.max_epochs=null", "trainer.eval_every=null", "trainer.limit_batches=2", "trainer.ema_decay=0.9", "rehearse=false"]  # fmt: skip

    plan = planned_memory(build(*line))
    finished(*line, root=tmp_path / "runs", before=partial(measure, tmp_path))
    for rank in range(ranks):
        assert plan.ranks[rank] == json.loads((tmp_path / f"bytes_{rank}.json").read_text())


def test_sharding_divides_what_it_shards_and_nothing_else() -> None:
    line = [*TINY, "launch.nproc_per_node=4", "trainer.ema_decay=0.9"]
    found = {name: planned_memory(build(*line, f"parallel={name}")).ranks for name in ("ddp", "zero", "fsdp")}
    whole = found["ddp"][0]
    assert whole["parameters"] == whole["gradients"] == whole["average"] and found["ddp"][3] == whole
    for kind in ("parameters", "gradients"):
        assert [found["zero"][rank][kind] for rank in range(4)] == [whole[kind]] * 4
        assert sum(found["fsdp"][rank][kind] for rank in range(4)) == whole[kind]
    assert sum(found["zero"][rank]["optimizer"] for rank in range(4)) == pytest.approx(whole["optimizer"], rel=0.02)


def test_several_ranks_that_keep_the_same_are_one_line_and_not_all_of_many_are_built() -> None:
    plan = planned_memory(build(*TINY, "parallel=ddp", "launch.nproc_per_node=16"))
    assert len(plan.ranks) == 8 and (min(plan.ranks), max(plan.ranks)) == (0, 15)
    lines = plan.lines()
    assert len(lines) == 4 and lines[2] == "of 16 ranks, these 8 were examined" and "activations" in lines[3]
    (axes,) = plan.drawn().axes
    widths = [sum(bar.get_width() for bar in axes.patches[rank::8]) for rank in range(8)]
    assert widths == pytest.approx([sum(plan.ranks[0].values()) / 1024] * 8)


def test_a_model_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ValueError, match=r"^model: building a rank takes up to .* and 1000 bytes are free"):
        planned_memory(build(*TINY, "parallel=ddp", "launch.nproc_per_node=2"))


# --- the command


@pytest.mark.parametrize("what", ["schedule", "mesh", "pipeline", "memory"])
def test_each_picture_is_one_command_which_starts_no_run(what: str, tmp_path: Path) -> None:
    line = [*GPT, "parallel=pipeline", "launch.nproc_per_node=2", "micro_batch_size=4", "trainer.compile=true"]
    ended = typed("draw", what, *line, directory=tmp_path)
    assert ended.code == 0 and f"{what}: {what}.png" in ended.output, ended.output
    content = (tmp_path / f"{what}.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", content[16:24])) > 100
    assert {path.name for path in tmp_path.iterdir()} == {f"{what}.png", "runs.output"}  # that is the harness's


def test_one_step_is_one_step() -> None:
    plan = planned_steps(build(*TINY, "trainer.max_epochs=null", "trainer.max_steps=1"))
    assert plan.lines()[0].startswith("1 step, ")


@pytest.mark.parametrize(("line", "words"), [
    ([], "steadfast draw schedule|mesh|pipeline|memory"),
    (["curves"], "steadfast draw"),
    (["schedule", "model=cnnn"], "did you mean cnn"),
    (["schedule", "mode=eval", "run.dir=x"], "run.dir"),
    (["schedule", "mode=check"], "mode: check"),
    (["mesh"], "parallel: has no mesh"),
    (["pipeline", "parallel=ddp"], "parallel: has no pipeline"),
    (["memory", "parallel=pipeline", "launch.nproc_per_node=64", "device=cpu"], "pipeline"),
    (["memory", "parallel=parameter-server", "launch.nproc_per_node=2", "device=cpu"], "cannot be built without the other processes"),
    (["schedule", "out=there/x.png"], "out: there/x.png cannot be written"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(line: list[str], words: str, tmp_path: Path) -> None:
    ended = typed("draw", *line, directory=tmp_path)
    assert ended.code not in (0, 1) and words in ended.output and "Traceback" not in ended.output, ended.output
    assert not [*tmp_path.rglob("*.png")]


@pytest.mark.parametrize("strategy", slow_but(["pp+fsdp+tp", "ddp+mp"], list(options("parallel"))))
def test_a_strategy_s_mesh_is_drawn_or_it_is_said_why_not(strategy: str) -> None:
    has_mesh = bool(axes_of(option_node("parallel", strategy))) or strategy == "auto"
    line = [*GPT, f"parallel={strategy}", f"launch.nproc_per_node={4 if has_mesh else 1}"]
    if strategy == "expert":
        line += ["model=moe"]
    try:
        plan = planned_mesh(build(*line))
    except ValueError as error:
        assert not has_mesh or strategy == "parameter-server", error
    else:
        assert sorted(plan.ranks.flatten()) == [0, 1, 2, 3]
        assert all(sorted(sum(plan.groups(axis), [])) == [0, 1, 2, 3] for axis in plan.axes)
