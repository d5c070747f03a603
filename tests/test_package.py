"""`pip install .` gives the command, the library and the configuration as data, in an environment without this checkout."""

import os
import re
import site
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from tests.harness import typed
from tests.pages import ROOT
from tests.test_own_project import QUICK


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the package in it, and what it depends on from this one."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    python = ["--python", folder / "bin/python"]
    run([sys.executable, "-m", "pip", *python, "install", "--no-deps", "--no-build-isolation", "-q", ROOT], folder.parent)
    return folder


def run(line: list[object], folder: Path, *, code: int = 0, venv: Path | None = None) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STEADFAST_CONF")}
    if venv is not None:
        variables["PATH"] = f"{venv}/bin{os.pathsep}{variables['PATH']}"
    done = subprocess.run(list(map(str, line)), cwd=folder, env=variables, text=True, capture_output=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_package_is_complete(environment: Path, tmp_path: Path) -> None:
    script = (
        "import framework, importlib.metadata as m; print(framework.__file__, framework.__version__, m.version('steadfast'))"
    )
    place, version, installed = run([environment / "bin/python", "-c", script], tmp_path).split()
    package = Path(place).parent
    assert package.is_relative_to(environment) and version == installed
    for name in (
        "py.typed",
        "conf/config.yaml",
        "conf/model/cnn.yaml",
        "project/mynet.py",
        "data/digits.csv.gz",
        "runs/page/uPlot.LICENSE",
        "../extras/local_sgd/diloco.py",
        "../extras/mpi/conf/launchers/mpirun.yaml",
    ):
        assert (package / name).is_file(), name
    assert not list((package.parent / "extras").rglob("tests")) and not (package.parent / "extras" / "conftest.py").exists()
    (metadata,) = environment.glob("lib/python*/site-packages/steadfast-*/METADATA")
    told = Parser().parsestr(metadata.read_text())
    extras = {
        "wandb", "tensorboard", "mlflow", "slurm", "search", "metrics", "data", "object-store", "export", "lightning", "mpi", "float8",
        "all", "trackio", "comet", "clearml", "swanlab", "aim",
    }  # fmt: skip
    assert set(told.get_all("Provides-Extra") or ()) == extras
    assert any(re.match(r"torch\b.*2\.11.*2\.14|torch\b.*2\.14.*2\.11", one) for one in told.get_all("Requires-Dist") or ())


@pytest.mark.slow
def test_the_extras_are_found_in_an_installation(environment: Path, tmp_path: Path) -> None:
    line = [
        "parallel=local-sgd", "launch.nproc_per_node=2", "model=mlp", "trainer.max_steps=8", "trainer.eval_every=null",
        "rehearse=false",
    ]  # fmt: skip
    output = run(["steadfast", *line, "checkpoint.every=null"], tmp_path, venv=environment)
    assert "finished: model.safetensors" in output and str(ROOT) not in output
    shown = run(["steadfast", "parallel=pipeline", "parallel.schedule=pipedream", "--cfg", "job"], tmp_path, venv=environment)
    assert "extras.pipedream.pipedream.pipedream" in shown
    names = run(["steadfast", "--help"], tmp_path, venv=environment)
    assert all(re.search(rf"^ +{name}\b", names, re.MULTILINE) for name in ("diloco", "gossip", "parameter-server", "mpi"))


@pytest.mark.slow
def test_init_writes_a_project_whose_test_passes(environment: Path, tmp_path: Path) -> None:
    project = tmp_path / "first steps"
    run(["steadfast", "init", project], tmp_path, venv=environment)
    passed = run(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"], project, venv=environment)
    assert re.search(r"\d passed", passed)
    lines = re.findall(r"^steadfast \S.*?(?=\s+#|$)", (project / "README.md").read_text(), re.MULTILINE)
    assert lines
    run([*lines[0].split(), *QUICK], project, venv=environment)
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    again = run(["steadfast", "init", project], tmp_path, venv=environment, code=78)
    assert "exists already" in again
    assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_moves_from_a_checkout_to_an_installation_and_back(environment: Path, tmp_path: Path) -> None:
    line = ["model=mlp", *QUICK, f"run.root={tmp_path}/runs"]
    run([sys.executable, ROOT / "train.py", *line], tmp_path)
    assert "finished already" in run(["steadfast", *line], tmp_path, venv=environment)
    run(["steadfast", *line, "seed=1"], tmp_path, venv=environment)
    assert "finished already" in run([sys.executable, ROOT / "train.py", *line, "seed=1"], tmp_path)
    (package,) = environment.glob("lib/python*/site-packages/models/mlp.py")
    text = package.read_text()
    package.write_text(text + "\nOTHER = 1\n")
    refused = run(["steadfast", *line], tmp_path, venv=environment, code=78)
    package.write_text(text)
    assert "models/mlp.py" in refused and "run.code=accept" in refused


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("line", "module", "extra"),
    [
        (["logger=wandb"], "wandb", "wandb"),
        (["logger=tensorboard"], "tensorboard", "tensorboard"),
        (["logger=comet"], "comet_ml", "comet"),
        (["launch=slurm"], "submitit", "slurm"),
        (["-m", "seed=0,1", "hydra/sweeper=optuna"], "optuna", "search"),
        (["run.mirror=s3://bucket/runs"], "s3fs", "object-store"),
    ],
)
def test_what_is_not_installed_is_refused_with_the_command(line: list[str], module: str, extra: str, tmp_path: Path) -> None:
    ended = typed(*line, "rehearse=false", directory=tmp_path, before=lambda: sys.modules.update({module: None}))
    assert ended.code == 78 and f"steadfast[{extra}]" in ended.output and "Traceback" not in ended.output
    assert not (tmp_path / "runs").exists()
