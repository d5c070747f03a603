"""A run's directory: lock, summary, metrics file. Also: views of many runs, such as table, status, report and curves."""
