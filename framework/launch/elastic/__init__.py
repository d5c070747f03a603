"""Elastic runs: nodes that come and go."""
