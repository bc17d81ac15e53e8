"""Experiments, jobs and the programs that train, evaluate and decode."""
