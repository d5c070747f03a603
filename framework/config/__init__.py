"""From a command line to checked, typed, frozen data."""
