"""`steadfast init PATH`: writes a small project of one's own that trains and passes its test."""

import shutil
import sys
from pathlib import Path

from framework.config.folders import ROOT
from framework.runtime.exits import Exit

_PACKAGED = Path(__file__).with_name("project")  # in an installation
TEMPLATE = _PACKAGED if _PACKAGED.is_dir() else ROOT / "examples" / "project"


def write_project(arguments: list[str]) -> int:
    """Copy the template to the one path that is given, which must be missing or an empty directory. Returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("init: needs one path (steadfast init PATH)", file=sys.stderr)
        return Exit.CONFIGURATION
    target = Path(arguments[0])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        print(f"init: {target} exists already (a new path, or an empty directory)", file=sys.stderr)
        return Exit.CONFIGURATION
    try:
        shutil.copytree(TEMPLATE, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        (target / "gitignore").rename(target / ".gitignore")
    except OSError as error:
        print(f"init: {target} cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.DISK
    print(f"{target} is a project: cd {target} && steadfast experiment=first")
    return Exit.FINISHED
