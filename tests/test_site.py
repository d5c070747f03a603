"""The documentation as a site: it is built without a network and without a warning, and a link that leads nowhere is one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

pytestmark = pytest.mark.slow


def built(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    words = ["-q", "-W", "--keep-going", "-c", str(source / "docs"), str(source), str(target)]
    return subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = built(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


def test_every_page_is_in_it_and_is_reached_from_the_first(site: Path) -> None:
    first = (site / "docs" / "index.html").read_text()
    for page in PAGES:
        html = (site / page).with_suffix(".html")
        assert html.is_file(), page
        assert page == "docs/index.md" or f"{html.stem}.html" in first, f"{page} is in no table of contents"


def test_it_needs_nothing_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", page.read_text()), page
