"""Explicit pipeline schedules: tables of who runs what at which tick."""
