"""Paxon configures, checks and trains large models in JAX."""

__version__ = "0.1.0"
