"""Dataset arguments that are URLs: local copies replace them."""

from collections.abc import Iterator
from typing import Any

from framework.config.schema import Node
from framework.runtime.objects import StoreFailed, is_url, local_copy, url_problems

_PATHS = ("root", "data_files", "tokenizer")  # the dataset arguments that name files


def with_copies(value: Any, name: str) -> Any:
    """Return a dataset argument with local copies for the URLs in it. ValueError if a file is missing or access is denied."""
    if isinstance(value, dict):
        return {inner: with_copies(item, inner) for inner, item in value.items()}
    if isinstance(value, list):
        return [with_copies(item, name) for item in value]
    if name not in _PATHS or not is_url(value):
        return value
    if problems := url_problems(f"dataset.{name}", value):
        raise ValueError(str(problems[0]))
    try:
        return local_copy(value).path
    except StoreFailed as failure:
        if not failure.is_wrong:
            raise
        raise ValueError(f"dataset.{name}: {failure}") from failure


def _urls(value: Any, name: str = "") -> Iterator[str]:
    """Yield the URLs that a dataset gets copies of."""
    if isinstance(value, (dict, list)):
        for inner, item in value.items() if isinstance(value, dict) else ((name, item) for item in value):
            yield from _urls(item, inner)
    elif name in _PATHS and is_url(value):
        yield value


def with_urls(text: str, node: Node) -> str:
    """Return a text with the original URLs instead of the paths of a dataset's copies, because the user knows the URLs."""
    for url in _urls(node):
        text = text.replace(local_copy(url).path, url)
    return text
