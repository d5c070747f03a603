"""What the pipeline strategies share: the chain of a model, its stages, their schedule and their engine."""
