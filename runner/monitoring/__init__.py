"""Metrics, logs, reports, profiles and health checks of a run."""
