"""The work of a run's workers, one file for each mode."""
