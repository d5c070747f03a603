"""What only happens on CUDA, on emulated devices: what the host waits for, pinned memory, streams, events."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import compose
from framework.build.training import Builder
from framework.checkpoint.canonical import gathered, state_of
from framework.checkpoint.saver import HostCopies
from framework.data import loader as loader_module
from framework.data.digits import Digits
from framework.data.loader import Loader
from framework.data.order import Order
from framework.data.to_device import to_device
from framework.distributed.world import World
from framework.engine.seam import MicroBatch, Step
from framework.modules.recomputation import offload_activations, recompute_activations
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests import fake_cuda
from tests.emulated_tensors import Emulated
from tests.fake_cuda import BYTES, RACES, WAITS, call, call_ranks
from tests.test_conformance import NOT_EQUAL

RUN = ["trainer.max_epochs=null", "trainer.max_steps=12", "trainer.log_every=5", "checkpoint.every=null"]
TOKENS = ["model=gpt", "model.dim=16", "model.num_layers=2", "dataset=synthetic", "dataset.kind=tokens",
          "task=language_modeling", "dataset.num_train=80", "global_batch_size=8", "micro_batch_size=4"]  # fmt: skip


def seen() -> dict[str, Any]:
    """Return what was counted since the last call."""
    found = {"waits": dict(WAITS), "bytes": dict(BYTES), "races": sorted(set(RACES))}
    for counts in (WAITS, BYTES, RACES):
        counts.clear()
    return found


# --- run in a process with devices


def steps(line: list[str]) -> list[dict[str, Any]]:
    """Return what was counted in each of ten steps, with the fetching of the next, from the third on."""
    with tempfile.TemporaryDirectory() as folder:
        world = World.start(Environment(), backend="auto", device="auto", timeout_s=60.0, scratch=None)
        return counted_steps(Builder(compose(*RUN, *line, f"run.dir={folder}/run"), world=world).trainer(), 10)


def counted_steps(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    following = trainer.begin()
    step, counted = next(following), []
    for _ in range(count):
        trainer.take(step)
        step = next(following)
        counted.append({"device": str(step.micro_batches[0].inputs.device), **seen()})
    return counted[2:]


def whole_run(line: list[str], device: str) -> dict[str, Any]:
    import json

    from train import main

    with tempfile.TemporaryDirectory() as folder:
        code = main([*RUN, *line, f"device={device[:4].strip(':')}", f"run.dir={folder}/run"])
        rows = [json.loads(text) for text in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        return {"code": code, "rows": rows, "log": Path(folder, "run/train.log").read_text(), **seen()}


def on_both(**options: Any) -> list[Any]:
    return [batches(**options, device=device) for device in ("cpu", "cuda:0")]


def batches(*, augment: bool, num_workers: int, device: str, is_plain: bool, is_small: bool) -> list[Any]:
    """Return the inputs of three steps of two micro-batches, on the CPU, and what was counted while they were made."""
    loader_module._MOST_ON_DEVICE = 1 << 28 if is_small else 0
    dataset = Digits(augment=augment, num_workers=num_workers)
    if not is_plain:
        transform = dataset.transform
        dataset.transform = lambda *args, **kwargs: transform(*args, **kwargs)
    source, where = dataset.load("train"), torch.device(device)
    order = Order(num_samples=len(source), global_batch_size=16, seed=3, drop_last=False)
    loader = Loader(dataset, source, order=order, micro_batch_size=8, dp_rank=0, dp_size=1, device=where, dtype=torch.float32)
    following = loader.train(0)
    next(following)
    seen()
    made = [next(following) for _ in range(3)]
    counted = seen()
    loader.close()
    return [[[m.inputs.cpu().tolist() for m in step.micro_batches] for step in made], counted]


def faults() -> list[list[str]]:
    """Return the races that are found where a batch is not waited for, and where its memory is freed too early."""
    device, found = torch.device("cuda:0"), []
    batch = MicroBatch(0, torch.ones(4), torch.ones(4), num_samples=4, start=0)
    for name in ("wait_stream", "record_stream"):
        kind: Any = fake_cuda.Stream if name == "wait_stream" else Emulated
        plain = getattr(kind, name)
        setattr(kind, name, lambda *_: None)
        moved = to_device(Step(0, 4, [batch]), device=device, finish=lambda micro_batch: micro_batch).micro_batches[0]
        setattr(kind, name, plain)
        total = moved.inputs + 1
        del moved
        found.append(seen()["races"])
        del total
    return found


def copies() -> dict[str, Any]:
    """Return what a copy for a checkpoint holds before and after it was waited for, with the next step in between."""
    parameter, kept = torch.arange(4.0, device="cuda:0"), HostCopies()
    seen()
    (copy,) = kept.update({"weight": parameter}).values()
    parameter += 1
    before, counted = copy.isnan().all().item(), seen()
    kept.wait()
    return {"before": before, "after": copy.tolist(), **counted}


def held_activations() -> list[dict[str, Any]]:
    """Return what is counted in a step, plain, with activations held by the CPU, and with recomputation besides."""
    found = []
    for changes in ((), (offload_activations,), (functools.partial(recompute_activations, which=True), offload_activations)):
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Sigmoid()) for _ in range(2)]
        for parameter in (parameter for block in blocks for parameter in block.parameters()):
            torch.nn.init.constant_(parameter, 0.01)
        on_device = [block.to("cuda:0") for block in blocks]
        for change in changes:
            change(on_device)
        x = torch.ones(4, 64, 64, device="cuda:0")
        seen()
        torch.nn.Sequential(*on_device)(x).sum().backward()
        counted, gradient = seen(), on_device[0][0].weight.grad
        assert gradient is not None
        found.append({"gradient": gradient.cpu().tolist(), **counted})
    return found


def spawned(line: list[str]) -> dict[str, Any]:
    """Return how a run of two workers ends, which are spawned, since here are devices, and see none themselves."""
    import contextlib
    import io

    from train import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as told:
        code = main([*RUN, *line, "parallel=ddp", "launch.nproc_per_node=2", "rehearse=false", f"run.dir={folder}/run"])
        log = Path(folder, "run/train.log").read_text()
    return {"code": code, "log": log, "told": told.getvalue()}


def steps_of_rank(rank: int, num_ranks: int, folder: str, line: list[str]) -> list[Any]:
    """Return what was counted in each of six steps of one of several ranks, and the parameters' norm after them."""
    place = Environment(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks)
    found = World.start(place, backend="auto", device="auto", timeout_s=60.0, scratch=Path(folder))
    trainer = Builder(compose(*RUN, *line, f"run.dir={folder}/run"), world=found).trainer()
    counted = counted_steps(trainer, 6)
    norm = sum(float(torch.linalg.vector_norm(value)) for value in gathered(state_of(trainer.engine.module), world=found)[1])
    found.groups.leave()
    found.agreement.barrier()
    return [str(found.device), counted, norm if rank == 0 else None]


# --- the tests


QUICK = [*TOKENS, "model.dropout=0.1", "precision=bf16", "trainer.ema_decay=0.9"]
STEPS = [
    QUICK,
    ["model=cnn", "dataset=digits", "dataset.augment=true"],
    ["model=cnn", "dataset=digits", "precision=bf16", "micro_batch_size=16", "trainer.clip_grad_norm=1.0"],
    [*TOKENS, "optimizer=muon", "trainer.activation_checkpointing=true"],
    [*TOKENS, "model.dim=64", "dataset.seq_len=64", "trainer.activation_offload=true"],
    ["model=cnn", "dataset=digits", "parallel=model-parallel", "parallel.num_devices=2"],
    ["model=mlp", "dataset=digits", "parallel=zero"],
    ["model=resnet", "model.depth=18", "dataset=synthetic", "global_batch_size=2", "optimizer=sgd"],
]


@pytest.mark.slow
@pytest.mark.parametrize("line", STEPS, ids=lambda line: " ".join(line[-2:]))
def test_a_step_waits_for_nothing_and_a_row_once(line: list[str]) -> None:
    counted = call(steps, line=line)
    assert {step["device"] for step in counted} == {"cuda:0"}
    assert [step["races"] for step in counted] == [[]] * 8
    assert [sum(step["waits"].values()) for step in counted] == [0, 0, 1, 0, 0, 0, 0, 1], counted


@pytest.mark.slow
def test_activations_are_held_by_the_cpu() -> None:
    """And come back the same: the emulation fills pinned memory with nan until what was copied is there."""
    plain, held, inputs = call(held_activations)
    kept = 4 * 64 * 64 * 4  # bytes: four samples of 64 tokens
    assert (plain["bytes"], held["bytes"], inputs["bytes"]) == (
        {},
        {"from the device": 2 * 3 * kept, "to the device": 2 * 3 * kept},  # of two blocks: the input, and of tanh and sigmoid
        {"from the device": 2 * kept, "to the device": 2 * kept},
    )
    assert plain["gradient"] == held["gradient"] == inputs["gradient"] and held["waits"] == inputs["waits"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("line", [["model._target_=tests.faulty.Statistics", "parallel=ddp"],
                                  pytest.param(["model=mlp", "parallel=tensor"], marks=pytest.mark.slow)])  # fmt: skip
def test_what_rank_0_has_moved_and_which_gradients_exist_no_host_asks_a_device(line: list[str]) -> None:
    images = ["dataset=synthetic", "dataset.image_size=8", "launch.nproc_per_node=2", "rehearse=false"]
    for _, counted, _ in call_ranks(steps_of_rank, 2, line=[*images, *line]):
        assert [sum(step["waits"].values()) for step in counted] == [0, 0, 1, 0], counted


@pytest.mark.slow
def test_what_must_decide_in_a_step_waits_once() -> None:
    for line in (["trainer.divergence.action=skip"], ["precision=fp16"], ["invariance=bitwise", "micro_batch_size=32"]):
        counted = call(steps, line=["model=mlp", "dataset=digits", *line])
        assert [sum(step["waits"].values()) for step in counted] == [1, 1, 2, 1, 1, 1, 1, 2], counted


# ddp's step is in the quick test above
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp", "hsdp", "tensor", "fsdp+tp", "pipeline", "ddp+pp", "context", "fsdp+context",
                                      "local-sgd", "diloco", "gossip"])  # fmt: skip
def test_no_strategy_waits_in_a_step(strategy: str) -> None:
    line = [*TOKENS, f"parallel={strategy}", "launch.nproc_per_node=2"]
    ranks = call_ranks(steps_of_rank, 2, line=line)
    assert [device for device, _, _ in ranks] == ["cuda:0", "cuda:1"]
    for _, counted, _ in ranks:
        assert [sum(step["waits"].values()) for step in counted] == [0, 0, 1, 0], counted
    if strategy not in NOT_EQUAL:  # whose processes meet now and then only
        ((_, _, alone),) = call_ranks(steps_of_rank, 1, line=TOKENS)
        assert ranks[0][2] == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_run_on_a_device_has_the_numbers_of_one_on_the_cpu() -> None:
    line = ["model=cnn", "dataset=digits", "dataset.augment=true", "trainer.eval_every=6", "checkpoint.every=4"]
    here, there = (call(whole_run, line=line, device=device) for device in ("cpu", "cuda:0"))
    assert (here["code"], there["code"]) == (0, 0) and there["races"] == []
    assert here["bytes"] == {} and there["bytes"]["to the device"] > 0
    for one, other in zip(here["rows"], there["rows"], strict=True):
        assert one["split"] == other["split"] and one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert sum(row["forward_backward_s"] for row in there["rows"] if row["split"] == "train") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_plain", "is_small"), [(True, False), (True, True), (False, True)], ids=["vectorised", "small", "own transform"]
)
@pytest.mark.parametrize(("augment", "num_workers"), [(False, 0), (True, 2)])
def test_batches_cross_the_bus_as_they_are_stored(augment: bool, num_workers: int, is_plain: bool, is_small: bool) -> None:
    """Samples of a small split are on the device already, and only their numbers cross the bus, as inputs and as targets."""
    given: dict[str, Any] = {"augment": augment, "num_workers": num_workers, "is_plain": is_plain, "is_small": is_small}
    (here, nothing), (there, counted) = call(on_both, **given)
    assert here == there and nothing["bytes"] == {}
    assert (counted["waits"], counted["races"]) == ({}, [])
    image = 8 if is_plain and is_small else 8 * 8 * (1 if is_plain else 4)  # uint8, or float32
    draws = 3 * 8 if augment and is_plain else 0
    assert counted["bytes"]["to the device"] == 3 * 16 * (image + 8 + draws)


@pytest.mark.slow
def test_workers_are_spawned_where_there_are_devices() -> None:
    on_cpu = call(spawned, line=["model=mlp", "dataset=digits", "device=cpu"])
    assert on_cpu["code"] == 0, on_cpu["log"]
    without = call(spawned, line=["model=mlp", "dataset=digits"])
    assert without["code"] == 78, without["log"]
    assert "device: auto, but PyTorch sees no CUDA device on" in without["log"]


@pytest.mark.slow
def test_the_emulation_finds_what_would_be_a_race() -> None:
    not_waited, not_recorded = call(faults)
    assert any("uses a tensor that another stream writes" in race for race in not_waited)
    assert any("freed while another stream uses it" in race for race in not_recorded)


@pytest.mark.slow
def test_a_checkpoint_s_copies_are_pinned_and_made_in_the_order_of_the_step() -> None:
    assert call(copies) == {
        "before": True,
        "after": [0.0, 1.0, 2.0, 3.0],
        "waits": {},
        "bytes": {"from the device": 16},
        "races": [],
    }
