"""Experiments: complete, named configurations."""
