"""Runs that are interrupted on purpose, and what is left of them."""
