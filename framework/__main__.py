"""`python -m framework ...`, which is `steadfast ...`."""

from framework.main import entry

entry()
