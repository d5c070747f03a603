"""The configuration: from a command line to checked, typed, frozen data."""
