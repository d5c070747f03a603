"""A model's first weights: those of a plain script, under every strategy; and a rank holds only those that it keeps."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.build.components import model
from framework.build.training import Builder
from framework.checkpoint.canonical import gathered, state_of
from framework.config.folders import CONF
from framework.distributed.world import World
from framework.parallel.first_weights import build, fill, named_tensors, put_aside
from models.gpt import GPT
from tests.harness import checked
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def gpt() -> nn.Module:
    return GPT(vocab_size=32, seq_len=8, dim=16, num_layers=2, num_heads=2, tie_embeddings=True)


class Odd(nn.Module):
    """A constructor that reads what it draws, in all the ways that come to mind."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 5)
        self.teacher = copy.deepcopy(self.student)
        self.scaled = nn.Parameter(torch.randn(4, 3) * 0.02)
        self.register_buffer("features", torch.empty(7).normal_(), persistent=False)
        self.register_buffer("twice", self.student.weight.detach() * 2)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(50), std=0.5, a=-0.5, b=0.5))
        self.norm = float(torch.empty(5).uniform_(1, 2).numpy().sum())
        self.again = nn.Linear(3, 2)
        nn.init.normal_(self.again.weight, std=3.0)
        nn.init.zeros_(self.again.bias)
        self.table = nn.Embedding(4, 3, padding_idx=1)
        fused = torch.empty(6, 4).normal_()
        self.upper, self.lower = nn.Parameter(fused[:3]), nn.Parameter(fused[3:])
        self.own = nn.Parameter(torch.empty(4).normal_(generator=torch.Generator().manual_seed(5)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.fixed = nn.Parameter(torch.randn(4) + torch.empty(4).uniform_())
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.turned = nn.Parameter(torch.empty(2, 7).normal_().t_())
        seen = torch.empty(4)
        array = seen.numpy()
        seen.uniform_(3, 4)
        self.least = float(array.min())  # numpy has the same memory
        self.kept = [nn.Parameter(torch.empty(5).normal_())]  # a plain list, beside the module's own name for it
        self.listed_too = self.kept[0]
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.table.weight


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()}


def seeded(make: Any, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@pytest.mark.parametrize("make", [Odd, gpt])
def test_put_aside_and_filled_a_model_is_what_it_was(make: Any) -> None:
    expected, module = values_of(seeded(make)), seeded(make)
    places = {name: id(tensor) for name, tensor in named_tensors(module).items()}
    put_aside(module)
    assert all(parameter.is_meta for parameter in module.parameters())
    fill(module, device=CPU)
    assert values_of(module).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in values_of(module).items())
    again = {name: id(tensor) for name, tensor in named_tensors(module).items()}
    assert len(set(again.values())) == len(set(places.values())), "what is tied stays tied"


def test_a_rank_without_numbers_has_the_same_tensors_and_what_a_constructor_computes() -> None:
    whole, module = seeded(gpt), build(lambda: seeded(gpt), on_meta=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert [(n, p.shape, p.dtype) for n, p in module.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in whole.named_parameters()
    ]
    assert all(not buffer.is_meta for buffer in module.buffers())
    kept = build(Odd, on_meta=True)  # reads its numbers
    assert all(parameter.is_meta for parameter in kept.parameters()) and kept.kept[0] is kept.listed_too
    assert kept.tied.weight is kept.table.weight


class Reading(nn.Module):
    """It reads the numbers of a net that it gets, which a rank without numbers cannot do."""

    seen: list[nn.Linear] = []

    def __init__(self, net: nn.Linear) -> None:
        super().__init__()
        self.seen.append(net)
        self.net, self.largest = net, float(net.weight.max())


def test_a_constructor_that_is_called_again_gets_a_new_net() -> None:
    net = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    made = model({"_target_": f"{__name__}.Reading", "net": net}, seed=0, on_meta=True)
    assert len({id(net) for net in Reading.seen}) == len(Reading.seen) == 2 and made.net.weight.is_meta


MEMORY = """
import sys
sys.path.insert(0, ROOT)
import torch
from torch import nn
from framework.parallel.first_weights import build

def memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

build(lambda: nn.Linear(2, 2), on_meta=True)
before = memory()
model = build(lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)]), on_meta=True)
print(memory() - before)
"""


@pytest.mark.slow
def test_a_model_without_numbers_takes_the_memory_of_one_layer() -> None:
    code = f"ROOT = {str(CONF.parent)!r}\n{MEMORY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1.5 * 2048 * 2048 * 4


# --- strategies


PRESETS = {"single": 1, "ddp": 2, "zero": 2, "fsdp": 2, "hsdp": 2, "tensor": 2, "fsdp+tp": 2, "pipeline": 2, "ddp+pp": 2, "context": 2,
           "fsdp+context": 2, "auto": 2}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_weights_are_those_of_a_plain_script(preset: str, tmp_path: Path) -> None:
    """`torch.manual_seed(seed)` and the constructor, whatever the strategy and the number of processes."""
    line = ["dataset=synthetic", "dataset.kind=tokens", "dataset.vocab_size=32", "dataset.seq_len=8", "task=language_modeling",
            "model=gpt", "model.dim=16", "model.num_layers=2", "model.num_heads=2", "seed=3", f"parallel={preset}", "device=cpu"]  # fmt: skip
    config = checked(*line, f"launch.nproc_per_node={PRESETS[preset]}")
    arguments = {name: value for name, value in config.model.items() if not name.startswith(("_", "init", "parts"))}
    expected = values_of(seeded(lambda: GPT(**arguments)))

    def act(world: World) -> bool:
        build = Builder(config, world=world)
        module = build.model(on_meta=build.is_sent and world.rank > 0)
        found = gathered(state_of(build.engine(module).module), world=world)
        whole = dict(zip(*found))
        return world.rank > 0 or all(torch.equal(value, expected[name]) for name, value in whole.items())

    assert all(on_ranks(PRESETS[preset], act, scratch=tmp_path))


def test_a_disk_that_is_full_on_rank_0_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """What each rank alone has is sent all the same."""

    def act(world: World) -> str:
        own = {f"{world.rank}.{number}": torch.zeros(1 << 20) for number in range(3)}
        found = gathered(own, world=world)
        try:
            if world.rank == 0:
                next(found[1])
                raise OSError("No space left on device")
        except OSError as error:
            return str(error)
        finally:
            list(found[1])
        return f"{len(found[0])} of all"

    assert on_ranks(3, act, scratch=tmp_path) == ["No space left on device", "9 of all", "9 of all"]
