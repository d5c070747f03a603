"""Secrets: which values are secrets, and how they are removed from text before it is written."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TextIO
from urllib.parse import quote

from framework.runtime.environment import variables

HIDDEN = "[secret]"
REMEDY = "leave it out: the library reads it from its environment variable or file"
_SHORTEST = 8  # characters; a shorter secret would also hide ordinary words

# TOKENIZERS_PARALLELISM, SSH_KEY_PATH and similar variables hold no secret.
_VARIABLE = re.compile(r"TOKEN(?!I)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|KEYS?(?:_ID)?$|(?:^|_)(?:KEYS?|PASS|PAT)(?:_|$)")
_NOT_VARIABLE = re.compile(r"_(?:FILE|PATH|DIR|NAME|TYPE)$")
_KEY = re.compile(r"(?:^|_)(?:passw(?:or)?d|passphrase|secret|credentials?|api_?key|(?:access|private|secret|auth)_key|"
                  r"(?:api|auth|access|bearer|refresh|hub|hf)_token)s?$|^token$")  # fmt: skip
_SHAPES = re.compile(
    r"""
    (?P<url>(?<=://)[^\s/@:'"]*:[^\s/'"]+(?=@))                                         # USER:PASSWORD in a URL
  | (?P<query>(?<=[?&;])(?i:[\w.-]*(?:token|key|secret|password|sig|signature)=)[^\s&'"]+)  # in its query
  | gh[opsur]_\w{30,} | github_pat_\w{20,} | glpat-[\w-]{20,} | hf_[A-Za-z0-9]{30,}     # GitHub, GitLab, Hugging Face
  | \bsk-(?=[\w-]*\d)[\w-]{20,} | \bwandb_v\d_\w{20,}                                   # OpenAI and Anthropic, wandb
  | xox[a-z]-[\w-]{10,} | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b | AIza[\w-]{35}                 # Slack, AWS, Google
  | \beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+ | (?i:(?<=bearer\ )[\w.~+/=-]{16,})             # JSON web tokens
  | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----)?  # PEM
    """,
    re.VERBOSE | re.DOTALL,
)


def redact(text: str) -> str:
    """Return `text` without the values of secret environment variables, passwords in URLs and tokens of known shapes."""
    for _, value in _from_environment():
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def _from_environment() -> Iterator[tuple[str, str]]:
    """Yield each secret with the name of the environment variable that holds it; the longest secret first."""
    found = {form: name for name, value in variables().items() if _is_secret_variable(name) for form in _forms(value)}
    for form in sorted(found, key=len, reverse=True):
        yield found[form], form


@cache
def _is_secret_variable(name: str) -> bool:
    name = name.upper()
    return _VARIABLE.search(name) is not None and _NOT_VARIABLE.search(name) is None


@cache
def _forms(value: str) -> frozenset[str]:
    """Return a value and each of its lines, unchanged and in the forms that errors and URLs use."""
    parts = {part.strip() for part in (value, *value.splitlines())}
    forms = {form for part in parts for form in (part, quote(part, safe=""), repr(part)[1:-1], json.dumps(part)[1:-1])}
    return frozenset(form for form in forms if len(form) >= _SHORTEST)


def secrets_in(config: Any, key: str = "", *, known: list[tuple[str, str]] | None = None) -> dict[str, str]:
    """Return {key: why it is a secret} for plain configuration. The result does not contain the secrets, `known` or not."""
    known = [*_from_environment()] if known is None else known
    if isinstance(config, (dict, list)):
        found: dict[str, str] = {}
        for name, value in config.items() if isinstance(config, dict) else enumerate(config):
            found |= secrets_in(value, f"{key}.{name}" if key else str(name), known=known)
        return found
    fault = None
    if is_secret_key(key) and config not in (None, "") and not isinstance(config, bool):
        fault = "has the name of a secret, and a value"
    elif isinstance(config, str):
        fault = _fault_of(config, known)
    return {key: fault} if fault else {}


def is_secret_key(key: str) -> bool:
    """Return whether a key's name shows that its value is a secret."""
    return any(_KEY.search(part) for part in key.lower().split("."))


def _fault_of(text: str, known: list[tuple[str, str]]) -> str | None:
    for name, value in known:
        if value in text:
            return f"holds the value of the environment variable {name}, a secret"
    if found := _SHAPES.search(text):
        return "holds a URL with a password" if found["url"] or found["query"] else "holds what looks like a token"
    return None


class Redacting:
    """A text stream that removes secrets from all text that is written to it; its errors are of the class `error`."""

    def __init__(self, stream: TextIO, *, error: type[OSError] = OSError) -> None:
        self._stream, self._error = stream, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._do(self._stream.write, redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, act: Callable[..., Any], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError as error:
            raise self._error(error.errno, error.strerror) from error
