"""The files in deploy/: right by their schemas, and their command lines train where the environment is as those systems make it."""

import json
import os
import re
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import Ended, assert_close, once, wait_for
from tests.launch.paced import ROOT
from tests.launch.test_elastic import RUN
from tests.launch.test_sockets import free_port  # noqa: F401  # a fixture
from tests.test_extend import steadfast

DEPLOY = ROOT / "deploy"
MIRROR = "run.mirror=s3://BUCKET/runs"  # shown by test_mirror.py
ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[0])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def in_container(command: list[str], folder: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    """Start a container's command line; its volumes are below `folder`, and the image's files are this checkout's."""
    here = {"/opt/steadfast": str(ROOT), "/opt/ml/runs": str(folder / "runs"), "/runs": str(folder / "runs")}
    words = [re.sub("|".join(here), lambda match: here[match[0]], word) for word in command if word != MIRROR]
    return subprocess.Popen([*words, *RUN, *more], cwd=folder, env=steadfast(folder / "bin") | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def ends(processes: list[subprocess.Popen[str]], folder: Path) -> Ended:
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return Ended(0, "\n".join(outputs), folder / "runs")


def test_the_dockerfile_has_no_fault_that_its_linter_knows() -> None:
    told = subprocess.run(["hadolint", DEPLOY / "Dockerfile"], text=True, stdout=subprocess.PIPE)
    assert told.returncode == 0, told.stdout


def test_what_an_image_leaves_out_is_nothing_that_it_needs() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {"tests", "runs", ".git"} <= set(left_out) and not {
        "framework",
        "models",
        "extras",
        "conf",
        "train.py",
        "deploy",
    } & set(left_out)


@pytest.mark.slow
def test_a_signal_reaches_a_run_in_a_container(tmp_path: Path) -> None:
    """Process 1 of a container is tini; `docker stop` and a pod's deletion send it TERM."""
    running = in_container(ENTRYPOINT, tmp_path, "run.root=runs", "trainer.max_steps=100000")
    wait_for(lambda: any(tmp_path.glob("runs/*/*/metrics.jsonl")), what="its first row")
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 75 and "continues from the checkpoint of step" in output


@pytest.mark.slow
def test_a_definition_for_apptainer_runs_the_same_command(tmp_path: Path) -> None:
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n|\n)*)", (DEPLOY / "steadfast.def").read_text(), re.MULTILINE))
    assert sections.keys() == {"files", "post", "runscript"}
    script = "\n".join(line.strip() for line in sections["runscript"].splitlines())
    ends([in_container(["sh", "-c", script, "sh"], tmp_path, "trainer.max_steps=2", "run.root=runs")], tmp_path)


@pytest.mark.parametrize("version", ["1.31", "1.35"])
def test_the_indexed_job_is_one_by_the_schema_of_kubernetes(version: str) -> None:
    import kubernetes_validate

    for document in documents("indexed_job.yaml"):
        assert kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.slow
def test_the_pods_of_an_indexed_job_are_the_nodes_of_one_run(tmp_path: Path) -> None:
    _, job = documents("indexed_job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    pods = [in_container([*ENTRYPOINT, *container["args"]], tmp_path, JOB_COMPLETION_INDEX=str(index))
            for index in range(job["spec"]["completions"])]  # fmt: skip
    ended = ends(pods, tmp_path)
    assert ended.summary["world_size"] == 2
    assert_close(ended, once(*RUN))


def test_the_pytorch_job_is_one_by_the_operators_own_models() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kubeflow.training.api_client import ApiClient

    class Answer:
        data = json.dumps(documents("pytorch_job.yaml")[0])

    client = ApiClient()
    read = client.deserialize(Answer(), "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(read) == json.loads(Answer.data), "what the models do not know is lost"


@pytest.mark.slow
def test_the_pods_of_a_pytorch_job_are_the_nodes_of_one_run(tmp_path: Path, free_port: int) -> None:  # noqa: F811
    """By the variables that the operator sets."""
    (job,) = documents("pytorch_job.yaml")
    port, pods = str(free_port), []
    for rank, replica in enumerate(job["spec"]["pytorchReplicaSpecs"].values()):
        (container,) = replica["template"]["spec"]["containers"]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        agents = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2", "PET_NODE_RANK": str(rank)}
        agents["PET_NPROC_PER_NODE"] = job["spec"]["nprocPerNode"]
        pods.append(in_container([*container["command"], *container["args"]], tmp_path, **meet, **agents))
    ended = ends(pods, tmp_path)
    assert ended.summary["world_size"] == 2
    assert_close(ended, once(*RUN))


@pytest.mark.slow
def test_the_job_for_sagemaker_is_one_by_its_service_model_and_trains(tmp_path: Path) -> None:
    from botocore.session import Session
    from botocore.validate import ParamValidator

    job = json.loads((DEPLOY / "sagemaker.json").read_text())
    model = Session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    assert model.input_shape is not None
    report = ParamValidator().validate(job, model.input_shape)
    assert not report.has_errors(), report.generate_report()
    what = job["AlgorithmSpecification"]
    command = [*what["ContainerEntrypoint"], *what["ContainerArguments"]]
    assert what["ContainerEntrypoint"] == ENTRYPOINT and MIRROR in command
    training = in_container(command, tmp_path, "trainer.max_steps=2", SM_CURRENT_HOST="algo-1", SM_HOSTS='["algo-1"]')
    assert ends([training], tmp_path).summary["status"] == "finished"


@pytest.mark.slow
def test_a_machine_of_any_cloud_gives_the_command_until_it_has_finished(tmp_path: Path) -> None:
    """A stand-in for docker runs the image's entry point here; first the store is not there, then it is told to stop."""
    user_data = (DEPLOY / "cloud_vm.yaml").read_text()
    assert user_data.startswith("#cloud-config\n")
    (script,) = yaml.safe_load(user_data)["write_files"]
    assert Path(script["path"]).parent == Path("/var/lib/cloud/scripts/per-boot") and MIRROR in script["content"]
    environment = steadfast(tmp_path / "bin")
    stop = "(until grep -qs train runs/*/*/metrics.jsonl; do sleep 0.05; done; kill -TERM $$) &"
    programs = {
        "train": script["content"].replace(MIRROR, "").replace("/runs", "runs"),
        "docker": f"""#!/bin/bash
            [[ "$*" == *"--gpus all"* ]] || exit 1
            while [ "$1" != IMAGE ]; do shift; done
            [ -e failed ] || {{ touch failed; exit 74; }}
            [ -e stopped ] || {{ touch stopped; {stop} }}
            exec steadfast "${{@:2}}" """,
        "nvidia-smi": "#!/bin/sh\n",
        "sleep": '#!/bin/sh\n[ "$1" != 60 ] || touch waited\nexec /bin/sleep 0.05\n',
        "shutdown": "#!/bin/sh\ntouch off\n",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    told = subprocess.run(["train", *RUN, "checkpoint.every=5"], cwd=tmp_path, env=environment, text=True, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    ended = Ended(told.returncode, told.stdout, tmp_path / "runs")
    assert ended.summary["status"] == "finished" and ended.summary["restarts"] == 1, told.stdout
    assert {"failed", "waited", "stopped", "off"} <= {*os.listdir(tmp_path)}


def test_every_file_that_an_image_copies_is_there() -> None:
    copied = re.search(r"^%files\n((?:    .*\n)*)", (DEPLOY / "steadfast.def").read_text(), re.MULTILINE)
    assert copied is not None
    pairs = [line.split() for line in copied[1].splitlines()]
    assert all((ROOT / source).exists() and target == f"/opt/steadfast/{source}" for source, target in pairs)
    assert {"framework", "models", "extras", "conf", "examples", "pyproject.toml"} <= {source for source, _ in pairs}
