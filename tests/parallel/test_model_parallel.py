"""Layers on several devices of one process: emulated ones, which fail as CUDA does when tensors on two of them meet."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from framework.cli.run import checked_line
from framework.modules.parts import units_of
from framework.parallel import model_parallel
from framework.parallel.model_parallel import sharing_weights
from framework.preflight import processes
from tests.harness import Ended, Says, assert_close, checked, command, finished, once, together
from tests.test_any_to_any import LONGER, note_state
from tests.test_conformance import MODELS, OPTIMIZERS, RESNET18, RUN, one_process
from tests.test_resume import after_step, preempt


def on_emulated(num_devices: int, *others: Callable[[], None]) -> Callable[[], None]:
    def plant() -> None:
        from tests import emulated_devices

        emulated_devices.plant(num_devices)
        for other in others:
            other()

    return plant


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "ranks", "num_devices"),
    [
        *(pytest.param(model, "model-parallel", 1, 2, marks=[] if model == "cnn with BatchNorm" else [pytest.mark.slow]) for model in MODELS),
        # the tensors of ResNet are too many for Python
        *(pytest.param(model, "ddp+mp", 2, 2, marks=[] if model == "two inputs" else [pytest.mark.slow]) for model in MODELS if model != RESNET18),
        pytest.param("gpt, tied", "model-parallel", 1, 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_several_devices_compute_what_one_does(model: str, strategy: str, ranks: int, num_devices: int, tmp_path: Path) -> None:
    line = [*RUN, *MODELS[model], *OPTIMIZERS["adamw"], f"parallel={strategy}", f"launch.nproc_per_node={ranks}"]
    run = finished(*line, root=tmp_path / "runs", before=on_emulated(num_devices))
    assert_close(run, one_process(model, "adamw"))
    assert f"layers on {num_devices} devices" in run.output


def test_emulated_devices_refuse_what_cuda_would(tmp_path: Path) -> None:
    def leave_inputs_where_they_are() -> None:
        model_parallel._move = lambda tree, device: tree

    before = on_emulated(2, leave_inputs_where_they_are)
    run = command(*RUN, *MODELS["mlp"], "parallel=model-parallel", root=tmp_path / "runs", before=before)
    assert run.code == 1
    assert "Expected all tensors to be on the same device, but found ['emu:0', 'emu:1'] in aten::addmm" in run.output


@pytest.mark.slow
def test_a_run_goes_from_one_device_to_several_and_back(tmp_path: Path) -> None:
    hops = [("single", 1, 3), ("ddp+mp", 2, 6), ("model-parallel", 1, 11), ("fsdp", 2, 16)]
    previous: Ended | None = None
    for strategy, ranks, last in hops:
        state = tmp_path / f"{strategy}.state"
        on_devices = [on_emulated(2)] if strategy.endswith(("mp", "model-parallel")) else []
        acts = [*on_devices, note_state(state)]
        if last < 16:
            acts.append(after_step(last - (ranks > 1), preempt))  # two ranks agree a step later than one
        resume = [f"run.resume={previous.directory}"] if previous else []
        line = [*LONGER, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *resume]
        ended = command(*line, root=tmp_path / strategy, before=together(*acts))
        assert (ended.code, ended.summary["step"]) == (75 if last < 16 else 0, last), ended.output
        previous = ended
    assert previous is not None
    assert_close(previous, once(*LONGER))


@pytest.mark.slow
def test_one_device_is_said_to_be_one(tmp_path: Path) -> None:
    for strategy in ("model-parallel", "ddp+mp"):
        run = finished(*RUN, *MODELS["mlp"], f"parallel={strategy}", root=tmp_path / strategy)
        assert run.output.count("there is one device (cpu), which has all layers") == 1


def test_units_that_share_a_weight_are_together() -> None:
    first, second, third, last = (nn.Linear(2, 2) for _ in range(4))
    third.weight, last.bias = first.weight, second.bias
    assert sharing_weights([first, second, third, last]) == [[0, 2], [1, 3]]
    last.weight = first.weight
    assert sharing_weights([first, second, third, last]) == [[0, 1, 2, 3]]


def test_units_are_the_modules_that_a_forward_calls() -> None:
    block = nn.TransformerEncoderLayer(4, 2)
    model = nn.Module()
    model.net = nn.Module()
    model.net.forward = model.net.pool = nn.AvgPool1d(2)
    model.net.stem, model.net.layers, model.net.scales = (
        nn.Linear(4, 4),
        nn.ModuleList([block]),
        nn.ParameterList([torch.ones(1)]),
    )
    assert units_of(model) == [model.net.stem, block]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["parallel=ddp", "launch.nproc_per_node=5"], "launch.nproc_per_node: 5 ... 4 CUDA devices ... 4"),
        (["parallel=ddp+mp", "launch.nproc_per_node=3"], "launch.nproc_per_node: 3 ... parallel.num_devices=2 = 6 ... 4 CUDA ... 2"),
        (["parallel=model-parallel", "parallel.num_devices=9"], "launch.nproc_per_node: 1 ... parallel.num_devices=9 = 9 ... 4 CUDA ... 4"),
    ],
)  # fmt: skip
def test_more_devices_than_there_are_are_refused(line: list[str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_cuda_devices", lambda: 4)
    problems = checked_line(line).problems
    assert [str(found) for found in problems] == [Says(problem)]


def test_a_process_takes_as_many_devices_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_cuda_devices", lambda: 4)
    for strategy, count in {"ddp": 4, "ddp+mp": 2, "model-parallel": 1, "dp": 1}.items():
        config = checked(f"parallel={strategy}")
        assert config.launch.num_processes == count
