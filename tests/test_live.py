"""Objects of a program as the components of a draft: what the same loop by hand computes, in one process and in several."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from framework import ConfigurationError, RunFailed, compose, load, run
from framework.config.folders import ROOT
from framework.live import words_of
from framework.runtime.log import LOGGER
from framework.runtime.program import program
from tests.harness import Says, typed

KEYS: dict[str, Any] = {"precision": "fp64", "scheduler": "constant", "global_batch_size": 40, "trainer": {"max_steps": 12, "max_epochs": None, "log_every": 1}}  # fmt: skip


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def network(width: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)).double()


def by_hand(steps: int = 12, *, gamma: float = 1.0) -> nn.Module:
    net, (inputs, targets) = network(), data()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    return net


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


def in_a_program(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own, in its folder."""

    @functools.wraps(test)
    def run_test(tmp_path: Path, **values: Any) -> None:
        ended = typed("--version", directory=tmp_path, before=lambda: test(tmp_path=tmp_path, **values))
        assert ended.code == 0, "\n" + ended.output

    return run_test


SAMPLES = {"train": data(), "val": data(8)}


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss for each number."""
    return (outputs - targets) ** 2


OPTIMIZERS: dict[str, Any] = {
    "one that exists": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.8, 0.99)),
    "a function": lambda net: lambda parameters: torch.optim.Adam(parameters, lr=1e-2, betas=(0.8, 0.99)),
    "settings": lambda net: {"_target_": "torch.optim.Adam", "lr": 1e-2, "betas": [0.8, 0.99]},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@in_a_program
def test_a_draft_of_objects_computes_what_the_loop_by_hand_does(kind: str, tmp_path: Path) -> None:
    net = network()
    loss: Any = nn.MSELoss() if kind != "a function" else squared
    done = run(model=net, dataset=SAMPLES, task=loss, optimizer=OPTIMIZERS[kind](net), **KEYS)
    assert_equal_models(net, by_hand())
    assert_equal_models(load(done.directory), net)
    assert done.directory.name == "draft" and done.summary["status"] == "finished"


@in_a_program
def test_a_scheduler_is_a_function_of_the_optimizer(tmp_path: Path) -> None:
    net = network()
    given: Any = {"dataset": SAMPLES, "task": nn.MSELoss(), "optimizer": OPTIMIZERS["a function"](net)}
    given |= KEYS | {"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
    with pytest.raises(RunFailed, match="exit 78: scheduler.every: "):
        run(model=net, **given)
    run(model=net, **given, **{"scheduler.every": "step"})
    assert_equal_models(net, by_hand(gamma=0.9))


GROUPS: Any = [{"lr": 1e-3, "momentum": 0.5}, {"lr": 3e-2, "weight_decay": 0.1}]


@pytest.mark.parametrize("words", [(), ("parallel=fsdp", "launch.nproc_per_node=2")])
@in_a_program
def test_the_groups_of_an_optimizer_are_those_of_the_run(words: tuple[str, ...], tmp_path: Path) -> None:
    def groups(net: Any) -> Any:
        return torch.optim.SGD([{"params": net[n].parameters(), **own} for n, own in zip((2, 0), GROUPS)], lr=1.0, momentum=0.9)

    net, own = network(), network()
    run(*words, model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=groups(net), **KEYS)
    optimizer, (inputs, targets) = groups(own), data()
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.mse_loss(own(inputs), targets).backward()
        optimizer.step()
    assert_equal_models(net, own)


@pytest.mark.parametrize("total", [{}, {"total_steps": 12}])
@in_a_program
def test_a_scheduler_with_a_number_of_steps_counts_steps(total: dict[str, int], tmp_path: Path) -> None:
    given: Any = {"dataset": SAMPLES, "task": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.4, **total)
    done = run(model=network(), **given | KEYS | {"scheduler": cycle})
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    scheduler, rates = cycle(optimizer, total_steps=12), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [row["lr"] for row in done.rows if row["split"] == "train"] == pytest.approx(rates)


@in_a_program
def test_it_does_so_on_two_processes_also_after_torch_has_computed_here(tmp_path: Path) -> None:
    net = network()
    torch.set_num_threads(2)
    (torch.rand(512, 512) @ torch.rand(512, 512)).exp().sum()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.8, 0.99))
    run("parallel=ddp", "launch.nproc_per_node=2", model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=optimizer, **KEYS)
    assert_equal_models(net, by_hand())


@in_a_program
def test_code_that_has_been_edited_in_between_does_the_new_thing(tmp_path: Path) -> None:
    losses = []
    for factor in (1.0, 3.0):  # as a cell that is edited and run again
        cell: dict[str, Any] = {}
        exec(f"def loss(outputs, targets):\n    return {factor} * ((outputs - targets) ** 2).mean()", cell)
        done = run(model=network(), dataset=SAMPLES, task=cell["loss"], optimizer=torch.optim.SGD, **KEYS)
        losses.append(done.rows[0]["loss"])
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-12)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*data(30))


def pairs() -> Iterator[Any]:
    yield from zip(*data(30))


DATA: dict[str, Callable[[], Any]] = {
    "pairs": lambda: list(zip(*data())),
    "a dataset": lambda: TensorDataset(*data()),
    "a loader": lambda: {
        "train": DataLoader(TensorDataset(*data()), batch_size=40, shuffle=True),
        "val": TensorDataset(*data(8)),
    },
    "a stream": lambda: {"train": Endless(), "val": Endless()},
    "a generator function": lambda: {"train": pairs, "validation": pairs},
    "several for validation": lambda: {"train": data(), "val": {"one": data(8), "two": data(9)}},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", DATA)
@in_a_program
def test_data_come_in_as_they_are(kind: str, tmp_path: Path) -> None:
    net = network()
    done = run(model=net, dataset=DATA[kind](), task=nn.MSELoss(), optimizer=torch.optim.Adam, **KEYS)
    splits = [row["split"] for row in done.rows]
    assert splits.count("train") == 12 and ("val.two" in splits) is (kind == "several for validation")
    assert not torch.equal(net.state_dict()["0.weight"], network().state_dict()["0.weight"])


@pytest.mark.slow
def test_the_rest_of_a_model_stays_and_a_loss_that_is_no_mean_is_told(tmp_path: Path) -> None:
    def program() -> None:
        net: Any = network()
        net[0].requires_grad_(False)
        optimizer = torch.optim.SGD(net[2].parameters(), lr=0.5)
        optimizer.param_groups[0]["lr"] = 0.25
        done = run(model=net, dataset=SAMPLES, task=nn.MSELoss(reduction="sum"), optimizer=optimizer, **KEYS)
        assert torch.equal(net.state_dict()["0.weight"], network().state_dict()["0.weight"]) and done.rows[0]["lr"] == 0.25
        assert not torch.equal(net.state_dict()["2.weight"], network().state_dict()["2.weight"])
        first = run(model=network(), dataset=SAMPLES, task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
        run(model=network(4), dataset=SAMPLES, task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
        with pytest.raises(ValueError, match="another draft has replaced this one"):
            first.metrics  # noqa: B018

    ended = typed("--version", directory=tmp_path, before=program)
    assert ended.code == 0, ended.output
    assert ended.output.count("the loss of a batch is not the mean of its samples' losses") == 1, ended.output


@pytest.mark.slow
@in_a_program
def test_what_cannot_be_an_object_is_named_and_an_object_is_not_there_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="metric: a object is not a value of this key"):
        compose(model=network(), metric=object())
    with pytest.raises(ConfigurationError, match="trainer.max_stepz: unknown key"):
        compose(trainer={"max_stepz": 3})
    net: Any = network()
    two = torch.optim.SGD([{"params": [p]} for p in network().parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match="optimizer: holds 4 parameters, and the model trains 4 others"):
        run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=two, **KEYS)
    with pytest.raises(ConfigurationError, match="optimizer: has several groups of parameters, of a model that is no object"):
        run(model="mlp", dataset=SAMPLES, task=nn.MSELoss(), optimizer=two, **KEYS)
    with pytest.raises(ConfigurationError, match="optimizer: is a partial with its parameters"):
        part = functools.partial(torch.optim.SGD, net.parameters(), lr=0.1)
        run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=part, **KEYS)
    with pytest.raises(RunFailed, match="optimizer: the function returns an optimizer of parameters that it is not given"):
        other = functools.partial(lambda params, of: torch.optim.SGD(of, lr=0.1), of=[*net.parameters()])
        run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=other, **KEYS)
    with pytest.raises(ConfigurationError, match=r"scheduler: a StepLR has its optimizer already .* partial\(StepLR"):
        compose(model=net, scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters()), 3))
    net[0].requires_grad_(False)  # the optimizer holds more parameters than are trained
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **KEYS)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"2.weight", "2.bias"}
    net[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match="optimizer: holds 2 parameters, and the model trains 4"):
        run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=torch.optim.SGD(net[2].parameters(), lr=0.1), **KEYS)
    with pytest.raises(ConfigurationError, match="dataset: train is an iterator, which can be read once"):
        run(model=net, dataset={"train": pairs(), "val": pairs()}, task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
    with pytest.raises(ConfigurationError, match="dataset: some splits have an index, and others are streams"):
        run(model=net, dataset={"train": pairs, "val": data()}, task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
    with pytest.raises(ConfigurationError, match="dataset: tests is no split"):
        compose(model=net, dataset={"train": data(), "tests": data()})
    with pytest.raises(ConfigurationError, match="train has tensors of 3 and 4 samples"):
        run(model=net, dataset=(np.zeros((3, 2)), np.zeros(4)), task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
    config = compose("model=mlp", trainer={"max_steps": 3}, name="it's", seed=4)
    assert (config.trainer.max_steps, config.name, config.seed, config.draft) == (3, "it's", 4, False)
    net = network()
    done = run(model=net, dataset=SAMPLES, task=nn.MSELoss(), optimizer=torch.optim.SGD, **KEYS)
    assert not compose("model=mlp").draft
    assert_equal_models(load(done.directory), net)


@pytest.mark.slow
def test_a_notebook_shows_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = "import torch\nfrom torch import nn\nfrom framework import run\nnet = nn.Linear(6, 1)\nx = torch.randn(40, 6)"
    call = "done = run(model=net, dataset=(x, x[:, :1]), task=nn.MSELoss(), optimizer=torch.optim.Adam, global_batch_size=8, trainer={'max_epochs': 3})"
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in (cell, call, call, "done.summary['status']")]
    )
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]
    assert all("step 12/12  loss" in text and "finished: " in text for text in said[1:3]), said
    assert book.cells[3].outputs[0]["data"]["text/plain"] == "'finished'"


@in_a_program
def test_an_object_of_a_module_that_was_edited_is_refused_until_it_is_reloaded(tmp_path: Path) -> None:
    module = tmp_path / "edited_net.py"
    module.write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    edited_net = importlib.import_module("edited_net")
    given = {"dataset": SAMPLES, "task": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    run(model=edited_net.Net(6, 1).double(), **given, **KEYS)
    module.write_text(module.read_text().replace("pass", "scale = 2"))
    with pytest.raises(ConfigurationError, match=r"run\.code: edited_net\.py: Net: the file has changed"):
        run(model=edited_net.Net(6, 1).double(), **given, **KEYS)
    importlib.reload(edited_net)
    run(model=edited_net.Net(6, 1).double(), **given, **KEYS)


def test_an_optimizer_that_has_taken_steps_begins_anew_and_this_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    said = list[list[str]]()
    for _ in range(2):
        caplog.clear()
        _, problems = words_of({"model": net, "optimizer": optimizer})
        said.append(caplog.messages)
        net(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert problems == []
    assert said[0] == [] and said[1] == [Says("optimizer: ... has a state ... a new optimizer ...")]


def test_the_next_command_can_be_given_where_the_notebook_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    monkeypatch.setenv("PATH", "")  # steadfast is not installed
    said = []
    for folder in (ROOT, tmp_path):
        monkeypatch.chdir(folder)
        said.append(program())
    assert said == ["python train.py", f"python {ROOT / 'train.py'}"]
