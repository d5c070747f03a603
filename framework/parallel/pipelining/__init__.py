"""What the pipeline strategies share: the chain of a model, its stages, their schedule, their engine."""
