"""The exchange of tokens with experts on other processes."""
