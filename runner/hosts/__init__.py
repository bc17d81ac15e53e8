"""Runs of several processes: start, agreement, and what to do when one dies."""
