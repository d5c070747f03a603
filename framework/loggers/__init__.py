"""The loggers, one sink per file."""
