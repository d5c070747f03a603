"""Public packages, unchanged, compute what their plain loops compute, on two processes and after a kill too."""

import importlib.util
from pathlib import Path

import pytest

from tests.harness import slow_but
from tests.test_benchmarks import load

public = load("public_programs")
LOSSES = {"flow": 1e-6}  # normflows adds up its loss in float32


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", slow_but([], public.PROGRAMS))
def test_a_public_program_keeps_its_numbers_in_every_way(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, strategies=["ddp", "fsdp"], killed=["ddp", "fsdp"])


def test_a_flow_that_returns_its_own_loss_keeps_its_numbers_under_ddp_and_after_a_kill(tmp_path: Path) -> None:
    check("flow", tmp_path, strategies=["ddp"], killed=["ddp"])


def check(name: str, folder: Path, *, strategies: list[str], killed: list[str]) -> None:
    for package in {target.split(".")[0] for target in public.PROGRAMS[name].needs}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = public.measure(name, folder=folder, strategies=strategies, killed=killed)
    for apart in (found.from_plain, *found.from_single.values()):
        assert apart.weights < 1e-9 and apart.losses < LOSSES.get(name, 1e-9), found
    assert found.survives == dict.fromkeys(killed, True)
