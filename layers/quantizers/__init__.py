"""Discrete codes of vectors."""
