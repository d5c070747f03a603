"""Public packages, unchanged, compute what their plain loops compute, on two processes and after a kill too."""

import importlib.util
from pathlib import Path

import pytest

from tests.test_benchmarks import load

public = load("public_programs")
LOSSES = {"flow": 1e-6}  # normflows adds up its loss in float32


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", public.PROGRAMS)
def test_a_public_program_keeps_its_numbers_in_every_way(name: str, tmp_path: Path) -> None:
    for package in {target.split(".")[0] for target in public.PROGRAMS[name].needs}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    killed = ["ddp", "fsdp"]
    found = public.measure(name, folder=tmp_path, strategies=killed, killed=killed)
    for apart in (found.from_plain, *found.from_single.values()):
        assert apart.weights < 1e-9 and apart.losses < LOSSES.get(name, 1e-9), found
    assert found.survives == dict.fromkeys(killed, True)
