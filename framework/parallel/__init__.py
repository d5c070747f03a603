"""One strategy per file: (model, *, world, forward, options) -> Engine."""
