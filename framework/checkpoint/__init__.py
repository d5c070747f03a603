"""Checkpoints: one dialect of state, one commit protocol, retention."""
