"""Dataset arguments that are URLs: local copies replace them."""

from typing import Any

from framework.config.identity import mapped
from framework.config.schema import Node
from framework.runtime.objects import StoreFailed, is_url, local_copy, url_problems

_PATHS = ("root", "data_files", "tokenizer")  # the dataset arguments that name files


def with_copy(value: Any, key: str) -> Any:
    """Return the path of a local copy for a URL, or another value. ValueError if a file is missing or access is denied."""
    if not _has_copy(value, key):
        return value
    if problems := url_problems(f"dataset.{key}", value):
        raise ValueError(str(problems[0]))
    try:
        return local_copy(value)
    except StoreFailed as failure:
        if not failure.is_wrong:
            raise
        raise ValueError(f"dataset.{key}: {failure}") from failure


def _has_copy(value: Any, key: str) -> bool:
    return key.rpartition(".")[2] in _PATHS and is_url(value)


def with_urls(text: str, node: Node) -> str:
    """Return a text with the original URLs instead of the paths of a dataset's copies, because the user knows the URLs."""
    urls = list[str]()
    mapped(node, lambda value, key: urls.append(value) if _has_copy(value, key) else None)
    for url in urls:
        text = text.replace(local_copy(url), url)
    return text
