"""A class becomes a model option of a project, and each strategy is tried with it."""
