"""Checkpoints that were changed after they were committed, with a manifest that is right all the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.checkpoint.format import digest
from framework.checkpoint.manifest import MANIFEST, manifest_text

Content = dict[str, Any]


def content_of(path: Path) -> Content:
    content: Content = json.loads((path / MANIFEST).read_text())
    return content


def edit(path: Path, change: Callable[[Content], Any]) -> None:
    """Change a manifest's content, of which the state is a part."""
    content = content_of(path)
    change(content)
    (path / MANIFEST).write_text(manifest_text(content))


def seal(path: Path) -> None:
    """Write the manifest that a save would have written for these very files."""
    nothing = {"size": 0, "xxh3_128": "0" * 32}
    files = {file.name: digest(file) if file.is_file() else nothing for file in sorted(path.iterdir()) if file.name != MANIFEST}
    edit(path, lambda content: content.update(files=files))
