"""Check of the devices of a run."""
