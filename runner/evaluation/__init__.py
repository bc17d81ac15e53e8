"""Metrics and predictions on held-out data."""
