"""Checkpoints that were changed after they were committed, with a manifest that is right all the same; and of format 1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.checkpoint.hashed import digest
from framework.checkpoint.manifest import MANIFEST, manifest_text
from framework.checkpoint.state import STATE
from framework.runtime.files import checksum

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
    """Write the manifest that a save would have written for these very files, in the format of the one that is there."""
    is_old = content_of(path)["format"] == 1

    def entry(file: Path) -> Content:
        if not file.is_file():
            return {"size": 0, **({"blake2b": "0" * 128} if is_old else {"xxh3_128": "0" * 32})}
        return dict(zip(("size", "blake2b"), checksum(file))) if is_old else digest(file)

    files = {file.name: entry(file) for file in sorted(path.iterdir()) if file.name != MANIFEST}
    edit(path, lambda content: content.update(files=files))


def make_format_1(path: Path) -> None:
    """Make a checkpoint what it was before format 2, in which the state has moved into the manifest."""
    content = content_of(path)
    for shard in path.glob("shard-*"):
        shard.rename(path / f"{shard.stem}-model-00001-of-{len(content['files']):05d}.safetensors")
    (path / STATE).write_text(json.dumps(content["state"], indent=1) + "\n")
    (path / MANIFEST).write_text(manifest_text({"format": 1, "step": content["step"], "files": {}}))
    seal(path)
