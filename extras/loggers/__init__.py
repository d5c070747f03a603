"""Loggers: they use only what a logger of your own can use."""
