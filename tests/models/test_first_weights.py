"""A model's first weights: the same whoever draws them; and a rank has only those that it keeps."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from framework.checkpoint import weights
from framework.checkpoint.gathering import gathered, state_of
from framework.config.folders import CONF
from framework.distributed.world import World
from framework.modules import draws
from framework.modules.draws import LaterDraws
from framework.modules.first_weights import build_drawn, build_empty, fill, named_tensors
from models.gpt import GPT
from tests.harness import finished
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
        self.plain = torch.randn(3)  # no buffer, no parameter
        self.register_buffer("features", torch.empty(7).normal_(), persistent=False)
        self.register_buffer("twice", self.student.weight.detach() * 2)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(50), std=0.5, a=-0.5, b=0.5))
        self.norm = float(torch.empty(5).uniform_(1, 2).numpy().sum())
        self.listed = torch.rand(2).tolist()
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


def test_a_constructor_that_reads_what_it_draws_gets_what_it_says() -> None:
    torch.manual_seed(3)
    module = build_drawn(Odd, seed=3)
    assert torch.equal(module.teacher.weight, module.student.weight)
    assert torch.equal(module.twice, module.student.weight * 2)
    assert torch.allclose(module.orthogonal @ module.orthogonal.T, torch.eye(6), atol=1e-5)
    assert module.truncated.abs().max() <= 0.5 and module.truncated.std() > 0.2
    assert 5 <= module.norm <= 10 and all(0 < value < 1 for value in module.listed)
    assert module.again.weight.std() > 1 and not module.again.bias.any()
    assert not module.table.weight[1].any() and module.table.weight[0].all() and module.tied.weight is module.table.weight
    assert module.upper.data_ptr() + 3 * 4 * 4 == module.lower.data_ptr()
    assert torch.equal(module.own, torch.empty(4).normal_(generator=torch.Generator().manual_seed(5)))
    torch.manual_seed(11)
    assert torch.equal(module.fixed, torch.randn(4) + torch.empty(4).uniform_())
    assert module.turned.shape == (7, 2) and module.turned.stride() == (1, 7) and 3 <= module.least <= 4
    assert module.plain.isfinite().all() and module.plain.std() > 0.01 and module.features.std() > 0.1
    assert len({float(t.flatten()[0]) for t in values_of(module).values() if t.numel() > 2}) > 12  # keys of their own


@pytest.mark.parametrize("block", [draws._BLOCK, 7])
@pytest.mark.parametrize("make", [Odd, gpt])
def test_empty_and_filled_it_is_what_it_is_drawn_at_once(make: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_BLOCK", block)
    torch.manual_seed(3)
    whole = build_drawn(make, seed=3)
    torch.manual_seed(3)
    module = build_empty(make, seed=3)
    assert any(tensor.is_meta for tensor in named_tensors(module).values())
    places = {name: id(tensor) for name, tensor in named_tensors(module).items()}
    fill(module, device=CPU)
    expected = values_of(whole)
    assert values_of(module).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in values_of(module).items())
    again = {name: id(tensor) for name, tensor in named_tensors(module).items()}
    assert len(set(again.values())) == len(set(places.values()))  # what is tied stays tied
    if make is Odd:
        assert torch.equal(module.plain, whole.plain) and module.norm == whole.norm and module.least == whole.least
        assert torch.equal(module.kept[0], whole.kept[0]) and torch.equal(module.kept[0], module.listed_too)


def test_a_weight_depends_on_its_name_and_the_seed_and_on_nothing_else() -> None:
    def make(num_layers: int) -> nn.Module:
        torch.manual_seed(0)
        return build_drawn(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)]), seed=0)

    long, short = values_of(make(4)), values_of(make(2))
    assert all(torch.equal(value, long[name]) for name, value in short.items())
    assert not torch.equal(long["0.weight"], long["1.weight"])
    torch.manual_seed(1)
    other = values_of(build_drawn(lambda: nn.Sequential(nn.Linear(8, 8)), seed=1))
    assert not torch.equal(other["0.weight"], long["0.weight"])


def test_an_initialisation_that_fails_fails_where_it_is_called() -> None:
    """Constructors try one initialisation, and take another for vectors."""

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        for parameter in model.parameters():
            try:
                nn.init.orthogonal_(parameter)
            except ValueError:
                nn.init.zeros_(parameter)
        with pytest.raises(RuntimeError, match="std >= 0"):
            model.weight.data.normal_(std=-1.0)
        return model

    model = build_drawn(build, seed=0)
    assert torch.equal(model.bias, torch.zeros(2))
    torch.testing.assert_close(model.weight @ model.weight.t(), torch.eye(2))


def test_what_is_overwritten_is_not_drawn() -> None:
    torch.manual_seed(0)
    noted = LaterDraws(0)
    with noted:
        layer = nn.Linear(64, 64)
        for _ in range(3):
            nn.init.normal_(layer.weight)
    (later,) = [later for later in noted._later.values() if len(later.operations) and later.operations[0][1][0].ndim == 2]
    assert len(later.operations) == 1


MEMORY = """
import sys
sys.path.insert(0, ROOT)
import torch
from torch import nn
from framework.modules.first_weights import build_drawn, build_empty, fill

def memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

make = lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])
build_empty(lambda: nn.Linear(2, 2), seed=0)
before = memory()
torch.manual_seed(0)
model = build_empty(make, seed=0)
built = memory() - before
for number in range(8, 16):
    del model[8]
fill(model, device=torch.device("cpu"))
print(built, memory() - before)
"""


def test_a_model_that_is_not_filled_takes_no_memory_and_half_a_model_half() -> None:
    code = f"ROOT = {str(CONF.parent)!r}\n{MEMORY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    built, filled = (int(kilobytes) / 1024 for kilobytes in done.stdout.split())
    layer = 2048 * 2048 * 4 / 2**20
    assert built < layer
    assert 8 * layer <= filled < 11 * layer


# --- strategies


def sharded(model: nn.Module, world: World) -> None:
    fully_shard(model, mesh=world.mesh(shard=None))


def cut(model: nn.Module, world: World) -> None:
    parallelize_module(model, world.mesh(tensor=None), {"0": ColwiseParallel(), "2": ColwiseParallel()})


@pytest.mark.parametrize("way", [sharded, cut])
def test_a_rank_reads_of_a_file_what_it_keeps(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

    stored = {name: torch.randn(tensor.shape) for name, tensor in named_tensors(make()).items()}
    save_file(stored, tmp_path / "weights.safetensors")
    plain, counts = weights._read, [0]

    def read(file: Any, tensor: Any, place: Any) -> Tensor:
        part = plain(file, tensor, place)
        counts[0] += part.numel()
        return part

    monkeypatch.setattr(weights, "_read", read)

    def act(world: World) -> tuple[int, int, bool]:
        torch.manual_seed(0)
        module = build_empty(make, seed=0)
        weights.load_file(tmp_path / "weights.safetensors", module)
        way(module, world)
        fill(module, device=CPU)
        own = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in named_tensors(module).values())
        found = gathered(state_of(module), world=world)
        whole = dict(zip(found.kinds, found.tensors))
        is_right = world.rank > 0 or all(torch.equal(whole[name], value) for name, value in stored.items())
        return counts[0], own, is_right

    total = sum(tensor.numel() for tensor in stored.values())
    for num_read, own, is_right in on_ranks(2, act, scratch=tmp_path):
        assert num_read == own < 0.7 * total
        assert is_right


@pytest.mark.parametrize("way", [sharded, cut])
def test_a_rank_draws_of_a_large_tensor_the_blocks_that_it_keeps(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 6))
        nn.init.trunc_normal_(layers[2].weight, std=0.5)
        return layers

    monkeypatch.setattr(draws, "_BLOCK", 24)
    torch.manual_seed(0)
    expected = values_of(build_drawn(make, seed=0))
    counts: list[int] = []
    write = draws._Later.write
    monkeypatch.setattr(draws._Later, "write", lambda self, *block: (counts.append(len(block)), write(self, *block)))

    def act(world: World) -> tuple[int, bool]:
        torch.manual_seed(0)
        module = build_empty(make, seed=0)
        way(module, world)
        fill(module, device=CPU)
        found = gathered(state_of(module), world=world)
        whole = dict(zip(found.kinds, found.tensors))
        return sum(counts), world.rank > 0 or all(torch.equal(whole[name], value) for name, value in expected.items())

    for num_blocks, is_right in on_ranks(2, act, scratch=tmp_path):
        assert is_right
        assert num_blocks < 5 + 6  # of the 17 rows in blocks of four, and the six in blocks of one


def test_a_disk_that_is_full_on_rank_0_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """What each rank alone has is sent all the same."""

    def act(world: World) -> str:
        own = {f"{world.rank}.{number}": torch.zeros(1 << 20) for number in range(3)}
        found = gathered(own, world=world)
        try:
            if world.rank == 0:
                next(found.tensors)
                raise OSError("No space left on device")
        except OSError as error:
            return str(error)
        finally:
            found.drain()
        return f"{len(found.kinds)} of my own"

    assert on_ranks(3, act, scratch=tmp_path) == ["No space left on device", "3 of my own", "3 of my own"]


# --- runs of earlier versions

RUN = ["dataset=synthetic", "dataset.num_train=40", "model=mlp", "model.dim=8", "trainer.max_epochs=null", "trainer.eval_every=null",
       "checkpoint.every=2", "rehearse=false", "global_batch_size=4"]  # fmt: skip


def test_a_run_that_exists_keeps_how_it_draws(tmp_path: Path) -> None:
    first = finished(*RUN, "trainer.max_steps=4", "run.draws=1", "run.dir=" + str(tmp_path / "first"), root=tmp_path)
    assert "draws: 1" in (tmp_path / "first" / "config.yaml").read_text()
    (tmp_path / "first" / "summary.json").unlink()  # as if it had been killed
    (tmp_path / "first" / "model.safetensors").unlink()
    finished(*RUN, "trainer.max_steps=4", "run.dir=" + str(tmp_path / "first"), root=tmp_path)
    assert "draws: 1" in (tmp_path / "first" / "config.yaml").read_text()
    other = f"run.dir={tmp_path / 'second'}"
    finished(*RUN, "trainer.max_steps=6", other, f"run.resume={tmp_path / 'first'}", root=tmp_path)
    assert "draws: 1" in (tmp_path / "second" / "config.yaml").read_text()
    third = finished(*RUN, "trainer.max_steps=4", f"run.dir={tmp_path / 'third'}", root=tmp_path)
    assert "draws: 2" in (tmp_path / "third" / "config.yaml").read_text()
    assert first.code == third.code == 0
