"""Releases: checks, reproducible archives, and runs of earlier versions."""
