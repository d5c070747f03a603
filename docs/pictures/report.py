"""Take the pictures of docs/evaluate.md: real runs, in headless Chromium, light and dark.

    python docs/pictures/report.py [ROOT]     ROOT: an existing folder of runs; without it a small sweep is run first

Needs selenium, and Debian's chromium and chromium-driver (tests/install_debian.sh).
"""

import io
import json
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.browser import browser  # noqa: E402  # of this checkout

SWEEP = ["-m", "optimizer.lr=2e-3,1e-2", "seed=0,1,2", "trainer.max_epochs=8", "trainer.eval_every=10"]
FAILING = [
    "optimizer.lr=1e30",
    "trainer.max_epochs=8",
    "trainer.eval_every=10",
    "rehearse=false",
]  # its loss is soon not finite


def take(page: Path, target: Path, *, scheme: str, state: dict[str, Any]) -> None:
    driver = browser(width=1400, height=1000, scheme=scheme)
    try:
        driver.get(f"{page.as_uri()}#{urllib.parse.quote(json.dumps(state))}")
        driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")
        picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    finally:
        driver.quit()
    picture.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)
    print(f"{target}: {target.stat().st_size} bytes")


def main(given: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(given[0]).resolve() if given else Path(folder, "runs")
        for line in [["mode=report"]] if given else [SWEEP, FAILING, ["mode=report"]]:
            command = [sys.executable, f"{ROOT}/train.py", *line, f"run.root={root.name}"]
            subprocess.run(command, cwd=root.parent, check=line is not FAILING)
        page = root / "report.html"
        for scheme, state in (("light", {}), ("dark", {"group": "seed"})):
            take(page, HERE / f"report_1400_{scheme}.png", scheme=scheme, state=state)


if __name__ == "__main__":
    main(sys.argv[1:])
