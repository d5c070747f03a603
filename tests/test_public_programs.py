"""Public packages, unchanged, compute what their plain loops compute, under every strategy and after a kill too."""

from pathlib import Path

import pytest

from tests.test_benchmarks import load

public = load("public_programs")
IN_FLOAT32 = {"flow", "mamba", "ppo"}  # the package adds up its loss in float32; ppo computes in it


def most_apart(name: str) -> float:
    """Return by how much the weights may differ."""
    return 1e-4 if public.PROGRAMS[name].precision == "fp32" else 1e-9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", public.PROGRAMS)
def test_a_public_program_keeps_its_numbers_in_every_way_or_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    try:
        public.loop_of(name)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    killed = public.strategies_to_kill(name)
    found = public.measure(name, folder=tmp_path, strategies=public.STRATEGIES, killed=killed)
    for apart in (found.from_plain, *found.from_single.values()):
        if not isinstance(apart, str):
            assert apart.weights < most_apart(name) and apart.losses < (1e-5 if name in IN_FLOAT32 else 1e-9), found
    assert found.from_single.keys() == {*public.STRATEGIES} and found.survives == dict.fromkeys(killed, True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("name", public.PROGRAMS)
def test_a_public_program_computes_what_it_does_under_lightning(name: str, tmp_path: Path) -> None:
    try:
        public.loop_of(name, folder="with_lightning")
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    apart = public.difference_from_lightning(name, folder=tmp_path)
    assert apart.weights < most_apart(name) and apart.losses < (1e-5 if name in IN_FLOAT32 else 1e-9), apart


def test_each_public_program_is_written_as_a_run_as_a_plain_loop_and_for_lightning() -> None:
    assert all(min(public.lines_of(name)) > 10 for name in public.PROGRAMS)
    for folder in ("plain", "with_lightning", "conf/experiment"):
        assert {path.stem for path in (public.PROJECT / folder).iterdir() if path.is_file()} == public.PROGRAMS.keys(), folder
