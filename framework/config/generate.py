"""What is made from the schema: the keys in conf/ and docs/keys.md, and a JSON schema for editors.

`python -m framework.config.generate` writes the files.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from framework.config.folders import CONF, groups
from framework.config.launch import LaunchSection, SlurmSection
from framework.config.schema import COMPONENTS, SEVERAL, RunConfig, Section, fields_of, section_of

_BELOW = "# The keys below are made from framework/config/schema.py by `python -m framework.config.generate`.\n"
_DOCS = CONF.parent / "docs" / "keys.md"


def files() -> dict[Path, str]:
    """Return the files that are made from the schema, with their contents."""
    head, below, _ = (CONF / "config.yaml").read_text().partition(_BELOW)
    run = "\n".join(_lines(RunConfig, without=groups()))
    found = {CONF / "config.yaml": f"{head}{below}{run}\n", _DOCS: _page()}
    for kind in ("local", "slurm"):
        path = CONF / "launch" / f"{kind}.yaml"
        about = path.read_text().partition("\n")[0]
        lines = [f"kind: {kind}", *_lines(LaunchSection, without=["kind", "slurm"])]
        lines += ["slurm: # null = the default of the site's Slurm", *_lines(SlurmSection, indent="  ")] * (kind == "slurm")
        found[path] = "\n".join([about, *lines, ""])
    return found


def _lines(section: type[Section], *, indent: str = "", without: Sequence[str] = ()) -> Iterator[str]:
    """Yield a section's keys as lines of YAML: the key, its default, its meaning."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if name not in (*without, *COMPONENTS, *SEVERAL, "extra"):
            if not indent and inner is not None:
                yield ""
            value = "" if inner is not None else f" {_default(field)}"
            yield f"{indent}{name}:{value} # {field.description}"
            yield from _lines(inner, indent=f"{indent}  ") if inner is not None else ()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return str(field.json_schema_extra["written"])  # type: ignore[index]  # a dict: see section.setting
    return yaml.safe_dump(field.default, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _page() -> str:
    """Return the page of all keys of the framework's sections."""
    fields = ((key, field) for key, field in fields_of(RunConfig) if key not in (*COMPONENTS, *SEVERAL, "extra"))
    rows = [f"| `{key}` | `{_default(field)}` | {field.description} |"
            for key, field in fields if section_of(field.annotation) is None]  # fmt: skip
    title = "# All keys\n\nThe keys of an option are in its file: `python train.py model=gpt --help` prints them. "
    made = "This page is made from `framework/config/schema.py`.\n\n"
    return title + made + "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows, ""]).replace("`` ", "")


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of the files in conf/ that set keys of the run, such as config.yaml and experiments."""
    schema = RunConfig.model_json_schema()
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    schema.pop("required", None)
    return schema


def print_schema(words: list[str]) -> int:
    """`steadfast schema`: print the JSON schema."""
    print(json.dumps(json_schema(), indent=1))
    return 0


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
