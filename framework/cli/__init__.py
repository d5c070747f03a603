"""The command line: the choice of a mode and a launcher."""
