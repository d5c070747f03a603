"""What a user of Hydra is used to: each habit works, or is refused with what to use instead, in files as on the command line."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from framework.config.compose import compose_line
from framework.runs.provenance import Provenance
from tests.harness import Ended, Says, typed
from tests.pages import ROOT

LINE = ["dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8",
        "global_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=2", "rehearse=false"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("experiment", "model"):
        (tmp_path / "conf" / name).mkdir(parents=True)
    return tmp_path


def experiment(folder: Path, text: str) -> str:
    (folder / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    return "experiment=mine"


def run(folder: Path, *words: str, **options: Any) -> Ended:
    return typed(*LINE, *words, directory=folder, **options)


@pytest.mark.parametrize(
    ("key", "text", "remedy"),
    [
        ("hydra.run.dir", "hydra: {run: {dir: out}}", "run.root and run.dir"),
        ("hydra.sweep.subdir", "hydra: {sweep: {subdir: x}}", "run.root and run.dir"),
        ("hydra.job.chdir", "hydra: {job: {chdir: true}}", "run.dir is where"),
        ("hydra.job.env_set.A", "hydra: {job: {env_set: {A: b}}}", "in the shell"),
        ("hydra.output_subdir", "hydra: {output_subdir: records}", "config.yaml"),
        ("hydra.verbose", "hydra: {verbose: true}", "hydra.verbose=true"),
        ("hydra/job_logging", "defaults: [override /hydra/job_logging: stdout]", "hydra.verbose=true"),
        ("hydra.job_logging.root.level", "hydra: {job_logging: {root: {level: DEBUG}}}", "hydra.verbose=true"),
    ],
)
def test_a_setting_of_hydra_in_a_file_is_refused_as_on_the_command_line(key: str, text: str, remedy: str, folder: Path) -> None:
    refused = run(folder, experiment(folder, text))
    assert refused.code == 78
    assert refused.output == Says(f"{key}: ... in a file of your conf/ ... {remedy} ...")
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "defaults: [override /scheduler: null]",
            "scheduler: has no option, because a file ... with null ... constant, cosine ...",
        ),
        (
            "defaults: [override /data: mnist]",
            "experiment=mine: ... Could not override 'data'. ... (did you mean dataset?) ...",
        ),
        ("name: ${oops", "experiment=mine: no viable alternative at input '${oops' ..."),
    ],
)
def test_a_file_that_is_not_complete_is_named_with_what_it_lacks(text: str, says: str, folder: Path) -> None:
    refused = run(folder, experiment(folder, text))
    assert refused.code == 78 and refused.output == Says(says), refused.output


def test_a_file_without_its_package_and_a_mode_that_hydra_does_not_have_are_named(folder: Path) -> None:
    word = experiment(folder, "")
    (folder / "conf" / "experiment" / "mine.yaml").write_text("trainer: {max_steps: 3}")
    assert run(folder, word).output == Says("experiment: its file ... (`# @package _global_` as its first line) ...")
    assert run(folder, "hydra.mode=bogus").output == Says("hydra.mode: 'bogus' is not valid (RUN or MULTIRUN) ...")


def test_a_group_of_ones_own_goes_into_packages_in_files_too(folder: Path) -> None:
    (folder / "conf" / "db").mkdir(parents=True)
    (folder / "conf" / "db" / "small.yaml").write_text("steps: 2\n")
    text = "defaults: [/db@first: small, /db@other: small]\nfirst: {steps: 3}\nname: n${first.steps}${other.steps}"
    ended = run(folder, experiment(folder, text))
    assert ended.code == 0 and ended.directory.parent.name == "n32", ended.output


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["file", "line"])
def test_hydra_mode_makes_a_sweep(where: str, folder: Path) -> None:
    words = [experiment(folder, "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '0,1'}}}")]
    swept = run(folder, *(words if where == "file" else ["hydra.mode=MULTIRUN", "seed=0,1"]))
    assert swept.code == 0 and "2 jobs: 2 finished" in swept.output


CALLBACK = """from hydra.experimental.callback import Callback
class Mine(Callback):
    def __init__(self, file): self.file = file
    def note(self, *words):
        with open(self.file, "a") as file: print(*words, file=file)
    def on_run_start(self, config, **_): self.note("run_start", config.seed)
    def on_job_start(self, config, **_): self.note("job_start", config.hydra.job.name)
    def on_job_end(self, config, job_return, **_): self.note("job_end", job_return.status.name)
    def on_run_end(self, config, **_): self.note("run_end")
    def on_multirun_start(self, config, **_): self.note("multirun_start")
    def on_multirun_end(self, config, **_): self.note("multirun_end")
"""


JOB = ["job_start train", "job_end COMPLETED"]
CALLS = {
    ("parallel=ddp", "launch.nproc_per_node=2", "seed=3"): ["run_start 3", *JOB, "run_end"],
    ("-m", "seed=0,1"): ["multirun_start", *JOB, *JOB, "multirun_end"],
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("where", "words"), [*zip(("file", "line"), CALLS), *zip(("line", "file"), CALLS)])
def test_callbacks_are_called_once_around_a_run_or_a_sweep_and_each_of_its_jobs(
    where: str, words: tuple[str, ...], folder: Path
) -> None:
    (folder / "mine.py").write_text(CALLBACK)
    in_file = experiment(folder, "hydra: {callbacks: {mine: {_target_: mine.Mine, file: calls}}}")
    ended = run(folder, in_file if where == "file" else "+hydra.callbacks.mine={_target_:mine.Mine,file:calls}", *words)
    assert ended.code == 0, ended.output
    assert (folder / "calls").read_text().splitlines() == CALLS[words]
    for path in folder.glob("runs/*/*/provenance.json"):
        assert "mine" not in {module for code in Provenance(path.parent).read().code.values() for module in code}


LAUNCHER = """import cloudpickle, subprocess, sys
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
class Mine(Launcher):
    def __init__(self, note, apart): self.note, self.apart = note, apart
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config
    def launch(self, job_overrides, initial_job_idx):
        return [self.run(number, list(line)) if number not in self.apart else self.elsewhere(number, list(line))
                for number, line in enumerate(job_overrides, initial_job_idx)]
    def run(self, number, overrides):
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        config.hydra.job.num = number
        with open(self.note, "a") as file: print(number, config.seed, file=file)
        return run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
    def elsewhere(self, *job):  # as submitit and joblib do
        with open("job", "wb") as file: cloudpickle.dump((self, job, Singleton.get_state()), file)
        subprocess.run([sys.executable, "-c", "import mine; mine.work()"], check=True)
        with open("job", "rb") as file: return cloudpickle.load(file)
def work():
    setup_globals()
    with open("job", "rb") as file: launcher, job, state = cloudpickle.load(file)
    Singleton.set_state(state)
    ended = launcher.run(*job)
    with open("job", "wb") as file: cloudpickle.dump(ended, file)
"""


@pytest.fixture
def launcher(folder: Path) -> Path:
    (folder / "mine.py").write_text(LAUNCHER + CALLBACK.replace("Mine", "Called"))
    path = folder / "conf" / "hydra" / "launcher" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("_target_: mine.Mine\nnote: ${hydra.sweep.dir}.txt\napart: []\n")
    return path


@pytest.mark.slow
def test_another_launcher_of_hydra_runs_the_jobs(launcher: Path, folder: Path) -> None:
    line = ["-m", "hydra/launcher=mine", "seed=0,1,2", "+hydra.callbacks.one={_target_:mine.Called,file:calls}"]
    assert run(folder, "seed=1").code == 0
    ended = run(folder, *line)
    assert ended.code == 0, ended.output
    assert "3 jobs: 3 finished" in ended.output and ended.output.count("finished already") == 1
    (note,) = folder.glob("runs/sweeps/*/launcher.txt")
    assert note.read_text().splitlines() == ["0 0", "1 2"]
    assert (folder / "calls").read_text().splitlines() == CALLS["-m", "seed=0,1"]
    failed = run(folder, *line[:2], "seed=0,1", "optimizer=sgd", "optimizer.lr=1e30")
    assert failed.code == 70 and "2 of 2 jobs failed" in failed.output
    launcher.write_text("_target_: builtins.dict\n")
    assert run(folder, *line).output == Says("hydra.launcher._target_: builtins.dict is not a launcher ...")
    launcher.write_text("_target_: mine.Mine\nnot: x\napart: []\n")
    misspelt = run(folder, *line)
    assert (misspelt.code, misspelt.output.splitlines()[0]) == (78, Says("hydra.launcher.not: unknown key ... note?"))


@pytest.mark.slow
def test_another_launcher_may_run_jobs_in_other_processes(launcher: Path, folder: Path) -> None:
    line = ["-m", "hydra/launcher=mine", "hydra.launcher.apart=[1]", "optimizer=sgd", "optimizer.lr=1e30,1e-3"]
    ended = run(folder, *line, timeout_s=300)
    assert ended.code == 70 and "2 jobs: 1 failed, 1 finished" in ended.output, ended.output
    assert "exit 70: optimizer.lr=1e+30: " in ended.output
    alone = run(folder, "optimizer=sgd", "optimizer.lr=1e-3")
    assert alone.code == 0 and "finished already" in alone.output


@pytest.mark.parametrize("node", ["{_target_: mine.Nothing}", "{_target_: nowhere.Mine}", "{_target_: mine.Mine, wrong: 1}"])
def test_a_callback_that_cannot_be_built_is_refused_in_a_line(node: str, folder: Path) -> None:
    (folder / "mine.py").write_text(CALLBACK)
    refused = run(folder, experiment(folder, f"hydra: {{callbacks: {{mine: {node}}}}}"))
    assert refused.code == 78 and "Traceback" not in refused.output
    assert refused.output == Says("[rank 0] ERROR: hydra.callbacks: cannot be built: ... _target_ ...")


def test_a_callback_that_changes_the_configuration_is_refused(folder: Path) -> None:
    text = "from hydra.experimental.callback import Callback\nclass Mine(Callback):\n"
    text += "    def on_run_start(self, config, **_): config.optimizer.lr = 0.5\n"
    (folder / "mine.py").write_text(text)
    refused = run(folder, "+hydra.callbacks.mine._target_=mine.Mine")
    assert refused.code == 78 and refused.output == Says("[rank 0] ERROR: hydra.callbacks: a callback changes optimizer.lr ...")


def test_values_of_hydra_resolve(folder: Path) -> None:
    words = ["hydra.job.name=x", "name=${hydra:job.name}-${hydra:runtime.choices.optimizer}", "optimizer=sgd"]
    config = compose_line([*LINE, *words, "run.group=${hydra:runtime.output_dir}"]).config["run"]
    assert config["group"] == config["dir"] == f"runs/x-sgd/{config['id']}"
    refused = run(folder, "+place=${hydra:runtime.output_dir}")
    assert refused.code == 78
    assert refused.output == Says("run.dir: ... (it refers to itself)")


def test_an_option_may_be_put_at_a_key_of_the_users_own() -> None:
    composed = compose_line([*LINE, "+optimizer@teacher=sgd", "+mine.rate=0.5", "optimizer.lr=${mine.rate}"])
    assert composed.problems == []
    assert composed.config["extra"]["teacher"]["momentum"] == 0.9
    assert (composed.config["optimizer"]["lr"], composed.config["extra"]["mine"]) == (0.5, {"rate": 0.5})
    assert not {"teacher", "mine"} & composed.config.keys()


def test_options_of_the_config_store_can_be_chosen(folder: Path) -> None:
    def store() -> None:
        node = {"_target_": "models.mlp.MLP", "dim": 7, "num_classes": None, "in_channels": None, "image_size": None}
        ConfigStore.instance().store(group="model", name="stored", node=node)
        ConfigStore.instance().store(group="colour", name="red", node={"value": 1})

    ended = run(folder, "model=stored", "+colour=red", before=store)
    assert ended.code == 0, ended.output
    assert "dim: 7" in (ended.directory / "config.yaml").read_text()
    assert run(folder, "model=stored").output == Says("model: no option 'stored' ...")


PLUGIN = """
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
ConfigStore.instance().store(group="model", name="stored", node={"_target_": "models.mlp.MLP", "dim": 7})
"""


def test_a_module_in_hydra_plugins_registers_resolvers_and_options(folder: Path) -> None:
    line = [sys.executable, str(ROOT / "train.py"), "--cfg", "job", "--resolve", "model=stored", "model.dim=${mul:4,3}"]
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "mine.py").write_text(PLUGIN)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)  # Hydra looks once in a process
    assert yaml.safe_load(done.stdout)["model"]["dim"] == 12, done.stderr
    assert run(folder, "name=${mull:4,3}").output == Says(
        "name: ... Unsupported interpolation type mull; ... hydra_plugins/NAME.py ..."
    )


def test_a_group_of_the_user_that_nothing_would_build_is_refused(folder: Path) -> None:
    (folder / "conf" / "callbacks").mkdir(parents=True)
    (folder / "conf" / "callbacks" / "early.yaml").write_text("stop: {_target_: lightning.EarlyStopping, patience: 3}\n")
    refused = run(folder, "callbacks=early")
    assert refused.code == 78
    assert refused.output == Says(
        "callbacks: this group of yours has a _target_, but no key refers to it ... part=NAME adds ..."
    )
    used = run(folder, "callbacks=early", "optimizer.lr=${callbacks.stop.patience}")
    assert used.code == 0, used.output


TEMPLATE = {  # the layout of a project made from lightning-hydra-template
    "train": """# @package _global_
defaults: [_self_, data: mnist, callbacks: default, trainer: default, paths: default, hydra: default, debug: null]
task_name: train
tags: [dev]
ckpt_path: null
seed: null
""",
    "data/mnist": "_target_: src.data.MNISTDataModule\ndata_dir: ${paths.data_dir}\n",
    "callbacks/default": "model_checkpoint: {_target_: lightning.pytorch.callbacks.ModelCheckpoint}\n",
    "trainer/default": "_target_: lightning.pytorch.Trainer\nmax_epochs: 3\ndevices: 1\ncheck_val_every_n_epoch: 1\n",
    "paths/default": "data_dir: data\nlog_dir: logs\noutput_dir: ${hydra:runtime.output_dir}\n",
    "hydra/default": """defaults: [override hydra_logging: colorlog, override job_logging: colorlog]
run: {dir: '${paths.log_dir}/${now:%H}'}
""",
    "debug/default": "# @package _global_\nhydra: {job: {env_set: {A: b}}}\n",
}


def test_a_projects_layout_of_another_framework_is_refused_by_name(folder: Path) -> None:
    for name, text in TEMPLATE.items():
        path = folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    refused = typed("--config-dir", "configs", "-cn", "train", "debug=default", directory=folder)
    assert refused.code == 78
    said = dict(line.split(": ", 1) for line in refused.output.splitlines())
    assert said.keys() == {
        "hydra/job_logging", "hydra/hydra_logging", "hydra.run.dir", "hydra.job.env_set.A", "task_name", "ckpt_path", "tags", "seed",
        "defaults", "data", "callbacks", "trainer._target_", "trainer.devices", "trainer.check_val_every_n_epoch",
    }  # fmt: skip
    assert "- config as the first entry" in said["defaults"]
    assert "trainer.eval_every" in said["trainer.check_val_every_n_epoch"] and "launch.nproc" in said["trainer.devices"]
    assert not any(f"mean {key}?" in text for key, text in said.items()), "a message never suggests the key itself"
