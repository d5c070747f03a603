"""Checkpoints: one format for the state of a run, and one protocol to commit it."""
