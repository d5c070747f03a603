"""One command line: which mode, which launcher."""
