"""A key has one place, the schema: conf/, docs/keys.md, the JSON schema for editors and the identity are made from it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from framework.config.folders import CONF
from framework.config.generate import files
from framework.config.identity import EXECUTION
from framework.config.schema import STATIC_KEYS, RunConfig
from tests.harness import typed


def test_the_files_are_those_that_the_schema_gives() -> None:
    made = files()
    assert {path.name for path in made} == {"config.yaml", "keys.md", "local.yaml", "slurm.yaml"}
    stale = [str(path) for path, text in made.items() if path.read_text() != text]
    assert not stale, "run python -m framework.config.generate"


def test_a_key_of_the_schema_has_a_default_a_meaning_and_a_mark() -> None:
    page = (CONF.parent / "docs" / "keys.md").read_text()
    whole = yaml.safe_load((CONF / "config.yaml").read_text())
    assert whole["trainer"]["max_epochs"] == RunConfig.model_fields["trainer"].default.max_epochs == 40
    assert "| `trainer.max_epochs` | `40` | passes over the training set |" in page
    assert "trainer.profile" in EXECUTION and "run" in EXECUTION and "trainer.max_epochs" not in EXECUTION
    rows = [line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| `")]
    assert all(rows) and len(rows) > 60


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = typed("schema", directory=tmp_path_factory.mktemp("schema"))
    assert printed.code == 0
    return json.loads(printed.output)


def test_editors_accept_our_own_files_and_name_a_key_that_is_none(schema: dict[str, Any]) -> None:
    def faults(text: str) -> list[str]:
        validator = jsonschema.Draft202012Validator(schema)
        return [error.message for error in validator.iter_errors(yaml.safe_load(text))]

    assert faults((CONF / "config.yaml").read_text()) == []
    assert [fault for path in Path(CONF / "experiment").glob("*.yaml") for fault in faults(path.read_text())] == []
    assert faults("trainer: {max_stepz: 3}") and faults("checkpoint: {keep_last: 0}") and faults("invariance: bits")
    assert faults("trainer: {max_steps: 3}") == []
    names = {key for key in STATIC_KEYS if "." not in key}
    assert names <= schema["properties"].keys()
    assert schema["$defs"]["TrainerSection"]["properties"]["max_epochs"]["description"] == "passes over the training set"
