"""What a job asks of a real Slurm, what it runs and who may end it: GPUs, CPUs, any option, setup, srun, other modes."""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.cli.run import start
from framework.distributed.groups import serve_store
from tests.harness import Ended, Says, assert_close, begin, command, end, finished, wait_for
from tests.launch import test_slurm, test_slurm_sweep, test_sockets
from tests.launch.paced import ROOT
from tests.launch.test_elastic import RUN
from tests.launch.test_slurm import facts, one, pytestmark  # noqa: F401
from tests.launch.test_slurm_sweep import ARRAY, SEEDS, Sweep, ids, multirun, status

cluster, submitted, free_port = test_slurm.cluster, test_slurm_sweep.submitted, test_sockets.free_port

HOLD = "launch.slurm.options.hold=true"
GPU = [*ARRAY, HOLD, "launch.slurm.partition=gpu"]
SHORT = [*RUN, "trainer.max_steps=20", "trainer.eval_every=null"]
TRAIN = [sys.executable, str(ROOT / "train.py")]


def given(*words: str, folder: Path) -> Ended:
    """Give a whole command, in a directory; its runs are in `folder`/runs."""
    (folder / "runs").mkdir(exist_ok=True)
    done = subprocess.run([*words, f"run.root={folder / 'runs'}"], cwd=folder, text=True, timeout=150,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return Ended(done.returncode, done.stdout, folder / "runs")


# --- what is asked for


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("line", "gpus", "cpus"),
    [
        (["parallel=ddp", "launch.nproc_per_node=2"], "gres:gpu:2", 2),
        ([], "gres:gpu:1", 1),
        (["launch.slurm.gpus_per_node=0"], "", 1),
        (["backend=gloo", "parallel=ddp", "launch.nproc_per_node=2"], "", 2),
        (["parallel=ddp", "launch.slurm.gpus_per_node='a100:2'"], "gres:gpu:a100:2", 2),
        (["launch.slurm.options.gres='gpu:a100:1'"], "gres:gpu:a100:1", 1),
        (["parallel=ddp", "launch.nproc_per_node=2", "dataset.num_workers=8"], "gres:gpu:2", 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_job_asks_for_the_gpus_and_cpus_that_its_processes_need(
    line: list[str], gpus: str, cpus: int, submitted: Sweep
) -> None:
    told = command(*GPU, *line, root=submitted.root)
    asked = facts(*ids(told))
    assert (asked.get("TresPerNode", ""), int(asked["CPUs/Task"] if "CPUs/Task" in asked else asked["Task"])) == (gpus, cpus)
    has_all = "8 CPUs and 2 GPUs; its processes and loader workers are 18" in told.output
    assert has_all == ("dataset.num_workers=8" in line), told.output


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["launch.slurm.partition=gpu", "parallel=ddp", "launch.nproc_per_node=4", "launch.slurm.gpus_per_node=2"],
         "launch.nproc_per_node: 4, but launch.slurm.gpus_per_node=2 (launch.slurm.gpus_per_node=4, or at most 2"),
        (["launch.slurm.partition=gpu", "parallel=ddp", "launch.nproc_per_node=4"], "launch.nproc_per_node: Slurm refuses gpus-per-node=4: ..."),
        (["launch.slurm.gpus_per_node='a100:'"], "launch.slurm.gpus_per_node: 'a100:' is not valid ... integer ... TYPE:N"),
        (["launch.slurm.options.reservatoin=x"], "launch.slurm: Slurm refuses such a job: ... reservatoin"),
        (["launch.slurm.setup=[\"echo 'not closed\"]"], "launch.slurm.setup: ... not closed ... is not a line of shell"),
        (["launch.slurm.srun=['--no-such-option=1']"], "launch.slurm.srun: srun refuses it: ... --no-such-option"),
        (["launch.slurm.options.export=A"], "launch.slurm.options.export: ... launch.slurm.setup"),
        (["launch.slurm.options={mem: 3}"], "launch.slurm.options.mem: is set by the framework (launch.slurm.mem_gb)"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_fit_the_cluster_is_refused(line: list[str], problem: str, cluster: Path, tmp_path: Path) -> None:
    refused = command(*ARRAY, *line, root=tmp_path / "runs")
    assert (refused.code, refused.output) == (78, Says(problem))
    assert not list(refused.root.iterdir())


def test_any_option_of_sbatch(submitted: Sweep) -> None:
    job = ids(command(*ARRAY, HOLD, "launch.slurm.options={comment: ours, nice: 3}", root=submitted.root))
    asked = facts(*job)
    assert (asked["Comment"], asked["Nice"], asked["Reason"]) == ("ours", "3", "JobHeldUser")


@pytest.mark.slow
def test_what_a_strategy_asks_of_a_cluster_is_nothing_to_this_machine(submitted: Sweep, tmp_path: Path) -> None:
    resources = tmp_path / "conf" / "resources" / "fsdp.yaml"
    resources.parent.mkdir(parents=True)
    resources.write_text("# @package launch\nnnodes: 2\nnproc_per_node: 2\nslurm:\n  mem_gb: 1\n")
    here = given(*TRAIN, *SHORT, "parallel=fsdp", "name=here", folder=tmp_path)
    assert here.code == 0 and here.summary["world_size"] == 1, here.output
    there = given(*TRAIN, *SHORT, "-m", "seed=0,1", "parallel=fsdp", "launch=slurm", folder=tmp_path)
    assert there.code == 0, there.output
    submitted.wait_for_end()
    jobs = [told.partition("_") for told in ids(there)]
    assert len({job for job, _, _ in jobs}) == 1 and [place for _, _, place in jobs] == ["0", "1"], "one array"
    assert {facts("_".join((job, place)))["NumNodes"] for job, _, place in jobs} == {"2"}
    for row in submitted.table:
        assert Ended(0, "", Path(row["directory"])).summary["world_size"] == 4


# --- what it runs


def test_a_line_of_the_setup_that_fails_ends_the_job_by_name(submitted: Sweep) -> None:
    setup = "launch.slurm.setup=['export A=b # and a comment','modul load cuda',\"echo 'not here'\"]"
    told = command(*ARRAY, setup, root=submitted.root)
    submitted.wait_for_end()
    (row,) = status(root=submitted.root).values()
    assert row["state"] == "failed" and row["why"] == "launch.slurm.setup failed with 127: modul load cuda", submitted.log
    assert facts(*ids(told))["ExitCode"] == "78:0" and "not here\n" not in submitted.log


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("launch.slurm.setup=['set -u','echo $NOT_THERE']", "launch.slurm.setup failed with 1: echo $NOT_THERE"),
        ("launch.slurm.python=[/no/such/python]", "the job ended before the run began: FAILED: ... /no/such/python ... No such file or directory"),
    ],
)  # fmt: skip
def test_a_job_that_ends_before_the_run_begins_is_told_with_its_last_words(option: str, why: str, submitted: Sweep) -> None:
    line = [*ARRAY, option]
    command(*line, root=submitted.root)
    submitted.wait_for_end()
    (row,) = status(root=submitted.root).values()
    assert (row["state"], row["why"]) == ("failed", Says(why))


@pytest.mark.slow
def test_the_python_of_a_job_may_be_a_container_s(submitted: Sweep, tmp_path: Path) -> None:
    """A stand-in for `apptainer exec image.sif python`: another command that starts a Python, with a word of its own."""
    inside = tmp_path / "in_container"
    inside.write_text(f'#!/bin/sh\necho "container: $1 $WORD"; shift; exec {sys.executable} "$@"\n')
    inside.chmod(0o755)
    options = [f"launch.slurm.python=[{inside},image.sif]", "launch.slurm.srun=['--export=ALL,WORD=given']"]
    command(*SHORT, "launch=slurm", *options, root=submitted.root)
    submitted.wait_for_end()
    ended = submitted.run(0)
    assert ended.summary["status"] == "finished", submitted.log
    assert submitted.log.count("container: image.sif given") == 1  # it starts the node's own Python without a second one


@pytest.mark.slow
def test_the_tasks_of_srun_are_the_processes_of_one_run(cluster: Path, tmp_path: Path) -> None:
    """Also where one node has more of them than another."""
    ended = given("srun", "--ntasks=3", "--nodes=2", *TRAIN, *RUN, "parallel=ddp", folder=tmp_path)
    assert ended.code == 0, ended.output
    assert ended.summary["world_size"] == 3
    assert_close(ended, one())


@pytest.mark.slow
def test_tasks_of_srun_with_commands_of_their_own_are_refused(cluster: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.conf"
    tasks.write_text(f"* {' '.join(TRAIN)} {' '.join(SHORT)} parallel=ddp seed=%t run.root={tmp_path}/runs\n")
    (tmp_path / "runs").mkdir()
    told = subprocess.run(["srun", "--ntasks=2", "--multi-prog", tasks], text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert told.returncode == 78 and "srun: its tasks have different commands" in told.stdout, told.stdout
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("is_served", [False, True], ids=["the store", "the decision"])
def test_a_process_that_waits_for_rank_0_answers_a_signal(is_served: bool, tmp_path: Path, free_port: int) -> None:
    served = serve_store("127.0.0.1", ports=[free_port]) if is_served else None
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables = {**os.environ, **meet, "RANK": "1", "LOCAL_RANK": "1"}
    waits = subprocess.Popen([*TRAIN, *SHORT, "parallel=ddp"], cwd=tmp_path, env=variables, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    sleeps = {"x86_64": "230 ", "aarch64": "115 "}[platform.machine()]  # the number of clock_nanosleep: between two looks
    wait_for(lambda: Path(f"/proc/{waits.pid}/syscall").read_text().startswith(sleeps), what="its wait")
    began = time.monotonic()
    waits.terminate()
    told, _ = waits.communicate(timeout=30)
    assert waits.returncode == 75 and told.count("\n") == 1, told
    assert time.monotonic() - began < 5
    del served


@pytest.mark.slow
def test_a_run_is_evaluated_and_exported_by_jobs(submitted: Sweep) -> None:
    run = finished(*SHORT, root=submitted.root)
    summary = run.summary
    line = [f"run.dir={run.directory}", "launch=slurm"]
    evaluated = command("mode=eval", *line, "parallel=fsdp", "launch.nnodes=2", root=submitted.root)
    exported = command("mode=export", *line, "export.formats=[safetensors]", root=submitted.root)
    assert len(ids(evaluated)) == len(ids(exported)) == 1, evaluated.output + exported.output
    submitted.wait_for_end()
    (row,) = (run.directory / "evaluations.jsonl").read_text().splitlines()
    assert '"world_size": 2' in row and (run.directory / "export" / "model.safetensors").exists()
    assert run.summary == summary, "the run itself is as it was"


# --- who may end it, and how that is told


@pytest.mark.parametrize(
    ("words", "run"), [([], start), (["seed=0,1"], multirun)], ids=["a run", "a sweep, which starts no more jobs"]
)
def test_what_runs_on_this_machine_is_cancelled(words: list[str], run: Callable[..., int], tmp_path: Path) -> None:
    line = [*RUN, "trainer.max_steps=100000", *words]
    running = begin(*line, root=tmp_path, run=run)
    wait_for(lambda: any(tmp_path.glob("*/*/metrics.jsonl")), what="its first row")
    told = command("mode=cancel", *line, root=tmp_path, run=run)
    assert told.code == 0 and f"process {running.pid} stops" in told.output
    stopped = end(running, root=tmp_path, timeout_s=30.0)
    assert stopped.code == 75 and stopped.summary["status"] == "preempted", "only one job has a directory"
    nothing = command("mode=cancel", *line, root=tmp_path, run=run)
    assert nothing.code == 0 and (words or "nothing to cancel" in nothing.output)


def of_nobody(text: str) -> str:
    return re.sub("SlurmctldPort=.*", "SlurmctldPort=1", text) + "MessageTimeout=1\nSlurmctldTimeout=1\n"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [(of_nobody, 75, "launch: Slurm does not answer: "), (lambda _: "nonsense\n", 78, "Slurm cannot be asked: ")],
    ids=["gone", "wrong"],
)
def test_a_controller_that_is_gone_is_trouble_that_passes_and_a_wrong_configuration_is_not(
    change: Callable[[str], str], code: int, said: str, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text(change(Path(os.environ["SLURM_CONF"]).read_text()))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    began = time.monotonic()
    refused = command(*ARRAY, root=tmp_path / "runs")
    assert refused.code == code and said in refused.output, refused.output
    assert time.monotonic() - began < 30 and not list(refused.root.iterdir())


@pytest.mark.slow
def test_cancelled_is_a_state_of_its_own(submitted: Sweep) -> None:
    submitted.submit(*SEEDS, "launch.slurm.array_parallelism=1")
    submitted.wait_for_rows(0)
    told = command("mode=cancel", *SEEDS, root=submitted.root, run=multirun)
    assert told.code == 0 and told.output.count("is cancelled: ") == 2 and told.output.count("stops, with a checkpoint") == 1
    submitted.wait_for_end()
    rows = status(*SEEDS, run=multirun, root=submitted.root)
    assert {row["state"] for row in rows.values()} == {"cancelled"}
    submitted.hurry()
    again = ids(command(*ARRAY, "seed=0", root=submitted.root))
    submitted.wait_for_end()
    assert len(again) == 1 and submitted.run(0).summary["status"] == "finished" and submitted.run(0).summary["restarts"] == 1
