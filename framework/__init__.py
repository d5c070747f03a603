"""Steadfast: a run is its configuration; how it is executed does not change what it computes."""
