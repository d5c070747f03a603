"""Tokens on their way to experts that lie on other processes, and back."""
