"""One file for each strategy, and the code that several strategies share."""
