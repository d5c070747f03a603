"""The composition root: it turns the configuration into objects."""
