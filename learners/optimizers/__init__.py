"""Optimizers and their wrappers."""
