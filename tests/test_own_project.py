"""A researcher's own folder: any callable is a component, and their configuration is found before ours."""

import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from framework.build.components import complete_model, optimizer_builder
from framework.optim.optimizers import Trainable
from tests.harness import Ended, files_below, typed
from tests.pages import MACHINE, ROOT
from tests.test_extend import steadfast

MYNET = """
import torch
from torch import nn


class Net(nn.Module):  # positional or keyword, a default, no annotations, no blocks()
    def __init__(self, in_channels, num_classes, width=16, act=torch.relu):
        super().__init__()
        self.first, self.last, self.act = nn.LazyLinear(width), nn.Linear(width, num_classes), act
        self.first = nn.Linear(in_channels * 64, width)

    def forward(self, x):
        return self.last(self.act(self.first(x.flatten(1))))

    @classmethod
    def small(cls, in_channels, num_classes):
        return cls(in_channels, num_classes, width=4)


class Config:
    def __init__(self, width=8):
        self.width = width


def from_config(config, num_labels, in_chans):
    return Net(in_chans, num_labels, config.width)


def anything(*sizes, **options):
    if options.pop("fail", False):
        raise RuntimeError("width=3: it must be even")
    return nn.Sequential(nn.Flatten(), nn.Linear(sizes[0], options["out"]))


def by_name(name):
    return {"tower": flatten}[name]()


def flatten():
    return nn.Flatten()


def stack(layers):
    return nn.Sequential(*layers)


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def head(in_features, num_classes):
    return nn.Linear(in_features, num_classes)


def later(node):  # builds its node itself
    assert node == {"_target_": "mynet.head", "in_features": 64}, node
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


not_callable = 3
"""
QUICK = ("trainer.max_steps=2", "trainer.log_every=1", "rehearse=false")


def write(folder: Path, **texts: str) -> Path:
    """Write files, named with two underscores for a slash: `conf__model__mynet` is conf/model/mynet.yaml."""
    for name, text in ({"mynet.py": MYNET} | texts).items():
        path = folder / (name if name.endswith(".py") else name.replace("__", "/") + ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    node = "_target_: mynet.Net\nin_channels: null\nnum_classes: null\nwidth: 16\n"
    return write(tmp_path, conf__model__mynet=node)


def trains(*words: str, folder: Path) -> Ended:
    ended = typed(*words, *QUICK, directory=folder)
    assert ended.code == 0, ended.output
    return ended


def refused(*words: str, folder: Path) -> str:
    ended = typed(*words, directory=folder)
    assert ended.code == 78, ended.output
    assert not files_below(folder / "runs", "*"), "it leaves no trace"
    assert "Traceback" not in ended.output
    return ended.output


# --- a value with a name

HOOK = """
def scaled(group, bucket, *, factor):
    import torch.distributed as dist
    dist.all_reduce(bucket.buffer().div_(group.size() * factor), group=group)
    return bucket.buffer().mul_(factor)
"""
NAMED = "# the mean of the gradients, times a factor on the way\n_needs_: [replicate]\n_for_: framework.parallel.parallelize.parallelize\nhook:\n  _target_: hooks.scaled\n" \
        "  _partial_: true\n  factor: 2.0\n"  # fmt: skip


@pytest.mark.slow
def test_a_value_of_ones_own_has_a_name(folder: Path) -> None:
    write(folder, **{"hooks.py": HOOK, "conf/parallel.hook/scaled": NAMED})
    line = ["model=mynet", "parallel=ddp", "launch.nproc_per_node=2"]
    plain = typed(*line, *QUICK, "name=plain", "run.root=plain", directory=folder)
    named = typed(*line, *QUICK, "parallel.hook=scaled", directory=folder)
    assert plain.code == named.code == 0, named.output
    (theirs,) = (load_file(path) for path in files_below(folder / "plain", "model.safetensors"))
    assert all(torch.allclose(weight, theirs[name], atol=1e-6) for name, weight in named.weights.items())
    hydras = typed("parallel=ddp", "parallel.hook=scaled", "--cfg", "all", directory=folder)
    assert hydras.code == 0 and "hook: scaled" in hydras.output, hydras.output
    shown = typed("parallel=ddp", "--help", directory=folder).output
    assert "parallel.hook=scaled" in shown and "times a factor on the way" in shown


def test_a_name_is_refused_where_there_is_none_and_where_its_keys_have_values(folder: Path) -> None:
    write(
        folder,
        **{
            "hooks.py": HOOK,
            "conf/parallel.hook/scaled": NAMED,
            "conf/parallel.bucket_cap_mb/small": "_for_: framework.parallel.parallelize.parallelize\nstatic_graph: true\n",
        },
    )
    assert refused("parallel=fsdp", "parallel.hook=scaled", folder=folder).startswith("parallel.hook: ")
    assert "an integer, small" in refused("parallel=ddp", "parallel.bucket_cap_mb=smal", folder=folder)
    both = refused("parallel=ddp", "parallel.bucket_cap_mb=small", "parallel.static_graph=false", folder=folder)
    assert both.startswith("parallel.bucket_cap_mb: small sets parallel.static_graph"), both


LAUNCHER = """
import os


class Here:
    def started(self):
        return "PLACE" in os.environ

    def join(self):
        if os.environ["PLACE"] == "nowhere":
            return ["place: nowhere, where nobody meets"]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["PLACE"]}
        return []

    def leave(self):
        print("left together")
"""


def test_a_launcher_of_ones_own_joins_its_processes(folder: Path) -> None:
    write(folder, **{"here.py": LAUNCHER, "conf/launchers/here": "_target_: here.Here\n"})

    def at(place: str) -> Ended:
        return typed("model=mynet", *QUICK, directory=folder, before=lambda: os.environ.update(PLACE=place))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    assert at("nowhere").code == 78 and "place: nowhere, where nobody meets" in at("nowhere").output
    joined = at(port)
    assert joined.code == 0 and joined.output.count("left together") == 1, joined.output
    (folder / "here.py").unlink()
    gone = typed("model=mynet", *QUICK, directory=folder)
    assert gone.code == 78 and gone.output.startswith("launchers.here: "), gone.output


# --- any callable is a component


def small(width: int) -> int:
    """Return how many numbers mynet.Net of this width has on the digits."""
    return (64 + 1) * width + (width + 1) * 10


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("node", "size"),
    [
        (["mynet.Net", "in_channels=1", "num_classes=10"], small(16)),
        (["mynet.Net.small", "in_channels=1", "num_classes=10"], small(4)),
        (["mynet.from_config", "num_labels=null", "in_chans=null", "config={_target_: mynet.Config, width: 5}"], small(5)),
        (["torch.nn.Sequential", "_args_=[{_target_: mynet.flatten},{_target_: torch.nn.Linear,in_features: 64,out_features: 10}]"],
         65 * 10),
        (["mynet.Net", "act={_target_: torch.nn.functional.leaky_relu, _partial_: true}"], small(16)),
        (["mynet.stack", "layers=[{_target_: mynet.flatten},{_target_: mynet.head,in_features: 64,num_classes: null}]"], 65 * 10),
        (["mynet.later", "node={_target_: mynet.head,in_features: 64}", "_recursive_=false"], 65 * 10),
    ],
    ids=["a class", "a class method", "a factory, a nested node, aliases", "nodes in _args_", "_partial_",
         "nodes in a list, one with a fact of the data", "_recursive_"],
)  # fmt: skip
def test_it_trains_with(node: list[str], size: int, folder: Path) -> None:
    target, *keys = node
    ended = trains(f"model._target_={target}", *(f"model.{key}" for key in keys), folder=folder)
    assert sum(tensor.numel() for tensor in ended.weights.values()) == size
    text = (ended.directory / "config.yaml").read_text()
    assert target in text and "channels: [" not in text, "the keys of the option that was replaced are gone"


def test_a_default_of_the_users_is_not_replaced_by_a_fact_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"in_channels": 1, "num_classes": 10, "image_size": 8}

    def net(num_classes: int = 5, num_channels: int = 64, *, img_size: int, input_size: int | None = None) -> None: ...

    nets = types.ModuleType("nets")
    monkeypatch.setitem(sys.modules, "nets", nets)
    nets.net = net
    assert complete_model({"_target_": "nets.net"}, info)[0] == {"_target_": "nets.net", "num_classes": 10, "img_size": 8}
    asked = {"_target_": "nets.net", "num_channels": None, "num_classes": 3, "img_size": 4}
    assert complete_model(asked, info)[0] == asked | {"num_channels": 1}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model=mynet", "model.widht=3"], ["model.widht", "model.width?"]),
        (["model._target_=mynet.Nett"], ["model._target_", "mynet.Nett", "did you mean Net?"]),
        (["model._target_=linear"], ["model._target_", "linear is not a dotted path"]),
        (["model._target_=mynet.from_config", "model._args_=[{_target_: mynet.Config}]", "model.config=3"], ["model.config: unknown key"]),
        (["optimizer.groups=[{match: frist.*, lr: 0.0}]", "model=mynet"], ["optimizer.groups", "frist.*", "first."]),
        (["model._target_=nowhere.Net"], ["model._target_", "nowhere.Net", "No module named 'nowhere'"]),
        (["model._target_=mynet.not_callable"], ["model._target_", "int", "called"]),
        (["model._target_=mynet.from_config"], ["model.config: is missing (mynet.from_config needs it)"]),
        (["model._target_=mynet.anything", "model.fail=true"], ["model.width: 3: it must be even"]),
        (["model._target_=mynet.by_name", "model.name=towr"], ["model: KeyError: 'towr'"]),
        (["model._target_=mynet.Config"], ["model: mynet.Config gives a Config", "torch.nn.Module"]),
        (["model=mynet", "model.width='${data:colour}'"], ["model.width", "colour", "num_classes"]),
        (["model._target_=leaves.Net"], ["model._target_: leaves.Net", "SystemExit"]),
        (
            ["model._target_=torch.nn.Sequential", "model._args_=[{_target_: mynet.head,in_features: 6,num_clases: 3}]"],
            ["model._args_[0].num_clases", "model._args_[0].num_classes?"],
        ),
        (["model._target_=mynet.stack", "model.layers=[{_target_: mynet.haed}]"], ["model.layers[0]._target_", "did you mean head?"]),
        (["model._target_=mynet.lazy"], ["model: 1.weight has no shape"]),
        (["parallel._target_=mynet.later"], ["parallel: mynet.later takes no world and forward"]),
        (["model=mynet", "model._partial_=true"], ["model._partial_: true gives a function"]),
        (["model=mynet", "model._args_=5"], ["model._args_: 5", "a list"]),
        (["dataset._target_=mynet.Config"], ["dataset:", "mynet.Config lacks info, problems(), load(), transform()"]),
        (["optimizer.groups=[{match: '*', weight_dcay: 0}]"], ["optimizer.groups", "did you mean weight_decay?"]),
        (["optimizer.groups=[{match: '*', lr: abc}]"], ["optimizer.groups", "'abc'", "a number"]),
        (["optimizer.groups=[{mtch: '*', lr: 1}]"], ["optimizer.groups", "mtch", "names and options"]),
        (["optimizer.groups=[{match: '*', lr: -1}]"], ["optimizer.groups[0].lr: -1 is out of range"]),
        (["model=mynet", "name=x${data:num_classes}"], ["name: x${data:num_classes}", "for components"]),
        (["model=mynet", "model.width=1${data:num_classes}"], ["model.width: 1${data:num_classes}", "the whole value"]),
        (["model=mynet", "model._recursive_=maybe"], ["model._recursive_: 'maybe'", "true or false"]),
        (
            ["model._target_=mynet.stack", "model.layers=[{_target_: mynet.haed}, {_target_: mynet.head, in_feature: 3}]"],
            ["model.layers[0]._target_", "model.layers[1].in_feature"],
        ),
        (["+augment=hard", "extra=5"], ["extra: 5", "section"]),
        (["+augment.strength=5"], ["augment.strength", "+augment=OPTION"]),
        (["+augment=hard", "augment.strenth=5"], ["augment.strenth", "did you mean augment.strength?"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_it_is_refused_before_the_start(words: list[str], expected: list[str], folder: Path) -> None:
    write(folder, **{"leaves.py": "raise SystemExit(0)", "conf__augment__hard": "strength: 3"})
    output = refused(*words, folder=folder)
    for part in expected:
        assert part in output


@pytest.mark.quick(2)
@pytest.mark.parametrize("text", ["defaults: [_self_, {model: mlpp}]", "- a", "defaults: [config", "defaults: config"])
def test_a_faulty_primary_file_is_refused_in_a_line(text: str, folder: Path) -> None:
    write(folder, conf__config=text)
    for words in (["mode=plan"], ["-m", "seed=1,2"]):
        assert refused(*words, folder=folder).count("\n") < 20


@pytest.mark.slow
def test_a_faulty_option_is_refused_where_it_is_chosen_and_nowhere_else(folder: Path) -> None:
    write(folder, conf__model__five="5", conf__model__broken="_target_: [")
    (folder / "conf/model/latin.yaml").write_bytes(b"# \xe4\n")
    assert "model=five: Invalid loaded object" in refused("model=five", folder=folder)
    assert "model=broken: while parsing" in refused("model=broken", folder=folder)
    offered = refused("model=gpt", folder=folder)
    assert "model=mynet" in offered and "model=broken" not in offered
    assert typed("--help", directory=folder).code == typed("model=broken", "--help", directory=folder).code == 0


def test_a_problem_names_the_file_that_sets_its_key_unless_the_command_line_sets_it(folder: Path) -> None:
    write(folder, conf__model__odd="_target_: mynet.Net\nin_channels: null\nnum_classes: null\nwidht: 1\n",
          conf__experiment__e="# @package _global_\ntrainer: {max_step: 4, log_every: -1}\noptimizer: {lrr: 1, lr: big}\n",
          conf__experiment__other="# @package _global_\ntrainer: {max_step: 5}\n")  # fmt: skip
    assert sorted(refused("experiment=e", "model=odd", "trainer.log_every=0", folder=folder).splitlines()) == [
        "model.widht: unknown key, in conf/model/odd.yaml (did you mean model.width?)",
        "optimizer.lr: 'big' is not valid, in conf/experiment/e.yaml (a number)",
        "optimizer.lrr: unknown key, in conf/experiment/e.yaml (did you mean optimizer.lr?)",
        "trainer.log_every: 0 is out of range (at least 1)",
        "trainer.max_step: unknown key, in conf/experiment/e.yaml (did you mean trainer.max_steps?)",
    ]


def test_a_finished_run_has_its_loggers_checked(folder: Path) -> None:
    trains("model=mynet", folder=folder)
    ended = typed("model=mynet", "logger=tensorboard", "logger.tensorboard.foo=3", *QUICK, directory=folder)
    assert ended.code == 78 and "logger.tensorboard.foo: unknown key" in ended.output


def test_a_mistake_in_our_sections_needs_no_import_of_the_components(folder: Path) -> None:
    (folder / "mynet.py").write_text("raise SystemError('imported')")
    output = refused("model=mynet", "trainer.max_stepss=3", folder=folder)
    assert "trainer.max_steps?" in output and "imported" not in output


# --- torch's own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RAdam", "Adagrad"])
def test_an_optimizer_of_torch_computes_the_same_in_one_process_and_in_two(name: str, folder: Path) -> None:
    words = ["model=mynet", "precision=fp64", f"optimizer._target_=torch.optim.{name}", "optimizer.lr=1e-2"]
    one = trains(*words, "run.root=one", folder=folder)
    trains(*words, "run.root=two", "parallel=zero", "launch.nproc_per_node=2", folder=folder)
    mine, theirs = (load_file(next((folder / root).rglob("model.safetensors"))) for root in ("one", "two"))
    assert all(torch.allclose(mine[key], theirs[key], rtol=0, atol=1e-10) for key in mine)
    begun = trains(*words[:2], "optimizer.groups=[{match: '*', lr: 0.0}]", "run.root=begun", folder=folder)
    before = load_file(next((folder / "begun").rglob("model.safetensors")))
    assert one.code == begun.code and not any(torch.equal(before[key], mine[key]) for key in mine)


def test_the_first_of_two_entries_counts() -> None:
    trained = [Trainable(name, torch.nn.Parameter(torch.zeros(1)), False, True) for name in ("a.weight", "a.bias", "b.bias")]
    node = {"_target_": "torch.optim.SGD", "lr": 1.0, "groups": [{"match": "a.*", "lr": 2.0}, {"match": "*.bias", "lr": 3.0}]}
    groups = optimizer_builder(node)(trained).param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert [rates[id(item.parameter)] for item in trained] == [2.0, 2.0, 3.0]


# --- the configuration of one's own


def test_the_users_conf_is_searched_before_ours(folder: Path) -> None:
    write(folder, conf__model__cnn="_target_: mynet.Net.small\nin_channels: null\nnum_classes: null\n")
    ended = trains("model=cnn", folder=folder)
    assert sum(tensor.numel() for tensor in ended.weights.values()) == 64 * 4 + 4 + 4 * 10 + 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--config-dir", "STEADFAST_CONF"])
def test_it_may_be_anywhere(how: str, folder: Path, tmp_path: Path) -> None:
    (folder / "conf").rename(folder / "settings")
    words, environment = ["model=mynet"], steadfast(tmp_path / "bin")
    if how == "--config-dir":
        words = ["--config-dir", str(folder / "settings"), *words]
    else:
        environment[how] = str(folder / "settings")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    line = ["steadfast", *words, *QUICK, f"run.root={tmp_path}/runs"]
    done = subprocess.run(["bash", "-c", '"$@"', "-", *line], cwd=elsewhere, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_primary_file_of_ones_own(folder: Path) -> None:
    write(folder, conf__mine="defaults:\n  - config\n  - override model: mynet\n  - _self_\nseed: 7\n")
    text = (trains("-cn", "mine", folder=folder).directory / "config.yaml").read_text()
    assert "mynet.Net" in text and "seed: 7" in text
    assert "there is no yours.yaml" in typed("-cn", "yours", directory=folder).output
    nowhere = typed("model=mynet", directory=folder, before=lambda: os.environ.update(STEADFAST_CONF="nowhere"))
    assert nowhere.code == 78 and nowhere.output.startswith("STEADFAST_CONF: nowhere"), nowhere.output


def test_options_in_folders_groups_of_ones_own_and_keys_of_ones_own(folder: Path) -> None:
    (folder / "conf/model/vision").mkdir()
    (folder / "conf/model/mynet.yaml").rename(folder / "conf/model/vision/tiny.yaml")
    write(folder, conf__paper__first="alpha: 3\n", conf__paper__second="alpha: 4\n")
    ours = ["model=vision/tiny", "model.width='${extra.wide}'", "+wide=8"]
    ended = trains(*ours, "+paper=first", folder=folder)
    assert ended.weights["first.weight"].shape == (8, 64)
    ids = set()
    for paper in ("first", "second"):
        shown = typed(*ours, f"+paper={paper}", "--cfg", "job", "--resolve", directory=folder).output
        ids.add(next(line for line in shown.splitlines() if line.strip().startswith("id:")))
    assert len(ids) == 2, "a key of the user's own is part of the identity"
    for key in ("paper.alpha", "extra.paper.alpha"):  # one value, under either name
        words = ["model=vision/tiny", "model.width='${extra.paper.alpha}'", "+paper=first", f"{key}=5"]
        trains(*words, f"run.root={key}", folder=folder)
        (weights,) = (load_file(path) for path in (folder / key).rglob("model.safetensors"))
        assert weights["first.weight"].shape == (5, 64)


def test_an_option_with_a_sweep_of_its_own_is_not_swept(folder: Path) -> None:
    grid = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n"
    write(folder, conf__experiment__grid=grid)
    assert "experiment: grid defines its own sweep" in refused("-m", "experiment=grid,null", "mode=plan", folder=folder)
    listed = typed("-m", "experiment=grid", "model=mynet", "mode=plan", "hydra.verbose=true", directory=folder)
    assert listed.code == 0 and listed.output.count("missing") == 2, listed.output


@pytest.mark.slow
def test_a_file_of_theirs_may_not_be_called_as_one_of_ours(folder: Path) -> None:
    """Whose `models.mlp` it is would depend on the folder; a copy is the same."""
    write(folder, **{"models/mlp.py": (ROOT / "models" / "mlp.py").read_text()})
    trains("model=mlp", "model.dim=4", folder=folder)
    shutil.rmtree(folder / "runs")
    write(folder, **{"models/mlp.py": MYNET})
    for line in (["model=mlp"], ["model._target_=models.mlp.Net"]):
        assert "give models/mlp.py another name" in refused(*line, folder=folder).replace(f"{folder}/", "")
    trains("model=mynet", folder=folder)


@pytest.mark.slow
def test_python_m_and_a_notebook(folder: Path) -> None:
    environment = steadfast(folder / "bin") | {"PYTHONPATH": f"{ROOT}:{MACHINE}"}
    line = [sys.executable, "-m", "framework", "model=mynet", *QUICK]
    done = subprocess.run(line, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and "finished" in done.stdout + done.stderr, done.stdout + done.stderr
    script = f"""
import torch
from framework import ConfigurationError, compose, load, run
from pytest import raises
before = torch.get_rng_state()
done = run("model=mynet", *{QUICK})
assert torch.equal(torch.get_rng_state(), before), "it leaves this process as it was"
model = load(done.directory)
assert type(model).__name__ == "Net" and not model.training
assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
assert done.rows[-1]["split"] == "test" and done.summary["status"] == "finished"
assert compose("model=mynet").model["width"] == 16
with raises(ConfigurationError) as caught:
    compose("model=mynet", "model.widht=3", "trainer.max_steps=0")
assert [problem.key for problem in caught.value.problems] == ["trainer.max_steps", "model.widht"], caught.value
with raises(ConfigurationError, match=r"is a list, not a text \\(one argument for each word"):
    run(["model=mynet"])
with raises(ConfigurationError, match="plan prints, and runs nothing"):
    run("mode=plan")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
