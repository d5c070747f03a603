"""Under mpirun: the same run over MPI, and over gloo; what stops it, and what it says where MPI is not to be had."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.torch_version import TorchVersion

from extras.mpi import mpi
from extras.mpi.launcher import Mpirun
from framework.cli.run import checked_line
from tests.harness import Ended, Says, assert_close, assert_same_bits, command, finished, once, wait_for, wait_for_checkpoint
from tests.launch.test_local import assert_gone
from tests.test_conformance import MODELS, RUN

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
needs_mpi = pytest.mark.skipif(MPIRUN is None or mpi.is_missing(), reason=f"no MPI here: {mpi.INSTALL}")
# as root, and with more ranks than cores, Open MPI wants to be told
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
           "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::FutureWarning"}  # fmt: skip


_LEFT = tempfile.TemporaryDirectory(prefix="mpi_", ignore_cleanup_errors=True)


_MOST_S = 400.0  # a dozen runs in one command, on a machine that does other things


def mpirun(ranks: int, *words: str | Path) -> "subprocess.Popen[str]":
    line = [str(MPIRUN), "-n", str(ranks), sys.executable, *map(str, words)]
    folder = tempfile.mkdtemp(dir=_LEFT.name)
    # what a killed mpirun leaves behind: its session's folder, and the memory that its ranks shared
    environment = os.environ | ALLOWED | {"TMPDIR": folder, "OMPI_MCA_btl_sm_backing_directory": folder}
    return subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def end(process: "subprocess.Popen[str]", *, root: Path) -> Ended:
    try:
        output, _ = process.communicate(timeout=_MOST_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]  # it is a pipe
    return Ended(process.returncode, output, root)


def train(ranks: int, *overrides: str, root: Path) -> "subprocess.Popen[str]":
    return mpirun(ranks, ROOT / "train.py", *overrides, f"run.root={root}")


MLP = [*RUN, *MODELS["mlp"]]
GPT = [*RUN, *MODELS["gpt, tied"]]
CNN = [*RUN, *MODELS["cnn with BatchNorm"], "model.dropout=0", "micro_batch_size=null", "trainer.sync_batchnorm=true"]


def one_process(line: list[str]) -> Ended:
    return once(*line)


@needs_mpi
@pytest.mark.slow
def test_four_ranks_of_mpirun_compute_what_one_process_does(tmp_path: Path) -> None:
    run = end(train(4, *MLP, "parallel=ddp", "backend=mpi", root=tmp_path / "runs"), root=tmp_path / "runs")
    assert run.code == 0, run.output
    assert run.output.count("steps on 4 x cpu") == 1  # one run, not four
    assert_close(run, one_process(MLP))


STRATEGIES = {
    "ddp": (MLP, ["parallel=ddp", "backend=mpi"]),
    "ddp over gloo": (MLP, ["parallel=ddp", "backend=gloo"]),
    "synchronised BatchNorm": (CNN, ["parallel=ddp", "backend=mpi"]),
    "zero": (MLP, ["parallel=zero", "backend=mpi"]),
    "fsdp": (MLP, ["parallel=fsdp", "backend=mpi"]),
    "tensor": (GPT, ["parallel=tensor", "backend=mpi"]),
    "context": (GPT, ["parallel=context", "parallel.context=2", "backend=mpi"]),
    "pipeline": (GPT, ["parallel=pipeline", "backend=mpi"]),
    "zero-bubble": (MLP, ["parallel=pipeline", "parallel.schedule=zero-bubble", "backend=mpi"]),
}


QUICK = ["ddp"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a strategy: the quick ones have one mpirun, the others too."""
    if MPIRUN is None or mpi.is_missing():
        pytest.skip(f"no MPI here: {mpi.INSTALL}")
    folder = tmp_path_factory.mktemp("two")

    def ran(name: str) -> Path:
        names = QUICK if name in QUICK else [other for other in STRATEGIES if other not in QUICK]
        if not (folder / names[0]).exists():
            lines = [[*STRATEGIES[one][0], *STRATEGIES[one][1], f"run.root={folder / one}"] for one in names]
            (folder / "lines.json").write_text(json.dumps(lines))
            ended = end(mpirun(2, HERE / "mpi_commands.py", folder / "lines.json"), root=folder)
            (folder / "output").write_text(ended.output)
        return folder / name

    return ran


@pytest.mark.slow
@pytest.mark.timeout(_MOST_S + 60)
@pytest.mark.parametrize("name", sorted(STRATEGIES, key=lambda name: name not in QUICK))
def test_a_strategy_over_mpi_computes_what_one_process_does(name: str, two_ranks: Callable[[str], Path]) -> None:
    root = two_ranks(name)
    run = Ended(0, (root.parent / "output").read_text(), root)
    assert run.summary["status"] == "finished", run.output
    assert run.summary["world_size"] == 2
    assert_close(run, one_process(STRATEGIES[name][0]))


@pytest.mark.slow
@needs_mpi
def test_every_operation_of_the_group_is_that_of_torch(tmp_path: Path) -> None:
    ended = end(mpirun(3, HERE / "mpi_operations.py"), root=tmp_path)
    assert ended.code == 0, ended.output
    assert ended.output.count(" passed\n") == 8, ended.output


LONG = [
    *MLP,
    "parallel=ddp",
    "trainer.max_steps=400",
    "trainer.eval_every=null",
    "trainer.log_every=100",
    "checkpoint.every=50",
]


def whole() -> Ended:
    return once(*LONG, "launch.nproc_per_node=2")


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(("signum", "code", "status"), [
    (signal.SIGUSR1, 75, "preempted"),
    pytest.param(signal.SIGKILL, -9, "running", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_to_mpirun_leaves_no_process_and_a_run_that_continues_over_gloo_to_the_same_bits(
    signum: int, code: int, status: str, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    process = train(2, *LONG, "backend=mpi", root=root)
    try:
        wait_for_checkpoint(root)
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(ranks) == 2
        process.send_signal(signum)
        assert_gone(ranks, timeout_s=30)
    finally:
        stopped = end(process, root=root)
    assert (stopped.code, stopped.summary["status"]) == (code, status), stopped.output
    assert_same_bits(finished(*LONG, "launch.nproc_per_node=2", root=root), whole())


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(("fault", "timeout_s", "code", "says", "told"), [
    ("fail", 60, 1, "rank 1: ValueError: a fault of rank 1's own", "rank 1 failed: ValueError: a fault of rank 1's own"),
    pytest.param("stand_still", 30, 71, "rank 1 hangs: it waits, but not for the other ranks, in step 4 (data), at ",
                 "in stand_still; ", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_fails_or_stands_still_ends_them_all(
    fault: str, timeout_s: int, code: int, says: str, told: str, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    (tmp_path / "lines.json").write_text(
        json.dumps([[*LONG, "backend=mpi", f"run.root={root}", f"launch.timeout_s={timeout_s}"]])
    )
    process = mpirun(2, HERE / "mpi_commands.py", tmp_path / "lines.json", fault)
    try:
        wait_for(lambda: len(psutil.Process(process.pid).children()) == 2, timeout_s=60, what="two ranks")
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
    finally:
        failed = end(process, root=root)
    assert failed.code == code, failed.output
    assert failed.summary["status"] == "failed"
    assert failed.summary["error"].startswith(says), failed.output
    assert failed.output.count(told) == 1, failed.output
    assert_gone(ranks)


@needs_mpi
def test_one_process_alone_trains(tmp_path: Path) -> None:
    assert_close(finished(*MLP, "parallel=ddp", "backend=mpi", root=tmp_path / "runs"), one_process(MLP))


# --- what it says where MPI is not to be had: on every machine


def hide_mpi() -> None:
    """Have this process find no mpi4py."""
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "mpi4py" else find(name, *more)  # type: ignore[assignment]
    sys.modules.pop("extras.mpi.group", None)


LACKING = Says("backend.name: extras.mpi.group ... mpi4py ... not installed ... steadfast[mpi] ...")


def test_without_mpi4py_the_backend_is_refused_with_what_would_provide_it(tmp_path: Path) -> None:
    refused = command(*MLP, "parallel=ddp", "backend=mpi", root=tmp_path / "runs", before=hide_mpi)
    assert (refused.code, refused.output) == (78, LACKING)
    assert not list(refused.root.iterdir())


@pytest.mark.skipif(mpi.is_missing(), reason=f"no MPI here: {mpi.INSTALL}")
def test_workers_that_are_not_mpiruns_are_refused(tmp_path: Path) -> None:
    refused = command(*MLP, "parallel=ddp", "backend=mpi", "launch.nproc_per_node=2", root=tmp_path / "runs")
    says = Says("backend: mpi ... mpirun did not start ... 2 processes ... mpirun -n 2")
    assert (refused.code, refused.output) == (78, says)


@pytest.mark.parametrize(
    ("strategy", "version", "is_refused"), [("ddp", "2.12.0", False), ("fsdp", "2.12.0", True), ("fsdp", "2.13.0", False)]
)
def test_it_is_asked_for_no_more_than_an_older_torch_does(
    strategy: str, version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(Mpirun, "started", lambda self: True)
    line = ["backend=mpi", "device=cpu", "launch.nproc_per_node=2", f"parallel={strategy}"]
    found = [str(problem) for problem in checked_line(line).problems if "can only sum and broadcast" in str(problem)]
    assert len(found) == is_refused and all(text.startswith("backend: mpi") for text in found), found


NOT_INSTALLED = Says("mpirun: started 2 processes ... mpi4py ... not installed ... steadfast[mpi] ... torchrun")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("names", "rank"), [("OMPI_COMM_WORLD_{}", 0), ("PMI_{}", 1)])
def test_under_an_mpirun_without_mpi4py_no_process_trains(names: str, rank: int, tmp_path: Path) -> None:
    """Rank 1 speaks too if nothing has ended it: then it is on a node of its own that lacks mpi4py."""

    def as_rank() -> None:
        hide_mpi()
        os.environ |= {names.format("RANK"): str(rank), names.format("SIZE"): "2"}

    refused = command(*MLP, "parallel=ddp", root=tmp_path / "runs", before=as_rank)
    assert (refused.code, refused.output) == (78, NOT_INSTALLED)
    assert not list(refused.root.iterdir())


@pytest.mark.slow
@needs_mpi
def test_under_an_mpirun_without_mpi4py_rank_0_alone_speaks(tmp_path: Path) -> None:
    hidden = "import sys; from extras.mpi import mpi; mpi.is_missing = lambda: True; from train import main; sys.exit(main(sys.argv[1:]))"
    refused = end(mpirun(2, "-c", hidden, *MLP, "parallel=ddp", f"run.root={tmp_path / 'runs'}"), root=tmp_path)
    assert refused.code == 78 and refused.output.splitlines().count(NOT_INSTALLED) == 1, refused.output
    assert not list(tmp_path.iterdir())


@needs_mpi
def test_an_mpirun_of_another_installation_is_refused(tmp_path: Path) -> None:
    """It sets the variables of an mpirun, but mpi4py's library knows nothing of it."""

    def as_rank_0() -> None:
        os.environ |= {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
        os.environ |= {"TMPDIR": str(tmp_path), "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
        warnings.simplefilter("ignore", RuntimeWarning)  # mpi4py's own: "suspicious MPI execution environment"

    refused = command(*MLP, "parallel=ddp", root=tmp_path / "runs", before=as_rank_0)
    says = Says("mpirun: started 2 processes ... mpi4py ... 1 ... different installations")
    assert (refused.code, refused.output) == (78, says)
    assert not list(refused.root.iterdir())
