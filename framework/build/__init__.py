"""The composition root: from the configuration to objects."""
