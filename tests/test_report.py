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

from framework.runs.report import RunReader, find_runs
from framework.runs.report_page import write_page
from tests.harness import command, finished
from tests.launch.test_sweep import swept
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
    """Write the report of a root. Returns what the command said."""
    ended = command("mode=report", root=root)
    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output
    return ended.output


# --- in a browser


class Page:
    """A report that is open in the browser."""

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

    def heads(self) -> list[str]:
        return [head.get_attribute("title") for head in self.find("#table th")]

    def column(self, title: str) -> list[str]:
        """Return the texts of a column of the table, from the top, without what is small in a cell."""
        (number,) = [number for number, head in enumerate(self.heads(), 1) if head == title]
        cells = self.find(f"#table tr.run td:nth-child({number})")
        return [" ".join(part.text for part in cell.find_elements("css selector", "span:not(.swatch)")) for cell in cells]

    def head(self, title: str) -> Any:
        return next(head for head in self.find("#table th") if head.get_attribute("title") == title)

    def row(self, name: str) -> Any:
        return next(cell for cell in self.find("#table td.run") if cell.text == name)

    def color(self, name: str) -> str:
        return self.row(name).find_element("css selector", ".swatch").value_of_css_property("background-color")

    def choose_option(self, which: str, value: str) -> None:
        (option,) = self.find(f"#{which} option[value='{value}']")
        option.click()

    def pixels(self, color: str, panel: str) -> int:
        """Count a panel's pixels of about this color: those of a curve, but not of one that is faint."""
        (canvas,) = [chart for chart in self.find("#curves figure") if chart.text == panel]
        image = Image.open(io.BytesIO(canvas.find_element("css selector", "canvas").screenshot_as_png)).convert("RGB")
        wanted = [int(part) for part in re.findall(r"\d+", color)[:3]]
        found: Any = image.getcolors(1 << 24)  # (how many, (red, green, blue))
        return sum(count for count, near in found if all(abs(one - other) < 40 for one, other in zip(near, wanted)))

    def lines(self, panel: str) -> list[dict[str, Any]]:
        """Return what a panel draws, each line with its title, points and color."""
        return self.script(
            """return report.charts.find((chart) => chart.name === arguments[0]).lines.map((line) => (
                {title: line.group.title, xs: [...line.xs], ys: [...line.ys], color: line.color ?? null,
                 lows: line.lows ?? null, highs: line.highs ?? null}))""",
            panel,
        )


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


def test_the_first_columns_are_the_results_and_what_was_swept(page: Page) -> None:
    assert page.heads() == ["run", "state", "best val/loss", "last val/loss", "time", "optimizer.lr"]
    assert page.column("run") == ["second", "first", "third"]  # the best first, the others' folder left out
    assert page.column("state") == ["preempted"] * 3
    assert page.column("optimizer.lr") == ["0.1", "1.0", "0.01"]  # 0.1 ** 2, whose last digits are under the mouse
    assert [cell.get_attribute("title") for cell in page.find("#table td:last-child")] == ["0.1", "1.0", "0.010000000000000002"]
    assert page.column("best val/loss") == ["★ 0.5000", "1.0000", "1.5000"]
    assert [cell.text for cell in page.find("#table td small")] == ["@30", "@20", "@20"]
    assert page.column("last val/loss") == ["0.5000", "2.0000", "1.6000"]
    assert page.column("time") == ["1:02:03"] * 3
    (summary,) = page.find("#summary")
    assert "3 runs: 3 preempted" in summary.text and "best val/loss 0.5000 at step 30: second" in summary.text


def test_columns_are_chosen_and_keys_of_execution_are_among_them(page: Page) -> None:
    page.find("#columns summary")[0].click()
    boxes = {label.text: label for label in page.find("#column-list label")}
    assert {"checkpoint.keep_last", "last train/loss", "goodput"} <= boxes.keys()
    boxes["checkpoint.keep_last"].click()
    page.wait(lambda: "checkpoint.keep_last" in page.heads())
    assert page.column("checkpoint.keep_last") == ["2", "1", "3"]
    next(label for label in page.find("#column-list label") if label.text == "time").click()
    page.wait(lambda: "time" not in page.heads())


def test_a_click_on_a_head_sorts_and_another_the_other_way(page: Page) -> None:
    page.head("optimizer.lr").click()
    page.wait(lambda: page.column("run") == ["third", "second", "first"])
    page.head("optimizer.lr").click()
    page.wait(lambda: page.column("run") == ["first", "second", "third"])


def test_a_page_that_is_loaded_again_looks_the_same(page: Page) -> None:
    page.head("optimizer.lr").click()
    page.find("#filter")[0].send_keys("sweep")
    page.choose_option("group", "seed")
    page.choose_option("x", "samples")
    page.find("#log")[0].click()
    page.row("first").click()
    before = page.script("return JSON.stringify(report.ui)")
    page.script("location.reload()")
    page.wait(lambda: page.script("return window.report?.ui.sort[0]") == "configuration optimizer.lr")
    assert page.script("return JSON.stringify(report.ui)") == before
    assert page.column("run") == ["third", "second", "first"]
    assert page.script("return document.getElementById('group').value") == "seed"


@pytest.mark.parametrize(
    "state", ["%7B", "%22a%22", "null", "[1]", quote('{"sort": 3, "x": "y", "shown": [], "group": "key:no", "zoom": 4}')]
)
def test_a_state_of_somebody_else_is_no_harm(state: str, driver: Any, page: Page) -> None:
    address = driver.current_url.partition("#")[0]
    driver.get("about:blank")
    driver.get(f"{address}#{state}")
    page.wait(lambda: page.script("return document.documentElement.dataset.drawn"))
    assert page.column("run") == ["second", "first", "third"]
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_a_click_on_a_row_leaves_its_curve_alone_in_its_color(page: Page) -> None:
    mine, other = page.color("second"), page.color("first")
    for panel in ("val/loss", "train/loss"):
        assert page.pixels(mine, panel) > 20 and page.pixels(other, panel) > 20
    page.row("second").click()
    page.wait(lambda: page.pixels(other, "val/loss") == 0)
    assert page.pixels(mine, "val/loss") > 20 and page.pixels(mine, "train/loss") > 20
    assert page.color("second") == mine
    page.find("#clear")[0].click()
    page.wait(lambda: page.pixels(other, "val/loss") > 20)


def test_a_click_on_a_curve_chooses_its_row(page: Page) -> None:
    from selenium.webdriver import ActionChains

    # the middle point of the second run: no other curve is near
    place = page.script("""
        const chart = report.charts.find((chart) => chart.name === "val/loss"), [x, y] = chart.place(20, 2.2)
        chart.canvas.scrollIntoView()
        return [x - chart.canvas.clientWidth / 2, y - chart.canvas.clientHeight / 2, chart.canvas]""")
    there = ActionChains(page.driver).move_to_element_with_offset(place[2], round(place[0]), round(place[1]))
    there.perform()
    tip = page.wait(lambda: [tip.text for tip in page.find("#tip") if tip.is_displayed()])
    assert tip == ["second\nstep 20: 2.2000"]
    ActionChains(page.driver).click().perform()
    page.wait(lambda: [cell.text for cell in page.find("tr.is-chosen td.run")] == ["second"])


def test_a_drag_zooms_all_panels_and_a_double_click_goes_back(page: Page) -> None:
    from selenium.webdriver import ActionChains

    canvas = page.script("return report.charts[0].canvas")
    width = canvas.size["width"]
    drag = ActionChains(page.driver).move_to_element_with_offset(canvas, 0, 0).click_and_hold()
    drag.move_by_offset(width // 4, 0).release().perform()
    (left, right) = page.wait(lambda: page.script("return report.ui.zoom"))
    assert 19 < left < 22 < right < 27
    assert page.script("return report.charts.map((chart) => chart.box.left)") == [left, left]
    ActionChains(page.driver).double_click(canvas).perform()
    page.wait(lambda: page.script("return report.ui.zoom") is None)
    assert page.script("return report.charts[0].box.right") == 30


def test_the_scale_of_the_curves_can_be_logarithmic(page: Page) -> None:
    def heights() -> list[float]:
        return page.script("return [0.5, 1, 2].map((value) => report.charts[0].place(20, value)[1])")

    top, middle, bottom = heights()
    assert round((bottom - middle) / (middle - top), 2) == 2
    page.find("#log")[0].click()
    top, middle, bottom = page.wait(lambda: heights() != [top, middle, bottom] and heights())
    assert round((bottom - middle) / (middle - top), 2) == 1
    assert page.pixels(page.color("first"), "val/loss") > 20


def test_words_narrow_the_table_and_the_curves(page: Page) -> None:
    other = page.color("first")
    page.find("#filter")[0].send_keys("Lr=0.1 sweep")
    page.wait(lambda: page.column("run") == ["second"])
    assert page.pixels(other, "val/loss") == 0
    assert page.pixels(page.color("second"), "val/loss") > 20


def test_smoothing_is_the_average_of_what_came_before_without_bias(page: Page) -> None:
    page.script("""const slider = document.getElementById("smooth")
        slider.value = 0.5; slider.dispatchEvent(new Event("input")); slider.dispatchEvent(new Event("change"))""")
    (line,) = [line for line in page.lines("val/loss") if line["title"] == "first"]
    # of 3, 1, 2 with the weights 1; 1/2, 1; 1/4, 1/2, 1
    assert line["ys"] == pytest.approx([3.0, (1.5 + 1) / 1.5, (0.75 + 0.5 + 2) / 1.75])


def test_the_x_axis_is_steps_samples_or_time(driver: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[3.0, 2.0], config={"global_batch_size": 8}, summary={"step": 20, "samples_seen": 150})
    rows = [{"step": step, "split": "train", "loss": 1.0, "step_s": seconds} for step, seconds in ((10, 0.5), (20, 0.25))]
    rows.append({"step": 15, "split": "val", "loss": 1.0})
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    found = {}
    for x in ("step", "samples", "time"):
        page.choose_option("x", x)
        found[x] = [page.lines(panel)[0]["xs"] for panel in ("train/loss", "val/loss")]
    assert found == {"step": [[10, 20], [15]], "samples": [[75, 150], [112.5]], "time": [[5, 7.5], [6.25]]}


def seeds(root: Path) -> None:
    """Write runs of two learning rates with three seeds each; the losses of lr=1 are 1, 2, 3 and those of lr=2 are 5, 6, 10."""
    for lr, losses in ((1, (1.0, 2.0, 3.0)), (2, (5.0, 6.0, 10.0))):
        for seed, loss in enumerate(losses):
            write_run(root / f"lr{lr}_seed{seed}", losses=[loss, loss + 1], config={"seed": seed, "optimizer": {"lr": lr}})


def test_runs_that_differ_in_their_seed_alone_are_a_mean_with_a_band(driver: Any, tmp_path: Path) -> None:
    seeds(tmp_path)
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"group": "seed"})
    lines = {line["title"]: line for line in page.lines("val/loss")}
    assert {title: (line["ys"], line["lows"], line["highs"]) for title, line in lines.items()} == {
        "lr=1": ([2, 3], [1, 2], [3, 4]),
        "lr=2": ([7, 8], [5, 6], [10, 11]),
    }
    (legend,) = page.find("#legend")
    assert "lr=1 3 runs, best val/loss 2.0000 (1.0000..3.0000)" in legend.text.replace("\u2002", " ").replace("\n", " ")
    assert "smallest to largest" in legend.text
    assert len({page.color(f"lr1_seed{seed}") for seed in range(3)}) == 1
    assert page.color("lr1_seed0") != page.color("lr2_seed0")
    page.choose_option("group", "key:seed")
    titles = page.wait(lambda: sorted(line["title"] for line in page.lines("val/loss")))
    assert titles == ["seed=0", "seed=1", "seed=2"]


def test_swept_keys_are_axes_beside_the_best_value(driver: Any, tmp_path: Path) -> None:
    seeds(tmp_path)
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    axes = page.script("return report.axesOf(report.runs()).axes.map((axis) => [axis.title, report.runs().map(axis.at)])")
    assert [title for title, _ in axes] == ["optimizer.lr", "seed", "best val/loss"]
    assert sorted(axes[0][1]) == [0, 0, 0, 1, 1, 1] and min(axes[2][1]) == 0 and max(axes[2][1]) == 1
    (canvas,) = page.find("#parallel canvas")
    colors: Any = Image.open(io.BytesIO(canvas.screenshot_as_png)).convert("RGB").getcolors(1 << 24)
    assert len(colors) > 30  # lines from one color to the other


def test_an_error_is_in_its_runs_row(driver: Any, tmp_path: Path) -> None:
    for name, summary in (("good", {}), ("bad", {"status": "failed", "error": "the gradient\nof step 7 is not finite"})):
        write_run(tmp_path / name, losses=[1.0], config={"seed": len(name)}, summary=summary)
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    (note,) = page.find("tr.note")
    assert note.text == "the gradient of step 7 is not finite"
    assert page.script("return arguments[0].previousSibling.innerText", note).startswith("bad")
    assert page.script("return arguments[0].firstChild.firstChild.getBoundingClientRect().right", note) < 1400


def test_of_many_runs_the_best_are_colored_and_the_others_come_with_scrolling(driver: Any, tmp_path: Path) -> None:
    for number in range(250):
        write_run(tmp_path / f"{number:03}", losses=[2.0, 1.0 + number], config={"seed": number})
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    lines = page.lines("val/loss")
    assert len(lines) == 210 and sorted(line["title"] for line in lines if line["color"]) == [f"{n:03}" for n in range(10)]
    assert len({line["color"] for line in lines if line["color"]}) == 10
    (legend,) = page.find("#legend")
    assert "10 of 250 runs" in legend.text and "40 more are not drawn" in legend.text
    assert len(page.find("tr.run")) == 200
    page.script("document.getElementById('table').scrollTop = 1e6")
    page.wait(lambda: len(page.find("tr.run")) == 250)


# --- the difference of two runs


def provenance(path: Path, *, torch: str, function: str) -> None:
    git = {"commit": "c0ffee", "diff": "", "untracked": []}
    start = {"at": "2026", "command": "train.py", "packages": {"torch": torch}, "git": git, "code": function, "targets": []}
    content = {"starts": [start], "code": {function: {"models.mlp": {"MLP": function}, "models.same": {"f": "1"}}}}
    (path / "provenance.json").write_text(json.dumps(content))


def difference(driver: Any, root: Path) -> str:
    report(root)
    page = Page(driver, root / "report.html")
    boxes = page.find("#table td.run input")
    boxes[0].click()
    page.find("#table td.run input")[1].click()
    (panel,) = page.wait(lambda: [panel for panel in page.find("#chosen") if " and " in panel.text])
    return " ".join(panel.text.split())


def test_two_chosen_runs_are_compared(driver: Any, tmp_path: Path) -> None:
    for name, lr, torch in (("a", 0.1, "2.13"), ("b", 0.2, "2.12")):
        config = {"optimizer": {"lr": lr}, "model": {"dim": 8}, "checkpoint": {**MONITOR, "keep_last": int(10 * lr)}}
        write_run(tmp_path / name, losses=[3.0, 2.0, 1.0 + lr], config=config)
        provenance(tmp_path / name, torch=torch, function=torch)
    text = difference(driver, tmp_path)
    assert "Their rows differ first at step 30." in text
    assert "configuration a b optimizer.lr 0.1 0.2 execution (does not change the results) a b checkpoint.keep_last 1 2" in text
    assert "models.mlp" in text and "models.same" not in text and "torch 2.13 2.12" in text
    assert "model.dim" not in text and "commit" not in text


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([3.0, 2.0], [3.0, 2.0], "Their 4 rows are equal to the last bit."),
        ([3.0, 2.0], [3.0, 2.0, 1.0], "equal to the last bit up to step 20; one run has more rows."),
        ([3.0, 2.0], [3.5, 2.0], "differ first at step 10."),
        ([1 / n for n in range(1, 1001)], [1 / n - (n > 901) * 1e-16 for n in range(1, 1001)], "at or before step 9040, after step 9000."),
        ([1 / n for n in range(1, 1001)], [1 / n for n in range(1, 101)] + [7.0], "up to step 1000; the page does not have later rows."),
        ([3.0], [], "One run has no rows."),
    ],
)  # fmt: skip
def test_the_first_step_at_which_rows_differ(
    one: list[float], other: list[float], words: str, driver: Any, tmp_path: Path
) -> None:
    for name, losses, speed in (("a", one, 1.5), ("b", other, 2.5)):
        write_run(tmp_path / name, losses=losses, config={"seed": 0})
        rows = [
            {**json.loads(line), "samples_per_s": speed}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert words in difference(driver, tmp_path)


def test_names_of_javascript_s_own_are_names_like_any_other(driver: Any, tmp_path: Path) -> None:
    names = ["constructor", "toString", "__proto__"]
    for run, others in (("a", dict.fromkeys(names, 1)), ("b", {"seed": 2})):
        write_run(tmp_path / run, losses=[1.0], config={"extra": others})
        provenance(tmp_path / run, torch="2.8", function=run)
    record = json.loads((tmp_path / "a" / "provenance.json").read_text())
    record["code"]["a"] |= {name: {"f": "1"} for name in names}
    record["starts"][0]["packages"] |= dict.fromkeys(names, "1.0")
    (tmp_path / "a" / "provenance.json").write_text(json.dumps(record))
    lines = [{"sample": 0, "constructor": 7}, {"sample": 1}]
    (tmp_path / "a" / "predictions").mkdir()
    (tmp_path / "a" / "predictions" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = difference(driver, tmp_path)
    assert "native code" not in text and "[object" not in text
    for name in names:
        assert f"extra.{name} 1 (none)" in text and text.count(f"{name} 1.0 (none)") == 1
    page = Page(driver, tmp_path / "report.html", {"chosen": ["a"]})
    (panel,) = page.find("#chosen")
    assert "native code" not in panel.text and "sample constructor 0 7 1" in " ".join(panel.text.split())
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def test_a_chosen_run_has_its_configuration_and_predictions_beside(driver: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, losses=[1.0], config={"seed": ord(name), "model": {"dim": 8}})
    (tmp_path / "a" / "predictions").mkdir()
    lines = [json.dumps({"sample": number, "prediction": 10 + number, "name": SCRIPT}) + "\n" for number in range(20)]
    (tmp_path / "a" / "predictions" / "test.jsonl").write_text("".join(lines))
    Image.new("RGB", (16, 8), "#ff00ff").save(tmp_path / "a" / "predictions" / "test.png")
    (tmp_path / "a" / "predictions" / "val.png").write_text("<svg onload='window.hacked = 1'>")
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"chosen": ["a"]})
    (panel,) = page.find("#chosen")
    text = " ".join(panel.text.split())
    assert (
        "predictions of test: the first 8 sample prediction name 0 10" in text
        and f"7 17 {SCRIPT}" in text
        and "8 18" not in text
    )
    assert "seed 97" in text
    assert [page.script("return [arguments[0].naturalWidth, arguments[0].naturalHeight]", one) for one in page.find("img")] == [
        [16, 8]
    ]
    panel.find_element("css selector", "summary").click()
    page.wait(lambda: "model.dim 8" in " ".join(panel.text.split()))


def test_models_with_the_same_class_name_are_two_groups(driver: Any, tmp_path: Path) -> None:
    for number, net in enumerate(("neta", "netb")):
        for seed in (0, 1):
            config = {"seed": seed, "model": {"_target_": f"{net}.Net"}, "optimizer": {"_target_": "torch.optim.SGD"}}
            write_run(tmp_path / f"{net}{seed}", losses=[1.0 + 10 * number], config=config)
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"group": "seed"})
    assert {line["title"]: line["ys"] for line in page.lines("val/loss")} == {"model=neta.Net": [1], "model=netb.Net": [11]}
    assert sorted(page.column("model")) == ["neta.Net"] * 2 + ["netb.Net"] * 2


def test_a_long_value_is_shown_from_where_it_differs(driver: Any, tmp_path: Path) -> None:
    for last in (8, 512):
        write_run(tmp_path / f"last{last}", losses=[1.0 + last], config={"model": {"widths": [8] * 30 + [last]}})
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html")
    assert page.column("model.widths") == ["… 8, 8, 8, 8, 8]", "… 8, 8, 8, 8, 512]"]
    whole = [cell.get_attribute("title") for cell in page.find("#table td:last-child")]
    assert whole[1] == f"[{'8, ' * 30}512]"
    assert "Equal: configuration" not in difference(driver, tmp_path)


def test_a_last_value_that_is_not_finite_is_nan(driver: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[3.0, 2.0], config={"seed": 0})
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "split": "val", "loss": None, "mae": None}) + "\n" for step in (30, 40))
    report(tmp_path)
    page = Page(driver, tmp_path / "report.html", {"chosen": ["a"]})
    assert (page.column("best val/loss"), page.column("last val/loss")) == (["★ 2.0000"], ["nan"])
    assert "val/loss 2.0000 20 nan val/mae nan" in " ".join(page.find("#chosen")[0].text.split())
    assert page.lines("val/loss")[0]["xs"] == [10, 20]
    assert command("mode=status", root=tmp_path).output.splitlines()[2].split()[:3] == ["a", "preempted", "40"]


def test_a_run_that_is_the_root_has_its_own_name(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[1.0], config={})
    assert [run.label for run in RunReader(tmp_path / "run").read()[0]] == ["run"]
    assert command("mode=status", root=tmp_path / "run").output.splitlines()[2].startswith("run ")


# --- while runs go on


def test_a_page_is_written_again_while_a_run_goes_on(driver: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "a", losses=[3.0, 2.0], config={"seed": 0})
    line = [sys.executable, "train.py", "mode=report", f"run.root={root}", "report.every_s=0.2"]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as writing:
        try:
            assert writing.stderr is not None
            assert "every 0.2 s until Ctrl-C" in writing.stderr.readline()
            page = Page(driver, root / "report.html", {"smooth": 0.5})
            text = "return document.documentElement.dataset.drawn ? document.body.innerText : ''"  # at once: it is loaded again and again
            assert "live" in page.script(text) and "1.2500" not in page.script(text)
            with open(root / "a" / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": 30, "split": "val", "loss": 1.25}) + "\n")
            run = finished(*TINY, "trainer.max_epochs=2", root=root / "new")  # it goes on while the page is open
            page.wait(lambda: "2 runs: 1 preempted 1 finished" in (shown := page.script(text)) and "1.2500" in shown)
            assert page.script("return report.ui.smooth") == 0.5
        finally:
            writing.send_signal(signal.SIGINT)
        assert writing.wait() == 0
    page = Page(driver, root / "report.html")
    assert page.find("#live") == []
    losses = sorted([1.25, run.summary["metrics"]["val"]["best"]["loss"]])
    assert page.column("best val/loss") == [f"★ {losses[0]:.4f}", f"{losses[1]:.4f}"]


def test_a_page_that_nobody_writes_any_more_says_so_and_rests(driver: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[1.0], config={})
    write_page(*RunReader(tmp_path).read(), tmp_path / "report.html", title="runs", every_s=0.5)
    page = Page(driver, tmp_path / "report.html")
    page.script("""const {written} = JSON.parse(document.getElementById("data").textContent)
        history.replaceState({top: 0, written, seen: Date.now() - 12000}, "")
        location.reload()""")
    page.wait(lambda: "no longer updated" in page.script("return document.body.innerText"))
    page.script("window.here = true")
    page.find("#filter")[0].send_keys("a")
    page.wait(lambda: page.script("return performance.now()") > 1500)  # it would have been loaded again
    assert page.script("return window.here") is True


def test_only_runs_that_have_changed_are_read_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, losses=[1.0], config={})
    reader = RunReader(tmp_path)
    first, _ = reader.read()
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 30, "split": "val", "loss": 0.5}) + "\n")
    second, _ = reader.read()
    assert second[0] is first[0] and second[1] is not first[1]
    assert second[1].last["val/loss"] == 0.5
    shutil.rmtree(tmp_path / "a")
    assert [run.label for run in reader.read()[0]] == ["b"]


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
    assert sorted(page.column("run")) == sorted([IMAGE, SCRIPT, "a", "b\ufffdc"])
    assert set(page.column("state")) == {SCRIPT}
    assert f"model.{IMAGE}" in page.heads()
    assert {SCRIPT, IMAGE, "<%= window.hacked = 1 %>", "{{7*7}}"} <= set(page.column("model.kind"))
    page.find("#columns summary")[0].click()
    for label in page.find("#column-list label"):
        if SCRIPT in label.text:
            label.click()
            break
    page.wait(lambda: f"best val/{SCRIPT}" in page.heads() or f"last val/{SCRIPT}" in page.heads())
    page.find("#title")[0].click()
    page.row("a").click()
    page.wait(lambda: [cell.text for cell in page.find("tr.is-chosen td.run")] == ["a"])
    page.find("#table td.run input")[0].click()
    page.wait(lambda: not page.script("return document.getElementById('chosen').hidden"))
    assert page.script("return window.hacked") is None
    assert page.find("img, body script:not(#data):not(:last-of-type)") == []


# --- what is read


def test_real_runs_are_in_their_report(driver: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for lr in ("0.01", "0.02"):
        finished(*TINY, "trainer.max_epochs=2", f"optimizer.lr={lr}", root=root)
    assert f"2 runs: 2 finished: {root}/report.html" in report(root)
    page = Page(driver, root / "report.html")
    rows = {path.parent.name: json.loads(path.read_text()) for path in root.glob("default/*/summary.json")}
    losses = [rows[label]["metrics"]["test"]["last"]["loss"] for label in page.column("run")]
    assert page.column("test/loss") == [f"{loss:.4f}" for loss in losses]
    assert page.column("state") == ["finished"] * 2
    assert sorted(page.column("optimizer.lr")) == ["0.01", "0.02"]
    assert page.heads()[5:] == ["optimizer.lr"]  # and nothing that follows from where they were run
    page.choose_option("x", "time")
    assert all(0 < line["xs"][0] < line["xs"][-1] for line in page.lines("train/loss"))
    page.find("#table td.run input")[0].click()
    page.find("#table td.run input")[1].click()
    (text,) = page.wait(lambda: [panel.text for panel in page.find("#chosen p")])
    assert "Their rows differ first at step" in text and "Equal: code." in text


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
    start = {"git": 1, "packages": ["x"], "code": ["y"], "command": {"a": 1}, "host": None}
    (paths["odd values"] / "provenance.json").write_text(json.dumps({"starts": [start], "code": {"y": 3}}))
    (paths["odd values"] / "predictions").mkdir()
    lines = '[1]\n{"a": 1e999, "b": [1], "c": null, "d": 2}\n{"torn'
    (paths["odd values"] / "predictions" / "test.jsonl").write_text(lines)
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
    assert (whole.last["val/loss"], whole.numbers["step"], whole.state) == (1.0, 20, "preempted")
    assert next(run for run in runs if run.label == "torn metrics").curves == whole.curves
    odd = next(run for run in runs if run.label == "odd values")
    assert (odd.origin["packages"], odd.origin["code"], odd.predictions) == ({}, {}, {"test": [{"d": 2}]})


def test_a_long_training_curve_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[1 / n for n in range(1, 1001)], config={})
    (run,), _ = RunReader(tmp_path).read()
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
    assert ended.output == f"run.root: {root} has no run (a directory that contains runs)\n"
    assert not (root / "report.html").exists()


def test_what_a_report_does_not_use_is_refused(tmp_path: Path) -> None:
    ended = command("mode=report", "optimizer.lr=1", "model=mlp", root=tmp_path / "runs")
    assert ended.code == 78
    assert ended.output.splitlines() == ["optimizer.lr: does nothing with mode=report (run.root and report.every_s alone)",
                                         "model: does nothing with mode=report (run.root and report.every_s alone)"]  # fmt: skip
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
