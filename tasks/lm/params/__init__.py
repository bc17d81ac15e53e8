"""Experiments of language modelling, one module per family."""
