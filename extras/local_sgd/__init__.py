"""Processes that train alone between averages: local SGD, DiLoCo and gossip."""
