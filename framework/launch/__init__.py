"""Launching: from a command line to workers, by our own agent or under torchrun."""
