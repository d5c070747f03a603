"""mode=report: the page is opened from the file system in headless Chromium, and clicked."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from framework.runs.report import find_runs, read_runs
from framework.runs.report_page import colors
from tests.harness import command, finished
from tests.launch.test_sweep import swept
from tests.test_loop import TINY

ROOT = Path(__file__).resolve().parent.parent


def write_run(path: Path, *, losses: list[float], config: dict[str, Any], summary: dict[str, Any] | None = None) -> None:
    """Write a run's files: a validation and a training row for each loss."""
    path.mkdir(parents=True)
    (path / "lock").touch()
    (path / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"monitor": "val/loss", "mode": "min"}, **config}))
    rows = [{"step": 10 * i, "split": split, "loss": loss} for i, loss in enumerate(losses, 1) for split in ("train", "val")]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"status": "preempted", "step": 10 * len(losses), "wall_s": 3723.4, "restarts": 0} | (summary or {})
    (path / "summary.json").write_text(json.dumps(summary))


def report(root: Path) -> str:
    """Write the report of a root. Returns what the command said."""
    ended = command("mode=report", root=root)
    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output
    return ended.output


# --- in a browser

_FIND = """
const find = (root) => [...root.querySelectorAll(arguments[0]),
    ...[...root.querySelectorAll("*")].filter((e) => e.shadowRoot).flatMap((e) => find(e.shadowRoot))]
return find(document)
"""


class Page:
    """A report that is open in the browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())
        self.wait(lambda: driver.execute_script("return window.Bokeh?.documents[0]?.is_idle"))

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (result := condition()):
            assert time.monotonic() < deadline, "the page does not get there"
            time.sleep(0.02)
        return result

    def find(self, selector: str) -> list[Any]:
        """Return the elements that match, also in shadow trees."""
        return self.driver.execute_script(_FIND, selector)

    def model(self, name: str, expression: str) -> Any:
        return self.driver.execute_script(f"return Bokeh.documents[0].get_model_by_name({name!r}).{expression}")

    def column(self, number: int) -> list[str]:
        """Return the texts of a column of the table, from the top."""
        cells = self.find(f".slick-cell.l{number}")
        return [cell.text for cell in sorted(cells, key=lambda cell: cell.rect["y"])]

    def head(self, title: str) -> Any:
        (head,) = [head for head in self.find(".slick-header-column") if head.text == title]
        return head

    def cell(self, text: str) -> Any:
        return next(cell for cell in self.find(".slick-cell") if cell.text == text)

    def click(self, text: str) -> None:
        next(button for button in self.find("button, .bk-btn") if button.text == text).click()

    def pixels(self, color: str, panel: str) -> int:
        """Count a panel's pixels of about this color: those of a curve, but not of one that is faded."""
        view = f"Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name({panel!r}).id).el"
        image = Image.open(io.BytesIO(self.driver.execute_script(f"return {view}").screenshot_as_png)).convert("RGB")
        wanted = tuple(bytes.fromhex(color[1:]))
        found: Any = image.getcolors(1 << 24)  # (how many, (red, green, blue))
        return sum(count for count, near in found if all(abs(one - other) < 60 for one, other in zip(near, wanted)))


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


LOSSES = {"first": [3.0, 1.0, 2.0], "second": [2.5, 2.2, 0.5], "third": [2.0, 1.5, 1.6]}


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Page:
    root = tmp_path / "runs"
    for number, (name, losses) in enumerate(LOSSES.items()):
        write_run(root / "sweep" / name, losses=losses, config={"seed": 0, "optimizer": {"lr": 0.1**number}})
    report(root)
    return Page(driver, root / "report.html")


def test_the_table_tells_what_differs_and_the_metrics(page: Page) -> None:
    assert [head.text for head in page.find(".slick-header-column")][:7] == [
        "", "run", "state", "optimizer.lr", "best val/loss", "val/loss", "train/loss",
    ]  # fmt: skip
    assert page.column(1) == ["sweep/first", "sweep/second", "sweep/third"]
    assert page.column(2) == ["preempted"] * 3
    assert page.column(3) == ["1", "0.1", "0.01"]
    assert page.column(4) == ["1.0000", "0.5000", "1.5000"]
    assert page.column(5) == ["2.0000", "0.5000", "1.6000"]
    assert page.column(8) == ["1:02:03"] * 3


def test_a_click_on_a_head_sorts_and_another_the_other_way(page: Page) -> None:
    page.head("best val/loss").click()
    page.wait(lambda: page.column(1) == ["sweep/second", "sweep/first", "sweep/third"])
    page.head("best val/loss").click()
    page.wait(lambda: page.column(1) == ["sweep/third", "sweep/first", "sweep/second"])


def test_a_click_on_a_row_leaves_its_curve_alone_in_its_color(page: Page) -> None:
    mine, other = colors(3)[1], colors(3)[0]
    for panel in ("linear val/loss", "linear train/loss"):
        assert page.pixels(mine, panel) > 20 and page.pixels(other, panel) > 20
    page.cell("sweep/second").click()
    page.wait(lambda: page.model("runs", "source.selected.indices") == [1])
    page.wait(lambda: page.pixels(other, "linear val/loss") == 0)
    assert page.pixels(mine, "linear val/loss") > 20 and page.pixels(mine, "linear train/loss") > 20
    swatches = {
        swatch.value_of_css_property("background-color")
        for swatch in page.find(".slick-row.selected .swatch, .selected .swatch")
    }
    assert swatches == {"rgba({}, {}, {}, 1)".format(*bytes.fromhex(mine[1:]))}
    page.click("all runs")
    page.wait(lambda: page.pixels(other, "linear val/loss") > 20)


def test_a_click_on_a_curve_chooses_its_row(page: Page) -> None:
    from selenium.webdriver import ActionChains

    # the middle point of the second run: no other curve is near
    place = page.driver.execute_script("""
        const view = Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name("linear val/loss").id)
        const box = view.el.getBoundingClientRect(), frame = view.frame
        return [frame.x_scale.compute(20) - box.width / 2, frame.y_scale.compute(2.2) - box.height / 2, view.el]""")
    ActionChains(page.driver).move_to_element_with_offset(place[2], round(place[0]), round(place[1])).click().perform()
    page.wait(lambda: page.model("runs", "source.selected.indices") == [1])
    page.wait(lambda: [cell.text for cell in page.find(".slick-cell.l1.selected")] == ["sweep/second"])
    told = page.wait(lambda: [tip.text for tip in page.find("[class*=tooltip]") if "sweep/second" in tip.text])
    assert "20" in told[0] and "2.2000" in told[0]


def test_the_scale_of_the_curves_can_be_logarithmic(page: Page) -> None:
    assert page.model("linear val/loss", "y_scale.type") == "LinearScale"
    assert not page.driver.execute_script(
        "return Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name('log val/loss').id)?.el.checkVisibility()"
    )
    page.click("log")
    page.wait(lambda: page.driver.execute_script(
        "return Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name('log val/loss').id)?.el.checkVisibility()"))  # fmt: skip
    assert page.model("log val/loss", "y_scale.type") == "LogScale"
    page.wait(lambda: page.pixels(colors(3)[0], "log val/loss") > 20)


def test_words_narrow_the_table_and_the_curves(page: Page) -> None:
    (box,) = page.find("input.bk-input")
    box.send_keys("Lr=0.1 sweep")
    page.wait(lambda: page.column(1) == ["sweep/second"])
    page.wait(lambda: page.pixels(colors(3)[0], "linear val/loss") == 0)
    assert page.pixels(colors(3)[1], "linear val/loss") > 20


def test_the_page_asks_for_nothing_else(page: Page) -> None:
    assert page.driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert [line for line in page.driver.get_log("browser") if line["level"] == "SEVERE"] == []


SCRIPT, IMAGE = "<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked=1'>"


def test_what_names_and_values_hold_is_shown_and_never_run(driver: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    metrics = json.dumps({"step": 1, "split": "val", "loss": 1.0, SCRIPT: 2.0}) + "\n"
    for number, name in enumerate((SCRIPT, IMAGE, "a", "b\u202ec")):  # the first becomes two directories
        config = {"model": {IMAGE: number, "kind": [SCRIPT, IMAGE, "<%= window.hacked = 1 %>", "{{7*7}}"][number]}}
        write_run(
            root / name, losses=[1.0, 2.0], config=config, summary={"status": SCRIPT, "error": f"{SCRIPT}\ud800 {number}"}
        )
        with open(root / name / "metrics.jsonl", "a") as file:
            file.write(metrics)
    report(root)
    page = Page(driver, root / "report.html")
    assert page.column(1) == [IMAGE, SCRIPT, "a", "b\ufffdc"]
    assert set(page.column(2)) == {SCRIPT}
    heads = [head.text for head in page.find(".slick-header-column")]
    assert f"model.{IMAGE}" in heads and f"best val/{SCRIPT}" in heads
    assert {SCRIPT, IMAGE, "<%= window.hacked = 1 %>", "{{7*7}}"} <= set(page.column(heads.index("model.kind")))
    page.cell("a").click()
    page.wait(lambda: page.model("runs", "source.selected.indices") == [2])
    assert page.driver.execute_script("return window.hacked") is None
    assert page.find("script + img, .slick-cell img, .slick-header-column img, .slick-cell script") == []


# --- what is read


def test_real_runs_are_in_their_report(driver: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for lr in ("0.01", "0.02"):
        finished(*TINY, "trainer.max_epochs=2", f"optimizer.lr={lr}", root=root)
    assert f"2 runs: 2 finished: {root}/report.html" in report(root)
    page = Page(driver, root / "report.html")
    rows = {path.parent.name: json.loads(path.read_text()) for path in root.glob("default/*/summary.json")}
    losses = [rows[label.rpartition("/")[2]]["metrics"]["test"]["last"]["loss"] for label in page.column(1)]
    heads = [head.text for head in page.find(".slick-header-column")]
    assert page.column(heads.index("test/loss")) == [f"{loss:.4f}" for loss in losses]
    assert page.column(heads.index("state")) == ["finished"] * 2
    assert sorted(page.column(heads.index("optimizer.lr"))) == ["0.01", "0.02"]


def damaged(root: Path) -> dict[str, Path]:
    paths = {}
    for name in (
        "whole",
        "half a summary",
        "no metrics",
        "torn metrics",
        "odd values",
        "no configuration",
        "itself",
        "bomb",
        "pipe",
    ):
        paths[name] = root / name
        write_run(paths[name], losses=[2.0, 1.0], config={"seed": 1})
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
    runs, left_out = read_runs(root)
    notes = {run.label: run.note for run in runs}
    assert notes == {
        "whole": "", "half a summary": "no summary.json that can be read", "no metrics": "no metrics", "torn metrics": "",
        "odd values": "[1]", "no configuration": "no config.yaml that can be read", "itself": "no config.yaml that can be read",
        "bomb": "",
    }  # fmt: skip
    assert len(left_out) == 1
    whole = next(run for run in runs if run.label == "whole")
    assert (whole.last["val/loss"], whole.numbers["step"], whole.state) == (1.0, 20, "preempted")
    assert next(run for run in runs if run.label == "torn metrics").curves == whole.curves


def test_a_long_training_curve_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[1 / n for n in range(1, 1001)], config={})
    (run,), _ = read_runs(tmp_path)
    steps, losses = run.curves["train/loss"]
    assert 200 < len(steps) <= 300 and steps == sorted(steps)
    assert (steps[-1], losses[-1]) == (10_000, 1 / 1000)
    assert len(run.curves["val/loss"][0]) == 1000


def test_a_run_within_a_run_is_a_part_of_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[1.0], config={})
    write_run(tmp_path / "a" / "wandb" / "b", losses=[1.0], config={})
    assert find_runs(tmp_path) == [tmp_path / "a"]


@pytest.mark.parametrize("exists", [True, False])
def test_without_a_run_there_is_a_line_and_no_page(exists: bool, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "none"
    ended = command("mode=report", root=root)
    assert ended.code == 78
    assert ended.output == f"run.root: {root} has no run (a directory that runs live in)\n"
    assert not (root / "report.html").exists()


def test_what_a_report_does_not_use_is_refused(tmp_path: Path) -> None:
    ended = command("mode=report", "optimizer.lr=1", "model=mlp", root=tmp_path / "runs")
    assert ended.code == 78
    assert ended.output.splitlines() == ["optimizer.lr: does nothing with mode=report (run.root alone)",
                                         "model: does nothing with mode=report (run.root alone)"]  # fmt: skip
    ended = swept("mode=report", "seed=1,2", root=tmp_path / "runs")
    assert ended.code == 78 and "mode: report does nothing with a sweep (without -m)" in ended.output


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
