"""The code that the pipeline strategies share: a model's chain, its stages, their schedule and their engine."""
