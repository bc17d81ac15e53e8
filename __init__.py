"""Paxon configures, proves and trains large models in JAX."""
