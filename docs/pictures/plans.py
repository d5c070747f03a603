"""The pictures of docs/pictures.md: `python docs/pictures/plans.py` draws them with the page's own commands."""

import re
import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from framework.cli.draw import draw_plan  # noqa: E402

NAMES = ["plan_schedule", "plan_mesh", "plan_pipeline_1f1b", "plan_pipeline_zbv", "plan_memory"]

if __name__ == "__main__":
    page = (HERE.parent / "pictures.md").read_text()
    pattern = r"^python train\.py draw (.*)\n```\n\n!\[.*\]\(pictures/(\w+)\.png\)$"
    commands = {name: command for command, name in re.findall(pattern, page, re.MULTILINE)}
    for name in NAMES:
        if code := draw_plan([*shlex.split(commands[name]), f"out={HERE / name}.png"]):
            sys.exit(code)
