"""Elastic runs: nodes that join and leave."""
