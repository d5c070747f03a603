"""A run's directory: lock, summary, metrics file; and what is read from many of them: table, status, report, curves."""
