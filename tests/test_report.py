"""mode=report: the page is opened from the file system in headless Chromium, and clicked."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from PIL import Image

from framework.runs.report import RunReader, find_runs, write_page
from tests.harness import command, finished, refused
from tests.test_loop import TINY

ROOT = Path(__file__).resolve().parent.parent


def write_run(path: Path, *, losses: list[float], config: dict[str, Any], summary: dict[str, Any] | None = None) -> None:
    """Write a run's files: a validation and a training row for each loss."""
    path.mkdir(parents=True)
    (path / "lock").touch()
    (path / "config.yaml").write_text(yaml.safe_dump({"checkpoint": MONITOR, **config}))
    rows = [{"step": 10 * i, "split": split, "loss": loss} for i, loss in enumerate(losses, 1) for split in ("train", "val")]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"status": "preempted", "step": 10 * len(losses), "wall_s": 3723.4, "restarts": 0} | (summary or {})
    (path / "summary.json").write_text(json.dumps(summary))


def report(root: Path) -> str:
    ended = command("mode=report", root=root)
    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output
    return ended.output


# --- in a browser


class Page:
    def __init__(self, driver: Any, path: Path, state: dict[str, Any] | None = None) -> None:
        self.driver = driver
        driver.get("about:blank")  # a change of the state alone would not load the page
        driver.get(path.as_uri() + (f"#{quote(json.dumps(state))}" if state else ""))
        self.wait(lambda: self.script("return document.documentElement.dataset.drawn"))

    def script(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (result := condition()):
            assert time.monotonic() < deadline, "the page does not get there"
            time.sleep(0.02)
        return result

    def find(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def column(self, number: int) -> list[str]:
        return [cell.text for cell in self.find(f"#table tr.run td:nth-child({number})")]

    def lines(self, panel: str) -> dict[str, list[list[float]]]:
        """Return what a panel draws: by title, the steps, the values, and for a group the least and largest values."""
        chart = f"charts.find((chart) => chart.name === {json.dumps(panel)})"
        self.wait(lambda: self.script(f"return {chart}.plot && !{chart}.groups"))
        return self.script(f"return Object.fromEntries({chart}.lines.map(({{group, line}}) => [group.title, line]))")

    def set(self, name: str, value: Any) -> None:
        self.script("change({[arguments[0]]: arguments[1]})", name, value)

    @property
    def errors(self) -> list[Any]:
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium and its driver here: tests/install_debian.sh installs them")
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -r requirements-dev.txt")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--window-size=1500,1400", "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield started
    started.quit()


MONITOR = {"monitor": "val/loss", "mode": "min"}
LOSSES = {"first": [3.0, 1.0, 2.0], "second": [2.5, 2.2, 0.5], "third": [2.0, 1.5, 1.6]}


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Page:
    root = tmp_path / "runs"
    for number, (name, losses) in enumerate(LOSSES.items()):
        config = {"seed": 0, "optimizer": {"lr": 0.1**number}, "checkpoint": {**MONITOR, "keep_last": number + 1}}
        write_run(root / "sweep" / name, losses=losses, config=config)
    report(root)
    return Page(driver, root / "report.html")


@pytest.mark.slow
def test_the_table_has_the_results_first_and_is_sorted_and_narrowed(page: Page) -> None:
    heads = [head.get_attribute("title") for head in page.find("#table th")]
    assert heads == ["run", "state", "best val/loss", "last val/loss", "time", "optimizer.lr"]
    assert page.column(1) == ["second", "first", "third"]  # the best first, the others' folder left out
    assert page.column(3) == ["0.5000 @30", "1.0000 @20", "1.5000 @20"] and page.column(5) == ["1:02:03"] * 3
    (summary,) = page.find("#summary")
    assert "3 runs: 3 preempted; best val/loss 0.5000 at step 30: second" in summary.text
    for order in (["third", "second", "first"], ["first", "second", "third"]):
        page.find("#table th")[5].click()
        page.wait(lambda: page.column(1) == order)  # noqa: B023  # called at once
    page.find("#filter")[0].send_keys("Lr=0.1 sweep")
    page.wait(lambda: page.column(1) == ["second"])
    assert [*page.lines("val/loss")] == ["second"]
    page.find("#all")[0].click()
    page.wait(
        lambda: {"checkpoint.keep_last", "last train/loss"} <= {head.get_attribute("title") for head in page.find("#table th")}
    )
    assert page.errors == []


@pytest.mark.slow
def test_curves_have_the_color_of_their_row_are_read_by_hovering_zoomed_together_and_smoothed(page: Page) -> None:
    from selenium.webdriver import ActionChains

    assert page.lines("val/loss")["first"] == [[10, 20, 30], [3, 1, 2]]
    swatch = page.find("#table .swatch")[0].value_of_css_property("background-color")
    canvas = Image.open(io.BytesIO(page.find("#curves canvas")[0].screenshot_as_png)).convert("RGB")
    wanted = [int(part) for part in re.findall(r"\d+", swatch)[:3]]
    colors: Any = canvas.getcolors(1 << 24)  # (how many, (red, green, blue))
    assert sum(count for count, near in colors if all(abs(one - other) < 40 for one, other in zip(near, wanted))) > 20
    over = page.find(".u-over")[0]
    x, y = page.script("return [charts[0].plot.valToPos(20, 'x'), charts[0].plot.valToPos(2.2, 'y')]")
    there = ActionChains(page.driver).move_to_element_with_offset(over, -1, -1)  # from a point of the same chart
    there.move_to_element_with_offset(over, round(x - over.size["width"] / 2), round(y - over.size["height"] / 2)).perform()
    page.wait(lambda: page.find("figcaption")[0].text.endswith("second: 2.2000 at 20"))
    there.click_and_hold().move_by_offset(over.size["width"] // 4, 0).release().perform()
    page.wait(
        lambda: page.script("return charts.every((chart) => chart.plot.scales.x.min > 19 && chart.plot.scales.x.max < 27)")
    )
    page.set("smooth", 0.5)
    # of 3, 1, 2 with the weights 1; 1/2, 1; 1/4, 1/2, 1
    assert page.lines("val/loss")["first"][1] == pytest.approx([3.0, (1.5 + 1) / 1.5, (0.75 + 0.5 + 2) / 1.75])


def test_axes_are_steps_samples_or_time_and_linear_or_logarithmic(driver: Any, tmp_path: Path) -> None:
    summary = {"step": 20, "samples_seen": 150, "train_s": 5.0}
    write_run(tmp_path / "a", losses=[3.0, 2.0], config={"global_batch_size": 8}, summary=summary)
    write_run(tmp_path / "b", losses=[3.0, 0.0, -1.0, 1.0], config={"global_batch_size": 8}, summary={"step": 0})
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    found = {}
    for x in ("samples", "time", "step"):
        page.set("x", x)
        found[x] = {name: line[0] for name, line in page.lines("val/loss").items()}
    assert found == {"step": {"a": [10, 20], "b": [10, 20, 30, 40]}, "samples": {"a": [75, 150]}, "time": {"a": [2.5, 5]}}
    heights = "return [0.5, 1, 2].map((value) => charts[0].plot.valToPos(value, 'y'))"
    top, middle, bottom = page.script(heights)
    assert round((bottom - middle) / (middle - top), 2) == 2
    page.set("logy", True)
    page.lines("val/loss")
    top, middle, bottom = page.script(heights)
    assert round((bottom - middle) / (middle - top), 2) == 1 and page.errors == []


def test_runs_that_differ_in_their_seed_alone_are_a_mean_with_a_band(driver: Any, tmp_path: Path) -> None:
    for lr, losses in ((1, (1.0, 2.0, 3.0)), (2, (5.0, 6.0, 10.0))):
        for seed, loss in enumerate(losses):
            more = [loss + 2] if seed else []  # seed 0 has not come so far
            write_run(
                tmp_path / f"lr{lr}_{seed}", losses=[loss, loss + 1, *more], config={"seed": seed, "optimizer": {"lr": lr}}
            )
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"group": "seed"})
    assert page.lines("val/loss") == {
        "lr=1": [[10, 20, 30], [2, 3, 4.5], [1, 2, 4], [3, 4, 5]],
        "lr=2": [[10, 20, 30], [7, 8, 10], [5, 6, 8], [10, 11, 12]],
    }
    assert page.script("return charts[0].plot.bands.length") == 2
    page.set("group", "seed")
    (option,) = page.find("#group option[value='optimizer.lr']")
    option.click()
    assert sorted(page.lines("val/loss")) == ["lr=1", "lr=2"] and page.errors == []


@pytest.mark.slow
def test_a_page_that_is_loaded_again_looks_the_same_and_a_state_of_somebody_else_does_no_harm(page: Page) -> None:
    for name, value in {"sort": ["optimizer.lr", 1], "filter": "sweep", "x": "samples", "logy": True, "smooth": 0.5}.items():
        page.set(name, value)
    before = page.script("return JSON.stringify(ui)")
    page.script("location.reload()")
    page.wait(lambda: page.script("return document.documentElement.dataset.drawn"))
    assert page.script("return JSON.stringify(ui)") == before and page.column(1) == ["third", "second", "first"]
    address = page.driver.current_url.partition("#")[0]
    for state in ("%7B", "%22a%22", "null", "[1]", quote('{"sort": 3, "x": 4, "chosen": {}, "group": "no such key"}')):
        page.driver.get("about:blank")
        page.driver.get(f"{address}#{state}")
        page.wait(lambda: page.script("return document.documentElement.dataset.drawn"))
        assert page.column(1) == ["second", "first", "third"] and page.errors == []


SCRIPT, IMAGE = "<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked=1'>"


def test_a_chosen_run_has_its_configuration_and_nothing_in_files_is_run(driver: Any, tmp_path: Path) -> None:
    names = ["constructor", "toString", "__proto__", IMAGE]
    for number, name in enumerate(("a", SCRIPT, IMAGE, "b\u202ec")):  # a script's name becomes two directories
        config = {"seed": number, "extra": dict.fromkeys(names, [7, SCRIPT, IMAGE, "{{7*7}}"][number])}
        summary = {"status": SCRIPT, "error": f"{SCRIPT}\ud800 {number}"}
        write_run(tmp_path / name, losses=[1.0 + number, 2.0], config=config, summary=summary)
        with open(tmp_path / name / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 1, "split": "val", "loss": 1.0, SCRIPT: 2.0, "constructor": 3.0}) + "\n")
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"all": True, "chosen": ["a"]})
    assert sorted(page.column(1)) == sorted([IMAGE, SCRIPT, "a", "b\ufffdc"]) and set(page.column(2)) == {SCRIPT}
    assert {f"extra.{IMAGE}", f"best val/{SCRIPT}", "best val/constructor"} <= {
        head.get_attribute("title") for head in page.find("#table th")
    }
    (panel,) = page.find("#chosen")
    text = " ".join(panel.text.split())
    assert all(f"extra.{name} 7" in text for name in names) and "native code" not in text and "[object" not in text
    assert page.script("return window.hacked") is None and page.errors == []
    assert page.find("body script:not(#data):not(:last-of-type)") == []
    assert page.script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
def test_of_many_runs_the_best_are_colored_and_their_rows_are_all_there(driver: Any, tmp_path: Path) -> None:
    for number in range(250):
        write_run(tmp_path / f"{number:03}", losses=[2.0, 1.0 + number], config={"seed": number})
    write_run(
        tmp_path / "bad",
        losses=[],
        config={"seed": 1},
        summary={"status": "failed", "error": "the gradient\nof step 7 is not finite"},
    )
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    page.lines("val/loss")
    colors = page.script("return charts[0].lines.map(({group}) => [group.title, group.color])")
    assert len(colors) == 110 and sorted(title for title, color in colors if color != "#9aa5ad66") == [
        f"{n:03}" for n in range(10)
    ]
    page.wait(lambda: len(page.find("tr.run")) == 251)
    (note,) = page.find("tr.note")
    assert note.text == "the gradient of step 7 is not finite; no metrics"
    assert page.script("return arguments[0].previousSibling.innerText", note).startswith("bad")


@pytest.mark.slow
def test_a_page_is_written_again_while_a_run_goes_on_and_says_when_nobody_writes_it(driver: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "a", losses=[3.0, 2.0], config={"seed": 0})
    line = [sys.executable, "train.py", "mode=report", f"run.root={root}", "report.every_s=0.2"]
    text = (
        "return document.documentElement.dataset.drawn ? document.body.innerText : ''"  # at once: it is loaded again and again
    )
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as writing:
        try:
            assert writing.stderr is not None
            assert "every 0.2 s until Ctrl-C" in writing.stderr.readline()
            page = Page(driver, root / "report.html", {"smooth": 0.5})
            assert "live" in page.script(text) and "1.2500" not in page.script(text)
            with open(root / "a" / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": 30, "split": "val", "loss": 1.25}) + "\n")
            finished(*TINY, "trainer.max_epochs=2", root=root / "new")  # it goes on while the page is open
            page.wait(lambda: "2 runs: 1 preempted 1 finished" in (shown := page.script(text)) and "1.2500" in shown)
            assert page.script("return ui.smooth") == 0.5
        finally:
            writing.send_signal(signal.SIGINT)
        assert writing.wait() == 0
    assert Page(driver, root / "report.html").find("#live") == []
    write_page(*RunReader(root).read(), root / "report.html", title="runs", every_s=0.5)
    page = Page(driver, root / "report.html")
    page.script("history.replaceState({written: data.written, times: 99}, ''); location.reload()")
    page.wait(lambda: "no longer updated" in page.script(text))


# --- what is read


def content(root: Path) -> dict[str, Any]:
    report(root)
    (text,) = re.findall('<script id="data" type="application/json">(.*?)</script>', (root / "report.html").read_text())
    return json.loads(text)


def test_real_runs_are_in_their_report(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for lr in ("0.01", "0.02"):
        finished(*TINY, "trainer.max_epochs=2", f"optimizer.lr={lr}", root=root)
    found = content(root)
    assert found["swept"] == ["optimizer.lr"]  # and nothing that follows from where they were run
    for run in found["runs"]:
        summary = json.loads((root / run["label"] / "summary.json").read_text())
        assert run["last"]["test/loss"] == summary["metrics"]["test"]["last"]["loss"] and run["state"] == "finished"
        assert run["numbers"]["train_s"] > 0 and "train.py" in run["origin"]["command"] + "train.py"


def test_models_with_the_same_class_name_have_their_whole_path(tmp_path: Path) -> None:
    for net in ("neta", "netb"):
        config = {"model": {"_target_": f"{net}.Net"}, "optimizer": {"_target_": "torch.optim.SGD"}}
        write_run(tmp_path / net, losses=[1.0], config=config)
    found = content(tmp_path)
    assert [run["own"]["model"] for run in found["runs"]] == ["neta.Net", "netb.Net"] and found["common"]["optimizer"] == "SGD"


def test_a_last_value_that_is_not_finite_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[3.0, 2.0], config={"seed": 0})
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "split": "val", "loss": None, "mae": None}) + "\n" for step in (30, 40))
    (run,) = content(tmp_path)["runs"]
    assert run["best"]["val/loss"] == [2.0, 20] and run["last"]["val/loss"] is None and "val/mae" not in run["best"]
    assert command("mode=status", root=tmp_path).output.splitlines()[2].split()[:3] == ["a", "preempted", "40"]


def test_a_run_that_is_the_root_has_its_own_name(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[1.0], config={})
    assert [run.label for run in RunReader(tmp_path / "run").read()[0]] == ["run"]
    assert command("mode=status", root=tmp_path / "run").output.splitlines()[2].startswith("run ")


def test_only_runs_that_have_changed_are_read_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, losses=[1.0], config={})
    reader = RunReader(tmp_path)
    first, _ = reader.read()
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 30, "split": "val", "loss": 0.5}) + "\n")
    second, _ = reader.read()
    assert second[0] is first[0] and second[1] is not first[1]
    assert second[1].series["val/loss"].last == 0.5
    shutil.rmtree(tmp_path / "a")
    assert [run.label for run in reader.read()[0]] == ["b"]


def damaged(root: Path) -> dict[str, Path]:
    names = [
        "whole", "half a summary", "no metrics", "torn metrics", "odd values", "no configuration", "itself", "bomb", "pipe",
    ]  # fmt: skip
    paths = {name: root / name for name in names}
    for path in paths.values():
        write_run(path, losses=[2.0, 1.0], config={"seed": 1})
    summary = (root / "whole" / "summary.json").read_text()
    (paths["half a summary"] / "summary.json").write_text(summary[: len(summary) // 2])
    (paths["no metrics"] / "metrics.jsonl").unlink()
    with open(paths["torn metrics"] / "metrics.jsonl", "ab") as file:
        file.write(b'\0\xff{"step": 30, "split": "tr')
    odd = {"status": ["x"], "step": {}, "wall_s": 10**400, "restarts": None, "goodput": "1", "metrics": 3, "error": [1]}
    (paths["odd values"] / "summary.json").write_text(json.dumps(odd))
    (paths["odd values"] / "metrics.jsonl").write_text(
        '{"step": 1, "split": "val", "loss": 1%s}\n[]\n{"step": 2, "split": "val", "loss": NaN}\n' % ("0" * 400)
    )
    start = {"git": 1, "packages": ["x"], "code": ["y"], "command": {"a": 1}, "host": None}
    (paths["odd values"] / "provenance.json").write_text(json.dumps({"starts": [start], "code": {"y": 3}}))
    (paths["torn metrics"] / "provenance.json").write_text("[" * 100_000)
    (paths["no configuration"] / "config.yaml").write_bytes(b"\xff\0: [")
    (paths["itself"] / "config.yaml").write_text("a: &a {b: *a}")
    levels = "".join(f"l{n}: &l{n} {{{', '.join(f'k{i}: *l{n - 1}' for i in range(9))}}}\n" for n in range(1, 9))
    (paths["bomb"] / "config.yaml").write_text("l0: &l0 {x: 1}\n" + levels)
    (paths["pipe"] / "metrics.jsonl").unlink()
    os.mkfifo(paths["pipe"] / "metrics.jsonl")
    return paths


def test_damaged_runs_are_listed_or_left_out_with_a_word(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    paths = damaged(root)
    (root / "foreign").mkdir()
    (root / "foreign" / "config.yaml").write_text("a: 1")
    shutil.copytree(paths["whole"], root / "whole.old-1")
    said = report(root)
    assert "left out: pipe: metrics.jsonl is not a plain file" in said
    runs, left_out = RunReader(root).read()
    notes = {run.label: run.note for run in runs}
    assert notes == {
        "whole": "", "half a summary": "no summary.json that can be read", "no metrics": "no metrics", "torn metrics": "",
        "odd values": "[1]", "no configuration": "no config.yaml that can be read", "itself": "no config.yaml that can be read",
        "bomb": "",
    }  # fmt: skip
    assert len(left_out) == 1
    whole = next(run for run in runs if run.label == "whole")
    assert (whole.series["val/loss"].last, whole.numbers["step"], whole.state) == (1.0, 20, "preempted")
    assert next(run for run in runs if run.label == "torn metrics").series == whole.series
    odd = next(run for run in runs if run.label == "odd values")
    assert odd.origin == {}


def test_a_long_training_curve_is_thinned_at_common_steps_and_keeps_its_end(tmp_path: Path) -> None:
    for name, length in (("long", 1000), ("longer", 1190)):
        write_run(tmp_path / name, losses=[1 / n for n in range(1, length + 1)], config={})
    runs, _ = RunReader(tmp_path).read()
    long, longer = (run.series["train/loss"] for run in runs)
    assert 200 < len(long.steps) <= 301 and long.steps == sorted(long.steps) and set(long.steps) <= set(longer.steps)
    assert (longer.steps[-1], longer.values[-1]) == (11_900, 1 / 1190)
    assert len(runs[0].series["val/loss"].steps) == 1000


def test_a_run_within_a_run_is_a_part_of_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[1.0], config={})
    write_run(tmp_path / "a" / "wandb" / "b", losses=[1.0], config={})
    assert find_runs(tmp_path) == [tmp_path / "a"]


def test_without_a_run_there_is_a_line_and_no_page(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "none"
    ended = command("mode=report", root=root)
    assert ended.code == 78
    assert ended.output == f"run.root: {root} has no run (a directory that contains runs)\n"
    assert not (root / "report.html").exists()


def test_what_a_report_does_not_use_is_refused() -> None:
    assert refused("mode=report", "optimizer.lr=1", "model=mlp").splitlines() == ["optimizer.lr: does nothing with mode=report (run.root and report.every_s alone)",
                                         "model: does nothing with mode=report (run.root and report.every_s alone)"]  # fmt: skip


@pytest.mark.slow
def test_a_report_imports_no_torch_and_starts_no_process(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", losses=[2.0, 1.0], config={})
    script = f"""
import os, sys
os.fork = None
from framework.cli.run import start
code = start(["mode=report", "run.root={tmp_path}/runs"])
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "report.html").stat().st_size < 3 << 20
