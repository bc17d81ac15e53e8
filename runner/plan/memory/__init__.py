"""Analytical memory estimate of a training step, from its jaxpr."""
