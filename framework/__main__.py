"""`python -m framework ...`, which is `steadfast ...`."""

from typing import NoReturn

from framework.runtime.environment import fix_hashes


def steadfast() -> NoReturn:
    """Run this process's command line, and exit."""
    fix_hashes()
    from framework.main import entry  # which imports much

    entry()


if __name__ == "__main__":
    steadfast()
