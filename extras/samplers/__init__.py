"""Samplers: they use only what a sampler of your own can use."""
