"""The loggers whose packages are in no requirements: each has what metrics.jsonl has, once, after a kill.

A package that is not installed is skipped. The files are read by the package itself in another process, without a server.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extras.loggers.tests.records import assert_equal, scalars_of, when, written
from framework.runs.metrics_file import MACHINE
from tests.harness import Ended, command, finished
from tests.test_loggers import DDP, RUN
from tests.test_resume import after_step, crash

PACKAGES = {"trackio": "trackio", "swanlab": "swanlab", "aim": "aim", "comet": "comet_ml", "clearml": "clearml"}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
BEGUN = {
    "trackio": "*.db",
    "swanlab": "*.swanlab",
    "aim": "aim/.aim/*",
    "clearml": "metrics.jsonl",
}  # comet writes elsewhere first

# Each writes [rows as [name, step, value], media as [name, step], the value of seed] into a file
READERS = {
    "trackio": """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        (run,) = trackio.Api().runs("steadfast")
        logs = SQLiteStorage.get_logs("steadfast", run.name, max_points=None)
        found = [(name, log["step"], value) for log in logs for name, value in log.items() if name not in ("step", "timestamp")]
        rows = [one for one in found if isinstance(one[2], (int, float))]
        media = [one[:2] for one in found if isinstance(one[2], dict)]
        seed = run.config["seed"]
    """,
    "swanlab": """
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader
        (path,) = (directory / "loggers" / "swanlab").rglob("*.swanlab")
        reader = DataStoreReader()
        reader.open(path)
        records = [Record.FromString(content) for content in reader]
        rows = [(one.scalar.key, one.scalar.step, one.scalar.value.number) for one in records if one.HasField("scalar")]
        media = [(one.media.key, one.media.step) for one in records if one.HasField("media")]
        (config,) = (directory / "loggers" / "swanlab").rglob("files/config.yaml")
        seed = yaml.safe_load(config.read_text())["seed"]["value"]
    """,
    "aim": """
        import aim
        repo = aim.Repo.from_path(str(directory.parents[1] / "aim"))
        (known,) = repo.list_all_runs()
        run = aim.Run(known, repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
        rows = [(f"{one.context['subset']}/{one.name}", step, value) for one in run.metrics()
                for step, value in one.dataframe()[["step", "value"]].itertuples(index=False)]
        kinds = ("images", "audios", "texts")
        media = [(one["name"], step) for kind in kinds for ones in run.collect_sequence_info((kind,)).values() for one in ones
                 for step, _ in run._get_sequence(kind, one["name"], aim.storage.context.Context(one["context"])).data.items()]
        seed = run["config"]["seed"]
    """,
    "comet": """
        (path,) = (directory / "loggers" / "comet").glob("*.zip")
        messages = [json.loads(line) for line in zipfile.ZipFile(path).read("messages.json").splitlines()]
        metrics = [one["payload"]["metric"] for one in messages if one["type"] == "metric_msg"]
        rows = [(one["metricName"], one["step"], one["metricValue"]) for one in metrics if "/" in one["metricName"]]
        files = [one["payload"] for one in messages if one["type"] == "file_upload"]
        media = [(one["metadata"].get("name") or at.get("figName") or at["fileName"], at["step"])
                 for one in files for at in [one["additional_params"]]]
        given = [one["payload"]["param"] for one in messages if one["type"] == "parameter_msg" and "param" in one["payload"]]
        (seed,) = [one["paramValue"] for one in given if one["paramName"] == "seed"]
    """,
    "clearml": """
        (folder,) = [path for path in (directory / "loggers" / "clearml" / "offline").iterdir() if path.is_dir()]
        events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
        rows = [(f"{one['variant']}/{one['metric']}", one["iter"], one["value"]) for one in events if one["type"] == "training_stats_scalar"]
        media = [(one["metric"], one["iter"]) for one in events if one["type"] in ("training_debug_image", "plot")]
        seed = int(json.loads((folder / "task.json").read_text())["hyperparams"]["steadfast"]["seed"]["value"])
    """,
}


def read(name: str, directory: Path) -> list[Any]:
    lines = [line.removeprefix(" " * 8) for line in READERS[name].splitlines()]
    begin = "import json, os, sys, zipfile\nimport yaml\nfrom pathlib import Path\ndirectory = Path(sys.argv[1])\n"
    end = "Path(sys.argv[2]).write_text(json.dumps([rows, media, seed]))\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
    out = directory / f"{name}.json"
    env = os.environ | {"TRACKIO_DIR": str(directory.parents[1] / "trackio")}
    script = begin + "\n".join(lines) + "\n" + end
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory), str(out)], capture_output=True, text=True, env=env, timeout=100
    )
    assert out.exists(), done.stdout + done.stderr
    return list(json.loads(out.read_text()))


pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages, also in the processes of the run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that was killed after the checkpoint of step 8, when each logger had begun to write, and then finished."""
    root = tmp_path_factory.mktemp("recorded")
    line = [*RUN, *DDP, "+part.media._target_=tests.own_parts.Media", f"logger=[{','.join(INSTALLED)}]"]
    begun = [pattern for name, pattern in BEGUN.items() if name in INSTALLED]
    dies = after_step(10, when(lambda: all(written(root, pattern) for pattern in begun), crash))
    assert command(*line, "launch.max_restarts=0", root=root, before=dies).code != 0
    run = finished(*line, root=root)
    assert run.summary["restarts"] == 1 and "WARNING" not in run.output, run.output
    return run


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason="not installed")) for name in PACKAGES]
)
def test_it_has_each_row_and_file_once_after_a_kill(name: str, recorded: Ended) -> None:
    rows, media, seed = read(name, recorded.directory)
    found = {(tag, step): value for tag, step, value in rows if not tag.startswith("best/")}
    assert len(found) == len([tag for tag, *_ in rows if not tag.startswith("best/")]), "a step is there twice"
    assert_equal(*({key: value for key, value in one.items() if key[0].partition("/")[2] not in MACHINE}
                   for one in (found, scalars_of(recorded.rows))))  # fmt: skip
    assert seed == 0
    expected = {("of_step", step) for step in range(1, 17)}
    expected |= {(f"val/{kind}", step) for kind in ("curve", "colors", "tone", "words", "text") for step in (5, 10, 15, 16)}
    assert sorted(map(tuple, media)) == sorted(expected)
