"""The one dialect of state and its commit protocol."""
