"""One strategy a file, and what several of them share."""
