"""Secrets reach neither the configuration nor anything that a run writes or prints."""

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest

from extras.loggers.tensorboard import TensorBoard
from framework.config.folders import groups, option_node, options
from framework.data.synthetic import Synthetic
from framework.runtime.secrets import HIDDEN, is_secret_key, redact, secrets_in
from tests.harness import Ended, before_each, command, refused

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=16", "dataset.num_test=16", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "trainer.max_epochs=2", "trainer.log_every=1", "checkpoint.every=4",
    "logger=[tensorboard,wandb]", "logger.wandb.mode=offline",
]  # fmt: skip
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]
VARIABLES = {  # every value has the canary in it
    "SERVICE_API_KEY": "canary-3141592653589793",
    "DB_PASSWORD": 'canary with "quotes", a \\ and spaces',
    "SIGNING_KEY": "-----BEGIN PRIVATE KEY-----\ncanaryMIIEvQIBADANBg\ncanarykqhkiG9w0BAQEF\n-----END PRIVATE KEY-----",
    "WANDB_API_KEY": "canary" * 6 + "0123",
}
URL = "postgres://someone:canary-p4ss@host.example/db"
STORY = f"cannot reach {URL} with {VARIABLES['SERVICE_API_KEY']}, {VARIABLES['DB_PASSWORD']}\nor {VARIABLES['SIGNING_KEY']}"


def assert_no_canary(ended: Ended) -> None:
    assert "canary" not in ended.output, ended.output
    for path in ended.root.rglob("*"):
        assert "canary" not in str(path)
        if path.is_file():
            assert b"canary" not in path.read_bytes(), path


def plant_talk() -> None:
    """Have the data and a sink say secrets in every way there is, and the run go on."""
    os.environ |= VARIABLES

    def talk(data: Synthetic, split: str) -> None:
        print(STORY)
        print(STORY, file=sys.stderr)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(STORY, stacklevel=1)
        logging.getLogger("a.library").warning("%s", STORY)
        logging.getLogger("steadfast").warning("%r", STORY)
        try:
            raise OSError(STORY)
        except OSError:
            logging.getLogger("steadfast").exception("no connection")

    def failing_log(self: TensorBoard, row: object) -> None:
        raise ConnectionError(STORY)

    before_each(Synthetic, "load", talk)
    TensorBoard.log = failing_log


def plant_failure() -> None:
    """Have a sample fail with secrets in the error, and in the one that caused it."""
    os.environ |= VARIABLES

    def transform(self: Synthetic, *args: object, **kwargs: object) -> None:
        try:
            raise KeyError(VARIABLES["DB_PASSWORD"])
        except KeyError as error:
            raise ValueError(STORY.replace("\n", " ")) from error

    Synthetic.transform = transform


def test_what_is_printed_logged_and_recorded_is_rid_of_secrets(tmp_path: Path) -> None:
    run = command(*RUN, *DDP, root=tmp_path / "runs", before=plant_talk)
    assert run.code == 0, run.output
    assert_no_canary(run)
    log = (run.directory / "train.log").read_text()
    assert f"postgres://{HIDDEN}@host.example/db" in log and f"postgres://{HIDDEN}@host.example/db" in run.output
    assert "logger tensorboard is off" in log
    assert list(run.directory.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_an_error_of_the_data_is_told_without_its_secrets(tmp_path: Path) -> None:
    line = [*RUN, *DDP, "dataset.num_workers=1", "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=plant_failure)
    assert failed.code == 1, failed.output
    assert_no_canary(failed)
    assert f"postgres://{HIDDEN}@host.example/db" in failed.summary["error"]
    assert "ValueError: cannot reach" in (failed.directory / "train.log").read_text()


REFUSED = [
    ("name", ["name=run-canary-3141592653589793"], "the value of the environment variable SERVICE_API_KEY"),
    ("name", ["name=${oc.env:SERVICE_API_KEY}"], "the value of the environment variable SERVICE_API_KEY"),
    ("logger.wandb.project", ["logger=wandb", "logger.wandb.project=x-${oc.env:WANDB_API_KEY}"], "variable WANDB_API_KEY"),
    ("dataset.root", ["dataset=text", f"dataset.root='{URL}'"], "a URL with a password"),
    ("logger.wandb.project", ["logger=wandb", "logger.wandb.project='https://x.example/?a=1&api_key=canary1'"], "a URL with"),
    ("logger.wandb.project", ["logger=wandb", "logger.wandb.project=ghp_canary" + "a1" * 16], "what looks like a token"),
    ("logger.wandb.api_key", ["logger=wandb", "+logger.wandb.api_key=canary"], "has the name of a secret"),
    ("dataset.password", ["dataset.password=canary"], "has the name of a secret"),
    ("dataset.password", ["dataset.password=[canary"], "has the name of a secret"),
    ("optimizer.options.token", ["optimizer.options={token: canary}"], "has the name of a secret"),
]


@pytest.mark.parametrize(("key", "overrides", "what"), REFUSED, ids=[" ".join(line)[:40] for _, line, _ in REFUSED])
def test_a_secret_in_the_configuration_is_refused(
    key: str, overrides: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    said = refused(*overrides)
    (line,) = [line for line in said.splitlines() if line.startswith(f"{key}: ")]
    assert what in line and "leave it out" in line and "canary" not in said


def test_every_option_of_ours_is_free_of_secrets() -> None:
    for group in groups():
        for option in options(group):
            assert secrets_in(option_node(group, option)) == {}, (group, option)


def test_a_key_that_holds_a_secret_is_told_from_others() -> None:
    secret = (
        "api_key apiKey password db_password secret client_secret hf_token token access_token aws_secret_access_key credentials"
    )
    assert [key for key in secret.split() if not is_secret_key(f"logger.x.{key}")] == []
    others = "key monitor max_tokens num_tokens pad_token cls_token vocab_size seed keep_last num_keys tokenizer"
    assert [key for key in others.split() if is_secret_key(f"dataset.{key}")] == []


@pytest.mark.parametrize(
    "text",
    [
        "https://user:canary@host/x", "redis://:canary@host:6379/0", "https://user:ca@nary@host/", "postgresql+psycopg://u:canary@h/d",
        "https://x.example/a?b=1&X-Amz-Signature=canary1", "Authorization: Bearer canary123456789012345",
        "ghp_canary" + "x" * 30, "github_pat_canary" + "x" * 30, "hf_canary" + "x" * 30, "sk-canary-1" + "x" * 30,
        "glpat-canary" + "x" * 20, "xoxb-canary-1234567890", "eyJcanary12345.eyJcanary12345.canary",
        "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_secrets_of_known_shapes_are_hidden(text: str) -> None:
    hidden = redact(f"before {text} after")
    assert "canary" not in hidden and "nary" not in hidden
    assert hidden.startswith("before ") and hidden.endswith(" after") and HIDDEN in hidden


@pytest.mark.parametrize(
    "text",
    [
        "https://host:8080/a@b", "ssh://git@host/repo", "step 8/8  loss 2.3285", "s3://bucket/key=value", "a@b.example",
        "sk-learn", "models.gpt.GPT", "runs/default/7a7e0f60f02d", "git@github.com:a/b.git", "time: 12:30 @ noon",
    ],
)  # fmt: skip
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_only_long_values_of_variables_with_telling_names_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "MY_TOKEN": "canary-token", "TOKENIZERS_PARALLELISM": "false-false", "SSH_KEY_PATH": "/home/someone/key", "SHORT_KEY": "abc",
        "TOKENIZER_NAME": "bert-base-uncased", "PWD": "/somewhere/else", "KEYBOARD": "us-international",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert redact(" ".join(values.values())) == " ".join([HIDDEN, *list(values.values())[1:]])
