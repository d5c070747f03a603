"""One sink a file."""
