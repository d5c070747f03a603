"""What the benchmarks count, as opposed to time, is checked here."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero, 4", "fsdp, 2"])
def test_a_process_holds_what_the_arithmetic_says(strategy: str) -> None:
    memory = load("memory")
    overrides, expected = memory.STRATEGIES[strategy]
    num_parameters, ranks = memory.measure(overrides)
    assert sum(ranks) / len(ranks) / num_parameters == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_takes_no_more_than_its_part_of_the_model_to_build_load_and_save_it() -> None:
    memory = load("memory")
    overrides, share = memory.PEAKS["fsdp, 2"]
    whole, peaks = memory.peaks_of(overrides)
    part, tensor = whole / share, 8192 * 1024 * 4  # the largest
    assert peaks["build"] < 1.1 * (whole + tensor) and peaks["build elsewhere"] < 1.1 * (part + tensor)
    assert peaks["resume"] < 1.1 * (3 * part + tensor)
    assert peaks["save"] < 1.1 * (7 * part + tensor)
    assert peaks["results"] < 1.1 * (7 * part + 2 * tensor)


def test_lines_are_counted_without_blank_ones_comments_docstrings_and_what_the_benchmark_adds(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""A.\n\nB.\n"""\n\nimport os  # why\nimport given  # benchmark\n\n\ndef f():\n    """C."""\n    # D\n    return os\n'
    )
    assert load("comparison").num_lines(file) == 3
    (tmp_path / "file.yaml").write_text("# A\na: 1 # B\n\nb:\n  c: 2\n")
    assert load("comparison").num_lines(tmp_path / "file.yaml") == 3


def test_each_task_of_the_comparison_is_written_on_both_sides_and_each_variant_replaces_something() -> None:
    comparison = load("comparison")
    assert all(comparison.num_lines(comparison.peer_file(name)) > 0 for name in comparison.TASKS)
    assert all(comparison.our_lines(task) > 0 for task in comparison.TASKS.values())
    for _, name, script in comparison.variants():
        compile(script, name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(600)  # beside others
@pytest.mark.parametrize("name", ["gan", "streamed_lm"])
def test_our_side_of_the_comparison_is_as_docs_comparison_says(name: str, tmp_path: Path) -> None:
    loss, weights, *after_kill = load("comparison").measure(name, folder=tmp_path)
    assert float(loss) < 1e-12 and float(weights) < 1e-12
    assert after_kill == ["0", "0"]


def ended(gpu: ModuleType, folder: Path, *, losses: list[float], weights: bytes) -> Any:
    folder.mkdir()
    rows = [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "model.safetensors").write_bytes(weights)
    return gpu.Ended(0, "", folder)


def test_the_checks_of_a_gpu_find_other_bits(tmp_path: Path) -> None:
    gpu = load("gpu")
    first = ended(gpu, tmp_path / "a", losses=[2.0, 1.0], weights=b"w")
    gpu.Checks._same(first, ended(gpu, tmp_path / "b", losses=[2.0, 1.0], weights=b"w"), what="twice")
    for name, losses, weights in [("c", [2.0, 1.5], b"w"), ("d", [2.0, 1.0], b"v")]:
        with pytest.raises(gpu.Failed, match="twice"):
            gpu.Checks._same(first, ended(gpu, tmp_path / name, losses=losses, weights=weights), what="twice")


def test_each_check_of_a_gpu_is_a_line_and_one_that_fails_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = load("gpu")

    def fail(_: Any) -> str:
        raise gpu.Failed("planted")

    monkeypatch.setattr(gpu.Checks, "bits", lambda self: "equal")
    monkeypatch.setattr(gpu.Checks, "precisions", fail)
    for only, code in [("bits", 0), ("precisions", 1)]:
        monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--only", only])
        assert gpu.main() == code
    out = capsys.readouterr().out
    assert re.search(r"^bits +\d+ s  ok +equal$", out, flags=re.M) and re.search(r"FAILED +planted$", out, flags=re.M)
    assert all(hasattr(gpu.Checks, name) for name in gpu.CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", ["bits", "strategies"])
def test_the_checks_of_a_gpu_that_a_cpu_can_show_pass(check: str) -> None:
    line = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--only", check]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # four runs at a time
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and done.stdout.count("ok  ") == 1, done.stdout + done.stderr
