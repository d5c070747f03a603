"""Each of these parts does what its source describes, and computes the same on any number of processes."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from extras.parts.activations import Activations
from extras.parts.length_warmup import LengthWarmup
from framework.build import components
from framework.checkpoint.manifest import step_of
from framework.data.loader import Loader
from framework.data.order import Order
from framework.engine.seam import Step
from tests.harness import assert_close, checked, finished, model_of, once, refused
from tests.test_conformance import MODELS, RUN
from tests.test_parts import GPT


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_sharpness_computes_what_one_process_does(strategy: str, tmp_path: Path) -> None:
    line = [*GPT, "part=sharpness"]
    assert_close(finished(*line, f"parallel={strategy}", "launch.nproc_per_node=2", root=tmp_path / "runs"), once(*line))


@pytest.mark.slow
def test_frozen_groups_do_not_move_before_their_turn(tmp_path: Path) -> None:
    line = [*GPT, "part=unfreeze", "part.unfreeze.groups=[[layers.1.*],[layers.0.*]]", "part.unfreeze.every=2",
            "optimizer.weight_decay=0.5", "checkpoint.every=1", "checkpoint.keep_last=99"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    start = model_of(ended).double().state_dict()
    moved: dict[str, int] = {}
    for folder in sorted((ended.directory / "checkpoints").iterdir()):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for key in (key for key in tensors.keys() if key.startswith("model/") and key.endswith(".weight")):
                    own_name = key.removeprefix("model/")
                    if not tensors.get_tensor(key).equal(start[own_name]):
                        moved.setdefault(own_name, step_of(folder))
    first = {part: min(step for key, step in moved.items() if key.startswith(part)) for part in ("layers.0.", "layers.1.")}
    rest = min(step for key, step in moved.items() if not key.startswith("layers."))
    assert (rest, first["layers.1."], first["layers.0."]) == (1, 3, 5)


def test_a_time_limit_ends_a_run_as_finished(tmp_path: Path) -> None:
    line = [*RUN, *MODELS["cnn with BatchNorm"], "part=time_limit", "part.time_limit.hours=1e-9", "part.time_limit.every=2"]
    ended = finished(*line, root=tmp_path / "runs")
    assert ended.summary["status"] == "finished" and ended.summary["step"] == 2
    assert [row["split"] for row in ended.rows if row["split"] != "train"] == ["val", "test"]
    assert "its 1e-09 hours are over" in ended.output, ended.output
    again = finished(*line, root=tmp_path / "runs")
    assert "finished already" in again.output, again.output


def far_off_at(position: int) -> Callable[[], None]:
    """Return what makes the loss of the batch at this position far too large."""

    def plant() -> None:
        original = Loader.train_step

        def train_step(self: Loader, samples_seen: int) -> Step:
            step = original(self, samples_seen)
            if samples_seen == position:
                step = step._replace(micro_batches=[m._replace(inputs=m.inputs * 1e4) for m in step.micro_batches])
            return step

        Loader.train_step = train_step  # type: ignore[method-assign]

    return plant


def test_a_loss_spike_rolls_back(tmp_path: Path) -> None:
    line = [*RUN, *MODELS["mlp"], "part=loss_spikes", "part.loss_spikes.window=3", "part.loss_spikes.factor=3", "checkpoint.every=2", "trainer.divergence.action=rollback", "parallel=ddp", "launch.nproc_per_node=2"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs", before=far_off_at(56))
    assert ended.summary["num_divergences"] == 1 and "the median of 3 is" in ended.output, ended.output
    assert all(math.isfinite(row["loss"]) for row in ended.rows)


@pytest.mark.slow
def test_padding_is_not_in_the_activations_of_a_pipeline(tmp_path: Path) -> None:
    line = [
        *RUN,
        *MODELS["mlp"],
        "model.dropout=0",
        "part=activations",
        "part.activations.modules=[layers.*]",
        "trainer.max_steps=5",
    ]
    mesh = ["parallel=ddp+pp", "parallel.replicate=2", "parallel.pipeline=2", "launch.nproc_per_node=4"]
    assert_close(finished(*line, *mesh, root=tmp_path / "runs"), once(*line))  # the fifth step has three micro-batches


@pytest.mark.slow
def test_activations_of_a_module_that_returns_several_are_those_of_the_first(tmp_path: Path) -> None:
    line = [*RUN, "model._target_=tests.two_inputs.TwoInputs", "dataset._target_=tests.two_inputs.Pairs", "part=activations"]
    ended = finished(*line, "part.activations.modules=['']", root=tmp_path / "runs")
    assert any(row.get("activation_rms:", 0) > 0 for row in ended.rows)
    assert "matches no module" in refused(*line, "part.activations.modules=[head.none]", "rehearse=true")


def test_activations_that_are_no_numbers_are_refused() -> None:
    module = nn.Sequential(nn.Identity())
    part = Activations(modules=["0"])
    alone = {"any": bool, "distinct": lambda value: [value]}
    loop: Any = SimpleNamespace(module=module, **alone, is_padding=False, has_row=True)
    part.begun(loop)
    part.step_begun(loop)
    module(torch.arange(4))
    with pytest.raises(ValueError, match="none of them returns a tensor of floating-point numbers"):
        part.row(loop)


def test_dictionaries_of_tokens_are_cut_where_they_are_as_long() -> None:
    part = LengthWarmup(start=2, steps=4, multiple_of=2)
    inputs = {
        "ids": torch.arange(16).view(2, 8),
        "mask": torch.ones(2, 8),
        "kind": torch.zeros(2),
        "image": torch.zeros(2, 3, 4),
    }
    loop: Any = SimpleNamespace(step=2)
    cut, targets = part.batch(loop, inputs, torch.arange(16).view(2, 8))
    assert {name: [*value.shape] for name, value in cut.items()} == {
        "ids": [2, 4],
        "mask": [2, 4],
        "kind": [2],
        "image": [2, 3, 4],
    }
    assert targets.shape == (2, 4) and torch.equal(cut["ids"], inputs["ids"][:, :4])
    with pytest.raises(ValueError, match="no second dimension"):
        part.batch(loop, torch.zeros(4), torch.zeros(4))


def test_sharpness_is_the_gradient_of_a_point_uphill(tmp_path: Path) -> None:
    line = [*RUN, *MODELS["cnn with BatchNorm"], "part=sharpness", "part.sharpness.radius=0.5", "trainer.max_steps=1",
            "optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=1", "scheduler=constant",
            "scheduler.warmup_steps=0", "trainer.clip_grad_norm=null", "model.dropout=0"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    config = checked(*line)
    dataset, model = components.dataset(config.dataset), components.model(config.model, seed=0).double().train()
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    inputs, targets = (torch.from_numpy(array) for array in source.gather(order.batch(0)[1]))
    inputs, targets = dataset.transform(inputs, targets, keys=None)
    inputs = inputs.double()

    def gradient(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for start in range(0, 14, 4):
            buffers = {name: value.clone() for name, value in model.named_buffers()}
            wanted = {name: value.detach().requires_grad_() for name, value in weights.items()}
            outputs = torch.func.functional_call(model, wanted | buffers, (inputs[start : start + 4],))
            loss = F.cross_entropy(outputs, targets[start : start + 4], reduction="sum") / 14
            for name, value in zip(wanted, torch.autograd.grad(loss, list(wanted.values()))):
                total[name] += value
        return total

    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = gradient(start)
    norm = torch.stack([value.norm() for value in first.values()]).norm()
    uphill = gradient({name: value + 0.5 * first[name] / norm for name, value in start.items()})
    with safe_open(ended.directory / "model.safetensors", framework="pt") as final:
        for name, value in start.items():
            assert (final.get_tensor(name) - (value - uphill[name])).abs().max() < 1e-10, name


@pytest.mark.parametrize("order", ["unfreeze,sharpness", "sharpness,unfreeze"])
def test_a_frozen_layer_stays_where_it_is_whichever_part_comes_first(order: str, tmp_path: Path) -> None:
    line = [*RUN, *MODELS["mlp"], f"part=[{order}]", "part.unfreeze.groups=[[layers.*]]", "part.unfreeze.every=9",
            "part.sharpness.radius=0.5", "trainer.max_steps=2", "optimizer=sgd"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    start = model_of(ended).double().state_dict()
    moved = {name for name, weights in ended.weights.items() if not weights.double().equal(start[name])}
    assert moved == {"head.weight", "head.bias"}
